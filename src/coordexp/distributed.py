"""Ranks, and messages between them. Torch is imported only when a process group may exist.

Messages are numbers of the host (errors, counts, stop signals, metrics). They go through gloo also where gradients go
through NCCL: a message by NCCL waits until the GPU has finished all that was requested of it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from coordexp import errors
from coordexp.out_of_memory import facts_of, is_out_of_memory

if TYPE_CHECKING:
    from torch import device

logger = logging.getLogger("coordexp")

_has_joined = False  # whether this process has been in a process group
FIRST_PRINTS_S = 2.0  # by which the first rank of a machine may be later than another one
RENDEZVOUS = "COORDEXP_RENDEZVOUS"
"""The variable that names the file in which the processes of ``coordexp launch`` meet."""


def rank() -> int:
    """This process's rank under torchrun; 0 alone, whatever ``RANK`` an earlier job left. Raises ConfigError."""
    count, place = world_size(), _number("RANK", 0)
    if count > 1 and place >= count:
        raise errors.ConfigError(f"RANK is {place} and WORLD_SIZE is {count}: {_LEFT_OVER}")
    return place if count > 1 else 0


def world_size() -> int:
    """Number of trainer processes under torchrun; 1 alone. Raises ConfigError."""
    return max(1, _number("WORLD_SIZE", 1))


def on_this_machine() -> tuple[int, int]:
    """Place and number of torchrun's processes on this machine; (0, 1) alone, whatever an earlier job left. Raises
    ConfigError."""
    if world_size() == 1:
        return 0, 1
    return _number("LOCAL_RANK", 0), max(1, _number("LOCAL_WORLD_SIZE", 1))


def be_alone() -> None:
    """For a command that starts its own ranks, or has none: drop the variables that an earlier job or this pod left. A
    later rank prints nothing, and any rank waits for the others."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


_LEFT_OVER = (
    "start several processes with torchrun or coordexp launch, which set all of these variables; unset them for a "
    "process alone: env -u RANK -u WORLD_SIZE coordexp …"
)


def _number(variable: str, unset: int) -> int:
    text = os.environ.get(variable) or str(unset)
    if not (text.isascii() and text.isdigit()):
        raise errors.ConfigError(f"the environment variable {variable} is {text!r}, not a number: {_LEFT_OVER}")
    return int(text)


def is_main() -> bool:
    """Whether this process is the one that writes what a run writes once: rank 0."""
    return rank() == 0


def warn(text: str) -> None:
    """Log a warning about what is the same on all ranks: once, on the first one."""
    if is_main():
        logger.warning(text)


def join(*, use_cpu: bool, timeout_s: float = 1800.0) -> None:
    """Initialise the process group of torchrun's processes; those of ``coordexp launch`` meet in a file. Does nothing
    in a single process, or if there is a group. ``use_cpu``: although there are GPUs. Raises ConfigError without
    torchrun's variables, or with threads that are no number."""
    if world_size() == 1:
        return
    import torch
    import torch.distributed as dist

    global _has_joined
    if dist.is_initialized():
        _has_joined = True
        return
    on_cpus = use_cpu or not torch.cuda.is_available()
    needed = ["RANK", *([] if RENDEZVOUS in os.environ else ["MASTER_ADDR", "MASTER_PORT"])]
    if missing := [name for name in (*needed, *([] if on_cpus else ["LOCAL_RANK"])) if not os.environ.get(name)]:
        raise errors.ConfigError(f"WORLD_SIZE is {world_size()} without {', '.join(missing)}: {_LEFT_OVER}")
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # OpenMP itself takes lists; accelerate does not
    if on_cpus and not (threads.isascii() and threads.strip().isdigit()):
        raise errors.ConfigError(
            f"the environment variable OMP_NUM_THREADS is {threads!r}; for several processes on a CPU write one number "
            "(OMP_NUM_THREADS=1), or unset it"
        )
    _has_joined = True
    if not on_cpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Messages are on the CPU in any case.
    name, timeout = "gloo" if on_cpus else "cuda:nccl,cpu:gloo", timedelta(seconds=timeout_s)
    for variable, value in ({} if on_cpus else NCCL_WATCHDOG).items():
        os.environ.setdefault(variable, value)
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous is None:
        dist.init_process_group(name, timeout=timeout)
    else:
        store = dist.FileStore(rendezvous, world_size())
        store.set_timeout(timeout)
        dist.init_process_group(name, store=store, rank=rank(), world_size=world_size(), timeout=timeout)
    if not on_cpus:
        limit_waits("cuda", min(timeout_s, MOST_NCCL_S))


# torch's watchdog of NCCL: end the process when a call fails or is late (3), and notify the other ranks.
NCCL_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_PROPAGATE_ERROR": "1"}
# Ranks agree by Gloo before they exchange gradients, so they meet in NCCL within the time of a forward pass; a rank
# that takes longer has failed or hangs. torch's own limit for NCCL.
MOST_NCCL_S = 600.0


