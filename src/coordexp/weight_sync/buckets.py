"""Buckets: several tensors as one range of bytes, described by metadata in ms-swift's format; and the checksum of
weights, the same on CPU and GPU, which trainer and engine each compute from their own memory.

A bucket is sent in *pieces*: a large tensor by itself, straight from its memory and into its destination; small ones
together. Both sides compute the same pieces from the metadata alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        return getattr(torch, self.dtype.removeprefix("torch."))


def describe(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorInfo, ...]:
    """Metadata of a bucket that holds these tensors in this order."""
    infos, start = [], 0
    for name, tensor in tensors:
        size = tensor.nbytes
        infos.append(TensorInfo(name, tuple(tensor.shape), str(tensor.dtype), start, start + size, size))
        start += size
    return tuple(infos)


def read_infos(payload: Sequence[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
    """Metadata from HTTP. Raises RolloutError for unknown dtypes, sizes that do not fit shapes, gaps and overlaps."""
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
        more = tensor.nbytes
        if bucket and size + more > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket


# SplitMix64's constants (Steele, Lea & Flood, OOPSLA 2014, DOI 10.1145/2660193.2660195).
_STEP = 0x9E3779B97F4A7C15
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1
_WORDS_ON_CPU = 1 << 16  # at once: small enough for the cache, which makes it several times as fast
_WORDS_ON_GPU = 1 << 24


def tensor_hashes(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """64 bits of each tensor's contents and of each word's place: swapped rows are noticed, as are signs of zero.

    Of the bytes as little-endian 64-bit words x₀ … (the last filled up with zeros): the number of bytes and the sum of
    SplitMix64's mix of xᵢ + (i + 1)·STEP. Integer arithmetic modulo 2^64 only, so the same on every device.
    """
    hashes: dict[str, int] = {}
    sums: defaultdict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in named:
        hashes[name] = tensor.nbytes
        sums[tensor.device][name] = _mixed_sum(as_bytes(tensor))
    for of_device in sums.values():
        for name, total in zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True):  # one wait
            hashes[name] = (hashes[name] + total) & _MASK
    return hashes


def _mixed_sum(bytes_N: torch.Tensor) -> torch.Tensor:
    """The sum of SplitMix64 of all words, as a scalar on their device."""
    # 64-bit words are read from multiples of 8 only, and a row inside a parameter may begin in the middle of one.
    if bytes_N.numel() % 8 or bytes_N.storage_offset() % 8:
        bytes_N = torch.cat([bytes_N, bytes_N.new_zeros(-bytes_N.numel() % 8)])
    words_N = bytes_N.view(torch.int64)
    total = words_N.new_zeros(())
    at_once = _WORDS_ON_GPU if bytes_N.device.type == "cuda" else _WORDS_ON_CPU
    for start in range(0, len(words_N), at_once):
        some = words_N[start : start + at_once]
        mixed = torch.arange(start + 1, start + 1 + len(some), device=some.device)
        mixed *= _signed(_STEP)
        mixed += some
        for shift, factor in (*_MIXES, (_LAST_SHIFT, 1)):
            mixed ^= (mixed >> shift) & (_MASK >> shift)  # torch's shift copies the sign
            mixed *= _signed(factor)
        total += mixed.sum()
    return total


def _signed(number: int) -> int:
    """A number below 2^64 as one of torch's signed 64-bit integers."""
    return number - (1 << 64) if number >> 63 else number


def combined(hashes: Mapping[str, int]) -> str:
    """One hexadecimal checksum of all tensors by name, in any order."""
    text = "\n".join(f"{name}={hashes[name]:016x}" for name in sorted(hashes))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def computed_by_now(device: torch.device) -> torch.cuda.Event | None:
    """An event that completes when the GPU has finished all work that this thread has submitted; None for a CPU. Other
    threads wait for it, because each thread has a current stream of its own."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
