"""Patches of vLLM on CPUs. Importing this module applies them to the process; with a GPU it changes nothing.

Two kinds of process import it: workers, through the worker extension, and engine cores, through the executor classes
below, which an engine's ``distributed_executor_backend`` names. vLLM must be importable.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from vllm.compilation import caching
from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast
from vllm.model_executor.layers import utils as linear_layers
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from coordexp.modeling import cpu_products

# vLLM packs each linear weight into a private layout and empties the parameter. New weights could then not be loaded,
# and a tied language head would keep its old packed copy. So linear layers compute from their plain weights. The patch
# must be applied before the engine loads its model; vLLM resolves the worker extension earlier than that.


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = cpu_products.linear  # pyright: ignore[reportArgumentType]


# vLLM's processes spin on their shared-memory queues for a second after each message. With a GPU that is cheap; on a
# CPU it takes a core from the trainer that pushes weights to them. So a reader spins for the length of a decoding step,
# then sleeps for growing intervals, and after a second waits for the writer's notification. Notifications alone are not
# enough while messages are frequent, because ZeroMQ may drop them.

SPIN_S = 0.02  # a decoding step of a small model is shorter
BACKOFF_S = 1.0
IDLE_MS = 100  # a lost notification of an idle queue costs at most this


class _SleepingCondition(shm_broadcast.SpinCondition):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.busy_loop_s = 0
        self._waiting_since: float | None = None

    def record_read(self) -> None:
        super().record_read()
        self._waiting_since = None

    def wait(self, timeout_ms: int | None = None) -> None:
        # It may return early; the caller then checks the queue and waits again.
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited_s = now - self._waiting_since
        if waited_s < SPIN_S:
            os.sched_yield()
        elif waited_s < BACKOFF_S:
            time.sleep(min(waited_s / 8, 5e-3))  # late by at most an eighth of the wait
        else:
            super().wait(IDLE_MS if timeout_ms is None else min(IDLE_MS, timeout_ms))


# On CPUs vLLM starts a worker process even if an engine has one worker, to bind its threads to cores. We do not bind
# them. The process would cost another import of vLLM per start and two passes through a queue per decoding step, so
# the worker runs in the engine's core process, as it does with a GPU. It meets itself by a temporary file, and vLLM
# leaves one of each start; all groups exist when the executor is ready.


class CoreExecutor(UniProcExecutor):
    def _distributed_args(self) -> tuple[str, int, int]:
        self._address, rank, local_rank = super()._distributed_args()
        return self._address, rank, local_rank

    def _init_executor(self) -> None:
        super()._init_executor()
        if self._address.startswith("file://"):
            Path(self._address.removeprefix("file://")).unlink(missing_ok=True)


class WorkersExecutor(MultiprocExecutor):
    """vLLM's own; importing it from this module patches the core process."""


# Workers of a tensor-parallel CPU engine sum their results in shared memory, under a name in /dev/shm.
# Under torchrun that name is the same for every run (-tp:0-[0-1]-cpushm_0), and vLLM refuses one that exists
# (errno 17): a killed run would stop every later start. So our name contains the process that started the workers, and
# is removed when all of them have mapped the memory, which stays until they end.

SHARED_MEMORY = Path("/dev/shm")
_SharedMemory = cpu_communicator._CPUSHMDistributed
_vllms_group_name, _vllms_init = _SharedMemory.make_group_name, _SharedMemory._init_cpu_shm


def _group_name_of_run(communicator: Any) -> str:
    parent = Path(f"/proc/{os.getppid()}/stat")
    started = parent.read_text().rpartition(")")[2].split()[19] if parent.exists() else ""
    return f"{_vllms_group_name(communicator)}-{os.getppid()}-{started}"


def _init_unnamed(self: Any) -> int:
    handle = _vllms_init(self)  # ends with a barrier
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        if path.name.startswith(self.group_name.lstrip("/") + "_"):
            path.unlink(missing_ok=True)  # another rank may be faster
    return handle


