"""A checksum of named weights, the same on CPU and GPU, which trainer and engine compute from their own memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from coordexp.weight_sync.buckets import as_bytes

# SplitMix64's constants (Steele, Lea & Flood, OOPSLA 2014, DOI 10.1145/2660193.2660195).
_STEP = 0x9E3779B97F4A7C15
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1
_WORDS_ON_CPU = 1 << 16  # at once: small enough for the cache, which makes it several times as fast
_WORDS_ON_GPU = 1 << 24


def tensor_hash(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's contents and of each word's place: swapped rows are noticed, as are signs of zero.

    Of the bytes as little-endian 64-bit words x₀ … (the last filled up with zeros): the number of bytes and the sum of
    SplitMix64's mix of xᵢ + (i + 1)·STEP. Integer arithmetic modulo 2^64 only, so the same on every device.
    """
    bytes_N = as_bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bytes_N.device)
    num_whole = bytes_N.numel() // 8
    whole = bytes_N[: num_whole * 8]
    # 64-bit words are read from multiples of 8 only, and a row inside a parameter may begin in the middle of one.
    words = (whole if whole.storage_offset() % 8 == 0 else whole.clone()).view(torch.int64)
    at_once = _WORDS_ON_GPU if bytes_N.device.type == "cuda" else _WORDS_ON_CPU
    places = torch.arange(min(at_once, num_whole), device=bytes_N.device, dtype=torch.int64) * _signed(_STEP)
    for start in range(0, num_whole, at_once):
        total += _sum(words[start : start + at_once], places, start)
    rest = bytes_N[num_whole * 8 :]
    if rest.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=bytes_N.device)
        last[: rest.numel()] = rest
        total += _sum(last.view(torch.int64), places.new_zeros(1), num_whole)
    return (int(total) + bytes_N.numel()) & _MASK


def _sum(words: torch.Tensor, places: torch.Tensor, start: int) -> torch.Tensor:
    """Sum of SplitMix64(words); ``start``: index of words[0] in the tensor. ``places``: i·STEP."""
    mixed = words + (places[: words.numel()] + _signed((start + 1) * _STEP))
    for shift, factor in (*_MIXES, (_LAST_SHIFT, 1)):
        mixed ^= (mixed >> shift) & (_MASK >> shift)  # torch's shift copies the sign
        if factor != 1:
            mixed *= _signed(factor)
    return mixed.sum()


def _signed(number: int) -> int:
    """This number modulo 2^64 as one of torch's signed 64-bit integers."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def combined(hashes: Mapping[str, int]) -> str:
    """One hexadecimal checksum of all tensors by name, in any order."""
    text = "\n".join(f"{name}={hashes[name]:016x}" for name in sorted(hashes))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
