"""Weights in byte buckets arrive unchanged, for all types and sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import RolloutError
from coordexp.weight_sync.buckets import (
    LONE_PIECE_BYTES,
    describe,
    in_buckets,
    piece_bytes,
    pieces,
    read_infos,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = [(), (0,), (3,), (2, 5), (1, 1, 7), (LONE_PIECE_BYTES // 4,), (3, LONE_PIECE_BYTES // 8 + 1)]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
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


def test_a_transposed_weight_is_sent_in_the_order_of_its_shape() -> None:
    matrix = torch.arange(6.0).view(2, 3).T
    ((_, arrived),) = unpack(piece_bytes([matrix]), describe([("m", matrix)]))
    assert torch.equal(arrived, matrix)


@pytest.mark.parametrize(
    ("limit", "names"),
    [(8, [["a"], ["b"], ["c"], ["d"]]), (16, [["a"], ["b"], ["c", "d"]]), (1 << 20, [["a", "b", "c", "d"]])],
)
def test_buckets_are_filled_and_a_larger_tensor_has_its_own(limit: int, names: list[list[str]]) -> None:
    sizes = {"a": 2, "b": 20, "c": 2, "d": 2}
    weights = [(name, torch.zeros(size, dtype=torch.float32)) for name, size in sizes.items()]
    assert [[name for name, _ in bucket] for bucket in in_buckets(weights, limit)] == names


def _info(**change: Any) -> dict[str, Any]:
    return {
        "name": "w",
        "shape": [2, 3],
        "dtype": "torch.float32",
        "start_idx": 0,
        "end_idx": 24,
        "numel": 24,
        **change,
    }


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