# With drafts vLLM repeats each request's temperature, top_p and top_k for its drafted positions. Its kernel for CPUs
# writes them to an integer copy that is dropped, so sampling would use uninitialised memory. Greedy decoding does not
# read them.


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


# A step whose drafts are all empty, as the first of each answer, has no drafted position. vLLM's top_k for CPUs takes
# the largest k of all positions, of which there is none, and the engine ends.
_constraints = rejection_sampler.apply_sampling_constraints


def _apply_sampling_constraints(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, metadata: Any) -> torch.Tensor:
    return _constraints(logits, cu_num_draft_tokens, metadata) if len(logits) else logits


# If a request's cache lacks only its last token, vLLM pads its draft with ids of -1, which must be rejected. The kernel
# for CPUs takes -1 as an index, and compares a random number with the probability that it finds there. An infinite
# random number makes it reject the draft.
_random_sample = rejection_sampler._rejection_random_sample


def _rejection_random_sample(
    sampled: torch.Tensor, ends: torch.Tensor, draft: torch.Tensor, draft_probs: None, probs: torch.Tensor,
    bonus: torch.Tensor, recovered: torch.Tensor, uniform: torch.Tensor, *rest: Any,
) -> None:  # fmt: skip
    uniform = uniform.masked_fill(draft < 0, torch.inf)
    _random_sample(sampled, ends, draft.clamp(min=0), draft_probs, probs, bonus, recovered, uniform, *rest)


_rejection_random_sample.register_warmup = _random_sample.register_warmup  # pyright: ignore[reportFunctionMemberAccess]

# A step that reads only a part of a prompt samples a token all the same, and drops it. vLLM then rewinds the request's
# generator by an offset, which generators of CPUs do not have. So their state is put back instead: an answer's random
# numbers do not depend on how its prompt was divided.
_vllms_sample, _vllms_bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync


def _dropped(runner: Any) -> list[int]:
    batch = runner.input_batch
    rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
    return [row for row in rows if row in batch.generators]


@wraps(_vllms_sample)
def _sample(self: Any, *args: Any, **options: Any) -> Any:
    generators = self.input_batch.generators
    states = {row: generators[row].get_state() for row in _dropped(self)}
    sampled = _vllms_sample(self, *args, **options)
    for row, state in states.items():
        generators[row].set_state(state)
    return sampled


@wraps(_vllms_bookkeeping)
def _bookkeeping_sync(self: Any, *args: Any, **options: Any) -> Any:
    generators = self.input_batch.generators
    hidden = {row: generators.pop(row) for row in _dropped(self)}
    try:
        return _vllms_bookkeeping(self, *args, **options)
    finally:
        generators.update(hidden)


# vLLM stores the compiled model. On CPUs that is Inductor's own function, which has nothing to finalize after loading,
# but vLLM finalizes it all the same, fails, and compiles again at each start. The cache's key also says that linear
# layers compute from plain weights: without these patches, vLLM would store another function under the same key.
_vllms_hash_factors = caching.aot_compile_hash_factors


def _hash_factors(vllm_config: Any) -> list[str]:
    return [*_vllms_hash_factors(vllm_config), "CoordExp: linear layers of plain weights"]


def _finalize_loading(self: Any, vllm_config: Any) -> None: ...


if current_platform.is_cpu():
    GPUModelRunner._sample = _sample  # pyright: ignore[reportAttributeAccessIssue]
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync  # pyright: ignore[reportAttributeAccessIssue]
    caching.aot_compile_hash_factors = _hash_factors
    BundledAOTAutogradSerializableCallable.finalize_loading = _finalize_loading  # pyright: ignore[reportAttributeAccessIssue]
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = _apply_sampling_constraints
    rejection_sampler._rejection_random_sample = _rejection_random_sample  # pyright: ignore[reportAttributeAccessIssue]
    linear_layers.dispatch_cpu_unquantized_gemm = _plain_linear
    shm_broadcast.SpinCondition = _SleepingCondition
    _SharedMemory.make_group_name = staticmethod(_group_name_of_run)
    _SharedMemory._init_cpu_shm = _init_unnamed
