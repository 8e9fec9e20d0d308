"""vLLM's executors for CPU engines: importing them is what the engine's core process does first, and where it learns to
sleep while it waits for its workers."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from coordexp.engine.cpu import wait_asleep

wait_asleep()


class CoreExecutor(UniProcExecutor):
    """The worker lives in the engine's core process, as it does by default beside a GPU.

    vLLM starts a process for it on CPUs, to bind its threads to cores. We do not bind them; the process would cost
    another import of vLLM at every start, and every decoding step two passes through a queue.
    """


class WorkersExecutor(MultiprocExecutor):
    """A process for each of several workers: vLLM's own."""
