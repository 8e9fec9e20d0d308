"""A checksum of named weights that learner and engine compute alike, on CPU or GPU, from each one's own memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_CHUNK = 1 << 22
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and as a signed 64-bit number
_MASK = (1 << 64) - 1


def tensor_hash(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's contents, each element weighted by its place: swapped rows are noticed, as are signs of
    zero. Integer arithmetic modulo 2^64 only, so the same on every device."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    weights = torch.arange(min(_CHUNK, words.numel()), device=words.device, dtype=torch.int64) * _STEP + 1
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        weighted = int((chunk * weights[: chunk.numel()]).sum())
        # Word start + i weighs (start + i) * STEP + 1.
        total += weighted + int(chunk.sum()) * start * _STEP
    return (total + words.numel()) & _MASK


def combined(hashes: Mapping[str, int]) -> str:
    """One hexadecimal checksum of all tensors by name, whatever their order."""
    text = "\n".join(f"{name}={hashes[name]:016x}" for name in sorted(hashes))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