def limit_waits(device_type: str, timeout_s: float) -> None:
    """Set the timeout of collective calls on tensors of one kind of device; others keep theirs."""
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    group._get_backend(torch.device(device_type))._set_default_timeout(timedelta(seconds=timeout_s))


def _messages_device() -> device:
    """Where a message's tensor must be; on the GPU only in a group that another program made, of NCCL alone."""
    import torch
    import torch.distributed as dist

    has_gloo = "cpu:" in dist.get_backend_config()
    return torch.device("cpu") if has_gloo else torch.device("cuda", torch.cuda.current_device())


def all_reduce(values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
    """Element-wise reduction of a vector over all ranks, in float64; the vector itself without a process group.

    Every rank must call it with equally many values.
    """
    if world_size() == 1:
        return [float(value) for value in values]
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64, device=_messages_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return tensor.tolist()


def barrier() -> None:
    """Wait for all ranks; nothing to wait for without a process group."""
    all_reduce([0.0], "sum")


def gather_json(value: Any) -> list[Any]:
    """Every rank's ``value`` (anything JSON can hold), in rank order, on every rank. No pickle crosses processes."""
    if world_size() == 1:
        return [value]
    import torch
    import torch.distributed as dist

    device = _messages_device()
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device))
    longest = int(max(int(length) for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    parts = [torch.zeros_like(padded) for _ in range(world_size())]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]


SAY_AFTER_S = 1.0  # seconds after which a rank that fails prints its error, although the others do not know it yet
_SHARED = "is_every_ranks"  # set on errors that all ranks have raised
CANNOT_BE_TOLD = "cannot_be_told"  # set on errors after which the others wait for this rank's part of a forward pass


@contextmanager
def raise_on_all_ranks(where: str) -> Iterator[Callable[[], None]]:
    """All ranks leave this block, or all raise the same error: that of the lowest rank that has one.

    Without it a rank that fails leaves the others waiting in the next collective. The ranks agree at the block's end,
    in a collective call, or where the block calls the function that it gets as its context: an error of one rank after
    that remains its own. Inside the block every rank must make the same collective calls, so code that may fail on
    one rank only must follow the last of them.
    """
    agreed = False

    def agree(failure: Exception | None = None) -> None:
        nonlocal agreed
        agreed = True
        if all_reduce([float(failure is not None)], "max")[0]:  # one scalar where no rank failed
            raise_first_failure(failure, where)

    try:
        yield agree
    except Exception as error:
        if getattr(error, CANNOT_BE_TOLD, False):
            raise
        if not agreed:
            try:
                with _said_if_others_are_late(error, where):
                    agree(error)
            except Exception as lost:
                if getattr(lost, _SHARED, False) or lost is error:
                    raise
                # The others cannot be notified, for example while they wait for this rank's part of a sharded forward.
                raise error from lost
        raise
    if not agreed:
        agree()


@contextmanager
def _said_if_others_are_late(error: Exception, where: str) -> Iterator[None]:
    """Write ``error`` to stderr if the other ranks do not take part within :data:`SAY_AFTER_S`: they may compute for
    minutes, or hang."""
    text = f"rank {rank()}, {where}: {type(error).__name__}: {error}; waiting for the other ranks to end too"
    timer = threading.Timer(SAY_AFTER_S, lambda: os.write(2, f"{text}\n".encode()))
    timer.daemon = True
    if world_size() > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def raise_first_failure(failure: Exception | None, where: str) -> None:
    """Raise the failure of the lowest rank that has one, on every rank with the same text. A collective call."""
    if world_size() == 1:
        if failure is not None:
            raise failure
        return
    is_shared = getattr(failure, _SHARED, False)
    kind, text = type(failure).__name__, str(failure)
    if failure is not None and is_out_of_memory(failure):  # of which only the failing rank knows what was free
        kind, text = errors.OutOfMemory.__name__, facts_of(failure)
    told = gather_json(None if failure is None else [kind, text, is_shared])
    first = next((r for r, one in enumerate(told) if one is not None), None)
    if first is None:
        return
    kind, message, is_told = told[first]
    if is_told and failure is not None:
        raise failure  # a block around another one says it no second time
    failed = sum(one is not None for one in told)
    others = f" ({failed} of {world_size()} ranks failed)" if failed > 1 else ""
    error_class = getattr(errors, kind, None)
    if not (isinstance(error_class, type) and issubclass(error_class, errors.CoordExpError)):
        error_class = RuntimeError  # another rank's bug
    shared = error_class(f"rank {first}, {where}: {message}{others}")
    setattr(shared, _SHARED, True)
    raise shared from failure


def is_every_ranks(error: BaseException) -> bool:
    """Whether all ranks have raised this same error, so that all of them reach its handler."""
    return world_size() == 1 or getattr(error, _SHARED, False)


def first_rank_prints(error: BaseException) -> None:
    """Call before an error is printed. Under torchrun the other ranks of a machine then wait: the first one prints the
    error and ends, torchrun ends the others meanwhile, and the error appears once. A rank whose error may be its own
    does not wait: it would be ended by the errors of others that only follow from it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
        return
    if is_every_ranks(error) or not _has_joined:
        time.sleep(FIRST_PRINTS_S)
