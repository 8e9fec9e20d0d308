"""vLLM's executor for CPU engines: importing it is what the engine's core process does first, and where it learns to
sleep while it waits for its workers."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from coordexp.vllm_engine.cpu import wait_asleep

wait_asleep()


class CpuExecutor(MultiprocExecutor):
    """vLLM's own."""
