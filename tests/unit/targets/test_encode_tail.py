"""Roles of the tokens of a text written from ground truth, token by token, on real token boundaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordexp.coords import append_fragment
from coordexp.errors import AlignmentError
from coordexp.records import GTObject, TokenRole
from coordexp.targets import build_gt_target, encode_tail
from support.answers import CAT, LEAF, tiny_vocab, vocabs
from support.qwen_tokenizer import qwen_vocab

LETTER = {"s": TokenRole.GT_STRUCT, "d": TokenRole.GT_DESC, "x": TokenRole.GT_COORD,
          "}": TokenRole.CLOSE, "E": TokenRole.EOS}  # fmt: skip

# One token per cell, its role above it.
QWEN_DESC_FIRST = [
    ("s", '{"'), ("s", "object"), ("s", "_"), ("s", "1"), ("s", '":'), ("s", ' {"'), ("s", "desc"), ("s", '":'),
    ("s", ' "'), ("d", "black"), ("d", " cat"), ("s", '",'), ("s", ' "'), ("s", "bbox"), ("s", "_"), ("s", "2"),
    ("s", "d"), ("s", '":'), ("s", ' ["'), ("x", "<|coord_10|>"), ("s", '",'), ("s", ' "'), ("x", "<|coord_20|>"),
    ("s", '",'), ("s", ' "'), ("x", "<|coord_200|>"), ("s", '",'), ("s", ' "'), ("x", "<|coord_220|>"), ("s", '"]'),
    ("}", "}}"), ("E", "<|im_end|>"),
]  # fmt: skip
QWEN_GEOMETRY_FIRST = [
    ("s", '{"'), ("s", "object"), ("s", "_"), ("s", "1"), ("s", '":'), ("s", ' {"'), ("s", "bbox"), ("s", "_"),
    ("s", "2"), ("s", "d"), ("s", '":'), ("s", ' ["'), ("x", "<|coord_10|>"), ("s", '",'), ("s", ' "'),
    ("x", "<|coord_20|>"), ("s", '",'), ("s", ' "'), ("x", "<|coord_200|>"), ("s", '",'), ("s", ' "'),
    ("x", "<|coord_220|>"), ("s", '"],'), ("s", ' "'), ("s", "desc"), ("s", '":'), ("s", ' "'), ("d", "black"),
    ("d", " cat"), ("}", '"}}'), ("E", "<|im_end|>"),
]  # fmt: skip
TINY_DESC_FIRST = [
    ("s", "{"), ("s", '"object_'), ("s", "1"), ("s", '": {"desc": "'), ("d", "red"), ("d", " circle"),
    ("s", '", "bbox_2d": ["'), ("x", "<|coord_10|>"), ("s", '", "'), ("x", "<|coord_20|>"), ("s", '", "'),
    ("x", "<|coord_200|>"), ("s", '", "'), ("x", "<|coord_220|>"), ("s", '"]}'), ("}", "}"), ("E", "<|im_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make_vocab", "desc", "order", "cells"),
    [
        (qwen_vocab, "black cat", "desc_first", QWEN_DESC_FIRST),
        (qwen_vocab, "black cat", "geometry_first", QWEN_GEOMETRY_FIRST),
        (tiny_vocab, "red circle", "desc_first", TINY_DESC_FIRST),
    ],
)
def test_every_token_has_its_role(make_vocab, desc, order, cells) -> None:
    vocab = make_vocab()
    target = build_gt_target([GTObject(desc, "bbox_2d", CAT.bins)], vocab, sample_id="s", field_order=order)
    assert [vocab.piece(i) for i in target.token_ids] == [piece for _, piece in cells]
    assert target.roles_T.tolist() == [LETTER[letter] for letter, _ in cells]
    coords = [position for position, (letter, _) in enumerate(cells) if letter == "x"]
    assert target.coord_pos_K.tolist() == coords
    assert target.coord_bin_K.tolist() == list(CAT.bins)
    assert target.box_pos_M4.tolist() == [coords]
    assert target.box_bin_M4.tolist() == [list(CAT.bins)]


@pytest.mark.parametrize(
    ("desc", "order", "masked", "closing"),
    [
        ("cat", "desc_first", ["cat"], "}}"),
        ("U.S.", "desc_first", ["U", ".S", '.",'], "}}"),  # the closing quote and comma are fused into the value
        ("wow!", "desc_first", ["wow", '!",'], "}}"),
        ("wow!", "geometry_first", ["wow", '!"'], "}}"),
        ('a "b"', "desc_first", ["a", ' \\"', "b", '\\"",'], "}}"),
        ("cat", "geometry_first", ["cat"], '"}}'),  # here the quote is fused into the closing brace instead
    ],
)
def test_a_token_that_touches_a_description_is_a_description_token(desc, order, masked, closing) -> None:
    vocab = qwen_vocab()
    target = build_gt_target([GTObject(desc, "bbox_2d", CAT.bins)], vocab, sample_id="s", field_order=order)
    pieces = np.array([vocab.piece(i) for i in target.token_ids], dtype=object)
    assert pieces[target.roles_T == TokenRole.GT_DESC].tolist() == masked
    assert pieces[target.roles_T == TokenRole.CLOSE].tolist() == [closing]


@vocabs
def test_descriptions_are_found_after_non_ascii_ones(make_vocab) -> None:
    vocab = make_vocab()
    descs = ["雪豹 🐆", "é", "red circle", "𓃠"]
    target = build_gt_target(
        [GTObject(d, "bbox_2d", CAT.bins) for d in descs], vocab, sample_id="s", field_order="desc_first"
    )
    runs, here = [], []
    for token_id, role in zip(target.token_ids, target.roles_T, strict=True):
        if role == TokenRole.GT_DESC:
            here.append(token_id)
        elif here:
            runs.append(vocab.decode(here))
            here = []
    assert runs == descs


def test_the_end_of_the_answer_weighs_fully_after_a_soft_object() -> None:
    """The real tokenizer fuses the entry's closing brace with the root's."""
    vocab, soft = qwen_vocab(), replace(CAT, soft=0.25)
    target = build_gt_target([soft], vocab, sample_id="s", field_order="desc_first")
    assert vocab.piece(target.token_ids[-2]).endswith("}}")
    weight_T = target.weights["struct_ce"]
    assert weight_T[-2:].tolist() == [1.0, 1.0]
    assert weight_T[:-2].max() == 0.25


@vocabs
def test_no_objects_give_an_empty_json_object(make_vocab) -> None:
    vocab = make_vocab()
    target = build_gt_target([], vocab, sample_id="s", field_order="desc_first")
    assert vocab.decode(target.token_ids) == "{}<|im_end|>"
    assert target.roles_T.tolist()[-2:] == [TokenRole.CLOSE, TokenRole.EOS]
    assert target.coord_pos_K.shape == target.coord_bin_K.shape == (0,)
    assert target.box_pos_M4.shape == target.box_bin_M4.shape == (0, 4)
    assert (target.coord_pos_K.dtype, target.box_pos_M4.dtype) == (np.int64, np.int64)
    assert (target.context, target.prefix_len, target.appended_gt_idx) == ("gt", 0, ())


@vocabs
def test_a_polygon_has_no_box_target(make_vocab) -> None:
    target = build_gt_target([LEAF, CAT, LEAF], make_vocab(), sample_id="s", field_order="desc_first")
    assert target.coord_bin_K.tolist() == [*LEAF.bins, *CAT.bins, *LEAF.bins]
    assert target.box_bin_M4.tolist() == [list(CAT.bins)]
    assert target.box_pos_M4.tolist() == [target.coord_pos_K[6:10].tolist()]
    assert target.appended_gt_idx == (0, 1, 2)


@vocabs
@pytest.mark.parametrize(
    ("desc", "complaint"),
    [
        ("a<|coord_5|>", "hold 5 coordinates, the objects have 4.*must not contain coordinate tokens"),
        ("a<|im_end|>", r"contains '<\|im_end\|>'.*control token"),
        ("<|box_start|>", r"contains '<\|box_start\|>'.*control token"),
        ("<|image_pad|>", r"contains '<\|image_pad\|>'.*control token"),
    ],
)
def test_descriptions_cannot_inject_tokens(make_vocab, desc: str, complaint: str) -> None:
    with pytest.raises(AlignmentError, match=complaint):
        build_gt_target([GTObject(desc, "bbox_2d", CAT.bins)], make_vocab(), sample_id="s", field_order="desc_first")


def test_text_that_the_tokenizer_would_change_is_refused() -> None:
    with pytest.raises(AlignmentError, match="NFC"):
        build_gt_target(
            [GTObject("e\u0301", "bbox_2d", CAT.bins)], qwen_vocab(), sample_id="s", field_order="desc_first"
        )


def test_a_fragment_of_other_objects_is_refused() -> None:
    with pytest.raises(AlignmentError, match=r"4 .* 6"):
        encode_tail(append_fragment([CAT], "{", 1, "desc_first"), [LEAF], tiny_vocab())
