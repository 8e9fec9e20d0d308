"""Weights in byte buckets arrive unchanged; their checksum is another one after any change of value or place."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import RolloutError
from coordexp.weight_sync import buckets
from coordexp.weight_sync.buckets import (
    LONE_PIECE_BYTES,
    combined,
    describe,
    in_buckets,
    piece_bytes,
    pieces,
    read_infos,
    tensor_hashes,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = [(), (0,), (3,), (2, 5), (1, 1, 7), (LONE_PIECE_BYTES // 4,), (3, LONE_PIECE_BYTES // 8 + 1)]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_a_bucket_arrives_unchanged(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    sent = [(f"t{index}", tensor(shape, dtype, index)) for index, (shape, dtype) in enumerate(kinds)]
    infos = read_infos([asdict(info) for info in describe(sent)])
    arrived: dict[str, torch.Tensor] = {}
    for piece in pieces(infos):
        bytes_N = piece_bytes([sent[index][1] for index in piece])
        arrived |= unpack(bytes_N, [infos[index] for index in piece])
    assert {info.name for info in infos if info.numel} <= arrived.keys()
    for name, after in arrived.items():
        before = dict(sent)[name]
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert torch.equal(before, after)


def test_large_tensors_are_sent_from_their_own_memory() -> None:
    large = torch.zeros(LONE_PIECE_BYTES, dtype=torch.uint8)
    named = [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", large), ("d", torch.zeros(2))]
    assert pieces(describe(named)) == [[0, 1, 3], [2]]
    assert piece_bytes([large]).data_ptr() == large.data_ptr()


def test_tensors_without_elements_are_not_sent() -> None:
    assert pieces(describe([("empty", torch.zeros(0)), ("none", torch.zeros(3, 0))])) == []


def test_a_transposed_weight_is_sent_in_the_order_of_its_shape() -> None:
    matrix = torch.arange(6.0).view(2, 3).T
    ((_, arrived),) = unpack(piece_bytes([matrix]), describe([("m", matrix)]))
    assert torch.equal(arrived, matrix)


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (4, [["a"], ["b"], ["c"], ["d"]]),
        (8, [["a"], ["b"], ["c"], ["d"]]),
        (16, [["a"], ["b"], ["c", "d"]]),
        (1 << 20, [["a", "b", "c", "d"]]),
    ],
)
def test_buckets_are_filled_and_a_larger_tensor_has_its_own(limit: int, names: list[list[str]]) -> None:
    sizes = {"a": 2, "b": 20, "c": 2, "d": 2}
    weights = [(name, torch.zeros(size, dtype=torch.float32)) for name, size in sizes.items()]
    assert [[name for name, _ in bucket] for bucket in in_buckets(weights, limit)] == names


def _info(**change: Any) -> dict[str, Any]:
    info = {"name": "w", "shape": [2, 3], "dtype": "torch.float32", "start_idx": 0, "end_idx": 24, "numel": 24}
    return info | change


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "a bucket without tensors"),
        ([{"name": "w"}], "not a tensor's description"),
        ([_info(dtype="torch.load")], "not a number type"),
        ([_info(dtype="torch.__name__")], "not a number type"),
        ([_info(shape=[2, 4])], "do not hold"),
        ([_info(shape=[-2, -3])], "do not hold"),
        ([_info(start_idx=4, end_idx=28)], "do not hold"),
        ([_info(), _info(name="v", start_idx=12, end_idx=36)], "v: bytes 12…36"),
    ],
    ids=["empty", "fields", "no dtype", "an attribute", "shape", "negative", "gap", "overlap"],
)
def test_metadata_from_the_wire_is_checked(payload: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        read_infos(payload)


# -- the checksum ------------------------------------------------------------------------------------------------------


def tensor_hash(tensor: torch.Tensor) -> int:
    return tensor_hashes([("one", tensor)])["one"]


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


@pytest.mark.parametrize("at_once", [1, 8, 50, 10_000])
def test_hashes_of_many_tensors_are_those_of_each(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 37, generator=rng)
    tensors = {
        "odd": whole, "inside": whole[1:3], "turned": whole.T, "half": torch.randn(64, 3, generator=rng).bfloat16(),
        "one": torch.tensor([-0.0]), "byte": torch.arange(3, dtype=torch.uint8), "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64), "again": whole.clone(),
    }  # fmt: skip
    monkeypatch.setattr(buckets, "_WORDS_ON_CPU", at_once)
    assert tensor_hashes(tensors.items()) == {name: by_definition(tensor) for name, tensor in tensors.items()}
    assert tensor_hashes([]) == {}


def test_two_flipped_signs_do_not_cancel() -> None:
    weights = torch.randn(32, generator=torch.Generator().manual_seed(1))
    hashes = {tensor_hash(weights)}
    for first in range(32):
        for second in range(first + 1, 32):
            flipped = weights.clone()
            flipped[[first, second]] *= -1
            hashes.add(tensor_hash(flipped))
    assert len(hashes) == 1 + 32 * 31 // 2


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
