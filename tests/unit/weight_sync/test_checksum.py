"""The checksum of weights: the same from any memory layout, another one after any change of value or place."""

from __future__ import annotations

import pytest
import torch

from coordexp.weight_sync import buckets
from coordexp.weight_sync.buckets import combined, tensor_hash


def by_definition(tensor: torch.Tensor) -> int:
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    total = len(data)
    for place in range(0, len(data), 8):
        word = int.from_bytes(data[place : place + 8].ljust(8, b"\0"), "little")
        word = (word + (place // 8 + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> shift)) * factor % (1 << 64)
        total += word ^ (word >> 31)
    return total % (1 << 64)


@pytest.mark.parametrize("columns", [36, 37], ids=["whole words", "half a word over"])
def test_the_hash_does_not_depend_on_the_chunks(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    expected = by_definition(weights)
    assert tensor_hash(weights) == expected
    monkeypatch.setattr(buckets, "_WORDS_ON_CPU", 8)
    assert tensor_hash(weights) == expected
    assert tensor_hash(weights.T.contiguous().T) == expected
    assert tensor_hash(weights[1:]) == by_definition(weights[1:])  # begins in the middle of a word, with 37 columns


def test_two_flipped_signs_do_not_cancel() -> None:
    weights = torch.randn(64, generator=torch.Generator().manual_seed(1))
    hashes = {tensor_hash(weights)}
    for first in range(64):
        for second in range(first + 1, 64):
            flipped = weights.clone()
            flipped[[first, second]] *= -1
            hashes.add(tensor_hash(flipped))
    assert len(hashes) == 1 + 64 * 63 // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_change_changes_the_checksum(dtype: torch.dtype) -> None:
    original = (torch.arange(24).view(4, 6) % 7).to(dtype)
    changed = [original.clone() for _ in range(3)]
    changed[0][1, 2] += 1
    changed[1][[0, 3]] = original[[3, 0]]  # two rows in each other's place
    changed[2] = torch.cat([original.view(-1), torch.zeros(1, dtype=dtype)])
    hashes = {tensor_hash(tensor) for tensor in (original, *changed)}
    assert len(hashes) == 4


def test_the_checksum_includes_signs_of_zero_and_nans() -> None:
    values = torch.tensor([0.0, -0.0, float("nan")])
    assert len({tensor_hash(value[None]) for value in values}) == 3


def test_the_checksum_includes_names_but_not_their_order() -> None:
    assert combined({"a": 1, "b": 2}) == combined({"b": 2, "a": 1})
    assert len({combined({"a": 1, "b": 2}), combined({"a": 2, "b": 1}), combined({"a": 1}), combined({})}) == 4
