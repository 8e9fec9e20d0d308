"""Buckets: several tensors as one range of bytes, described by metadata in ms-swift's format.

A bucket is sent in *pieces*: a large tensor by itself, straight from its memory and into its destination; small ones
together. Both sides compute the same pieces from the metadata alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from coordexp.errors import RolloutError

LONE_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a bucket: bytes ``[start_idx, end_idx)``. ``numel`` counts bytes too, as ms-swift has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start_idx: int
    end_idx: int
    numel: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type that ``dtype`` names."""
        return getattr(torch, self.dtype.removeprefix("torch."))

    def payload(self) -> dict[str, Any]:
        """As it is announced: JSON can hold it."""
        return asdict(self) | {"shape": list(self.shape)}


def describe(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorInfo, ...]:
    """Metadata of a bucket that holds these tensors in this order."""
    infos, start = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        infos.append(TensorInfo(name, tuple(tensor.shape), str(tensor.dtype), start, start + size, size))
        start += size
    return tuple(infos)


def read_infos(payload: Sequence[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    """Metadata received over HTTP, checked: known dtypes, sizes that fit shapes, no gap and no overlap.

    Raises:
        RolloutError: naming the tensor.
    """
    infos, expected_start = [], 0
    for item in payload:
        try:
            start, end = int(item["start_idx"]), int(item["end_idx"])
            shape = tuple(int(side) for side in item["shape"])
            info = TensorInfo(str(item["name"]), shape, str(item["dtype"]), start, end, end - start)
        except (KeyError, TypeError, ValueError) as error:
            raise RolloutError(f"bucket metadata {dict(item)!r} is not a tensor's description ({error})") from error
        dtype = getattr(torch, info.dtype.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise RolloutError(f"{info.name}: {info.dtype!r} is not a number type of torch")
        size = math.prod(info.shape) * dtype.itemsize
        if (info.start_idx, info.numel) != (expected_start, size) or min(info.shape, default=0) < 0:
            raise RolloutError(
                f"{info.name}: bytes {info.start_idx}…{info.end_idx} do not hold {info.shape} of {info.dtype} after "
                f"byte {expected_start}"
            )
        infos.append(info)
        expected_start = info.end_idx
    if not infos:
        raise RolloutError("a bucket without tensors")
    return tuple(infos)


def pieces(infos: Sequence[TensorInfo]) -> list[list[int]]:
    """Indices of the tensors that are sent together: first all small ones, which are loaded while large ones arrive
    (one by one they would leave the network idle in between), then each large one by itself, in order."""
    large = [[index] for index, info in enumerate(infos) if info.numel >= LONE_PIECE_BYTES]
    small = [index for index, info in enumerate(infos) if info.numel < LONE_PIECE_BYTES]
    return [small, *large] if any(infos[index].numel for index in small) else large


def piece_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of one piece: a view of a lone contiguous tensor, a copy of several."""
    flat = [as_bytes(tensor) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(number of bytes,) uint8; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def unpack(bytes_N: torch.Tensor, infos: Sequence[TensorInfo]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a piece, as views of its bytes where their alignment allows."""
    named = []
    for info, part in zip(infos, bytes_N.split([info.numel for info in infos]), strict=True):
        aligned = part if part.storage_offset() % info.torch_dtype.itemsize == 0 else part.clone()
        named.append((info.name, aligned.view(info.torch_dtype).view(info.shape)))
    return named


def in_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors of at most ``bucket_bytes`` together; a larger tensor is a bucket of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        more = tensor.numel() * tensor.element_size()
        if bucket and size + more > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket
