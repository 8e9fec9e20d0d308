"""Ranks and reductions. Torch is imported only when a process group may exist."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from coordexp import errors

RENDEZVOUS = "COORDEXP_RENDEZVOUS"
"""The variable that names the file in which the processes of ``coordexp launch`` meet."""


def rank() -> int:
    """This process's rank under torchrun; 0 alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of learner processes under torchrun; 1 alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is the one that writes what a run writes once: rank 0."""
    return rank() == 0


def all_reduce(values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
    """Element-wise reduction of a vector over all ranks, in float64; the vector itself without a process group.

    Every rank must call it with equally many values.
    """
    if world_size() == 1:
        return [float(value) for value in values]
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return tensor.tolist()


def barrier() -> None:
    """Wait for all ranks; nothing to wait for without a process group."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def gather_json(value: Any) -> list[Any]:
    """Every rank's ``value`` (anything JSON can hold), in rank order, on every rank. No pickle crosses processes."""
    if world_size() == 1:
        return [value]
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(lengths, torch.tensor([len(payload)], device=device))
    longest = int(max(int(length) for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(payload)] = payload
    parts = [torch.zeros_like(padded) for _ in range(world_size())]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, lengths, strict=True)]


_SHARED = "is_every_ranks"  # set on errors that all ranks have raised


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
        if not agreed:
            agree(error)
        raise
    if not agreed:
        agree()


def raise_first_failure(failure: Exception | None, where: str) -> None:
    """Raise the failure of the lowest rank that has one, on every rank with the same text. A collective call."""
    if world_size() == 1:
        if failure is not None:
            raise failure
        return
    is_shared = getattr(failure, _SHARED, False)
    told = gather_json(None if failure is None else [type(failure).__name__, str(failure), is_shared])
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
