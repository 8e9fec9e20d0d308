"""The checksum of weights: the same from any memory layout, another one after any change of value or place."""

from __future__ import annotations

import pytest
import torch

from coordexp.rollouts.engine import checksum
from coordexp.rollouts.engine.checksum import combined, tensor_hash


def by_definition(tensor: torch.Tensor) -> int:
    words = tensor.contiguous().view(-1).view(torch.int32).tolist()
    step = 0x9E3779B97F4A7C15
    return (sum(word * (place * step + 1) for place, word in enumerate(words)) + len(words)) % (1 << 64)


def test_the_hash_is_a_weighted_sum_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(3, 37, generator=torch.Generator().manual_seed(0))
    expected = by_definition(weights)
    assert tensor_hash(weights) == expected
    monkeypatch.setattr(checksum, "_CHUNK", 16)
    assert tensor_hash(weights) == expected
    assert tensor_hash(weights.T.contiguous().T) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_change_shows(dtype: torch.dtype) -> None:
    original = (torch.arange(24).view(4, 6) % 7).to(dtype)
    changed = [original.clone() for _ in range(3)]
    changed[0][1, 2] += 1
    changed[1][[0, 3]] = original[[3, 0]]  # two rows in each other's place
    changed[2] = torch.cat([original.view(-1), torch.zeros(1, dtype=dtype)])
    hashes = {tensor_hash(tensor) for tensor in (original, *changed)}
    assert len(hashes) == 4


def test_signs_of_zero_and_nans_count() -> None:
    values = torch.tensor([0.0, -0.0, float("nan")])
    assert len({tensor_hash(value[None]) for value in values}) == 3


def test_names_count_and_their_order_does_not() -> None:
    assert combined({"a": 1, "b": 2}) == combined({"b": 2, "a": 1})
    assert len({combined({"a": 1, "b": 2}), combined({"a": 2, "b": 1}), combined({"a": 1}), combined({})}) == 4
