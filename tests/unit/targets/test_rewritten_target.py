"""``rollout_matching.target.answer: rewritten``: contents of the target, and its supervised tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordexp.coords import TURN_END, CoordVocab
from coordexp.geometry import mask_iou
from coordexp.matching import MatchingConfig
from coordexp.records import GTObject, TokenRole
from coordexp.targets import SampleOutcome, SupervisionWeights, TargetPolicy, build_gt_target, build_target
from support.answers import CAT, DOG, LEAF, NEAR_CAT, answer, entry, outcome_of, taught_text, tiny_vocab, vocabs
from support.qwen_tokenizer import qwen_vocab

NEAR_DOG = GTObject("dog", "bbox_2d", (505, 510, 690, 790))
OWL = GTObject("owl", "bbox_2d", (800, 10, 990, 200))  # not annotated
OUTLINE = GTObject("tom", "poly", (10, 20, 200, 20, 200, 220, 10, 220))
REWRITTEN = TargetPolicy("rewritten")


def rewritten(
    written: Sequence[GTObject],
    truth: Sequence[GTObject],
    vocab: CoordVocab,
    policy: TargetPolicy = REWRITTEN,
    **options: Any,
) -> SampleOutcome:
    text = answer(*(entry(n, obj) for n, obj in enumerate(written, start=3)))
    return outcome_of(text, truth, vocab, policy=policy, **options)


def names(got: SampleOutcome, vocab: CoordVocab) -> list[tuple[str, str]]:
    return [(key, body["desc"]) for key, body in json.loads(taught_text(got, vocab)).items()]


def text_of(got: SampleOutcome, vocab: CoordVocab, *roles: TokenRole) -> str:
    pairs = zip(got.target.token_ids, got.target.roles_T.tolist(), strict=True)
    return vocab.decode([token for token, role in pairs if role in roles])


@vocabs
def test_matched_objects_keep_the_models_order_and_coordinates_with_annotated_names(make_vocab) -> None:
    vocab = make_vocab()
    got = rewritten([NEAR_DOG, OWL, NEAR_CAT], [CAT, LEAF, DOG], vocab)
    assert names(got, vocab) == [
        ("object_1", "dog"), ("object_2", "owl"), ("object_3", "black cat"), ("object_4", "leaf"),
    ]  # fmt: skip
    target = got.target
    written = [vocab.bin_of(target.token_ids[p]) for p in target.coord_pos_K]
    assert written == [*NEAR_DOG.bins, *NEAR_CAT.bins, *LEAF.bins]
    assert target.coord_bin_K.tolist() == [*DOG.bins, *CAT.bins, *LEAF.bins]
    assert target.box_bin_M4.tolist() == [list(DOG.bins), list(CAT.bins)]
    assert (target.appended_gt_idx, target.appended_object_index) == ((1,), (4,))


def test_an_unmatched_object_is_masked_with_its_separator() -> None:
    vocab = tiny_vocab()
    got = rewritten([NEAR_DOG, OWL, NEAR_CAT], [CAT, DOG], vocab)
    assert text_of(got, vocab, TokenRole.MASKED) == ", " + entry(2, OWL)
    taught = {*TokenRole} - {TokenRole.MASKED, TokenRole.EOS}
    assert text_of(got, vocab, *taught) == "{" + entry(1, NEAR_DOG) + ", " + entry(
        3, replace(NEAR_CAT, desc="black cat")
    ) + "}"  # fmt: skip
    assert text_of(got, vocab, TokenRole.REWRITTEN_DESC) == "dogblack cat"


def test_a_fused_token_that_touches_a_masked_entry_is_masked() -> None:
    vocab = qwen_vocab()
    got = rewritten([OWL, NEAR_CAT], [CAT], vocab)
    masked = text_of(got, vocab, TokenRole.MASKED)
    assert entry(1, OWL)[1:] in masked and masked.endswith(("},", "}, "))  # Qwen writes `},` in one token
    assert "black cat" not in masked and got.target.roles_T[-2:].tolist() == [TokenRole.CLOSE, TokenRole.EOS]
    alone = rewritten([OWL], [], vocab).target  # its closing brace is fused with the root's, which stays taught
    assert alone.roles_T[-2:].tolist() == [TokenRole.CLOSE, TokenRole.EOS]


@vocabs
def test_a_match_of_the_other_geometry_is_replaced_by_the_annotation(make_vocab) -> None:
    vocab = make_vocab()
    got = rewritten([OUTLINE, OWL], [CAT], vocab)
    body = json.loads(taught_text(got, vocab))
    assert body["object_1"] == json.loads("{" + entry(1, CAT) + "}")["object_1"]
    assert got.target.coord_bin_K.tolist() == list(CAT.bins)
    assert {TokenRole.GT_COORD, TokenRole.GT_DESC} <= {TokenRole(int(r)) for r in got.target.roles_T}
    assert (got.target.matched_gt_idx, got.target.appended_gt_idx) == ((0,), ())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (TargetPolicy("rewritten"), ["cat", "owl", "owl", "dog", "leaf"]),  # CAT's twin and the owls stay
        (TargetPolicy("rewritten", unmatched="drop"), ["cat", "dog", "leaf"]),
        (TargetPolicy("rewritten", duplicates="drop"), ["cat", "owl", "dog", "leaf"]),
        (TargetPolicy("rewritten", duplicates="replace"), ["cat", "owl", "dog", "leaf"]),
        (TargetPolicy("rewritten", missed="in_order"), ["dog", "cat", "owl", "owl", "leaf"]),
        (TargetPolicy("rewritten", "drop", "replace", "in_order"), ["cat", "dog", "leaf"]),
    ],
)
@vocabs
def test_unmatched_duplicate_and_missed_objects(make_vocab, policy, expected) -> None:
    vocab = make_vocab()
    truth = [DOG, replace(CAT, desc="cat"), LEAF]
    got = rewritten([NEAR_CAT, OWL, replace(OWL, bins=(801, 10, 990, 201))], truth, vocab, policy)
    assert [desc for _, desc in names(got, vocab)] == expected


@vocabs
def test_only_a_replaced_duplicate_gives_its_place_to_the_next_missed_object(make_vocab) -> None:
    vocab = make_vocab()
    answered = [NEAR_CAT, replace(NEAR_CAT, bins=(13, 25, 195, 231)), NEAR_DOG]
    for policy, expected in (
        (TargetPolicy("rewritten", duplicates="replace"), ["black cat", "leaf", "dog"]),
        (TargetPolicy("rewritten", duplicates="drop"), ["black cat", "dog", "leaf"]),
    ):
        got = rewritten(answered, [CAT, LEAF, DOG], vocab, policy)
        assert [desc for _, desc in names(got, vocab)] == expected
        assert got.target.appended_object_index == (expected.index("leaf") + 1,)
        assert got.target.left_out_pred_idx == (1,)


@pytest.mark.parametrize(
    ("duplicates", "expected", "left_out"),
    [
        ("keep", [("black cat", 15), ("owl", 800), ("black cat", 10), ("dog", 500)], ()),
        ("drop", [("black cat", 10), ("owl", 800), ("dog", 500)], (0,)),
        ("replace", [("black cat", 10), ("owl", 800), ("dog", 500)], (0,)),
    ],
)
def test_a_matched_copy_takes_the_place_of_the_first_one(duplicates, expected, left_out) -> None:
    """Kept and masked, the first copy would teach the model to write an object that it has written."""
    vocab = tiny_vocab()
    cat = replace(CAT, bins=(10, 20, 200, 240))
    first, better = replace(cat, bins=(15, 20, 150, 240)), replace(cat, bins=(10, 20, 195, 240))
    got = rewritten([first, OWL, better], [cat, DOG], vocab, TargetPolicy("rewritten", duplicates=duplicates))
    written = json.loads(taught_text(got, vocab)).values()
    assert [(body["desc"], int(re.findall(r"\d+", body["bbox_2d"][0])[0])) for body in written] == expected
    assert got.target.left_out_pred_idx == left_out
    assert got.target.coord_bin_K.tolist() == [*cat.bins, *DOG.bins]


@pytest.mark.parametrize(
    ("duplicates", "expected"),
    [("keep", ["black cat", "owl", "black cat"]), ("drop", ["owl", "black cat"]), ("replace", ["black cat", "owl"])],
)
def test_an_attempt_at_a_missed_object_is_a_copy_of_it(duplicates, expected) -> None:
    """Its IoU is a third: too little for a match, too much for another object."""
    vocab = tiny_vocab()
    attempt = replace(CAT, bins=(10, 20, 76, 220))  # of 10 to 200
    assert mask_iou(attempt, CAT) == pytest.approx(1 / 3)
    got = rewritten(
        [attempt, OWL],
        [CAT],
        vocab,
        TargetPolicy("rewritten", duplicates=duplicates),
        matching=MatchingConfig(maskiou_gate=0.5),
    )
    assert [desc for _, desc in names(got, vocab)] == expected
    assert got.target.coord_bin_K.tolist() == [*CAT.bins]


@pytest.mark.parametrize("duplicates", ["drop", "replace"])
@pytest.mark.parametrize(
    ("answered", "truth", "expected", "left_out"),
    [
        ([(CAT, 150), (DOG, 195)], CAT, [("black cat", 195)], (0,)),  # renamed to the name before it
        ([(DOG, 195), (CAT, 150)], CAT, [("black cat", 195)], (1,)),  # renamed to the name after it
        ([(DOG, 150), (DOG, 195)], CAT, [("black cat", 195)], (0,)),  # copies as the model wrote them
        ([(OWL, 150), (DOG, 195)], CAT, [("owl", 150), ("black cat", 195)], ()),  # the place is equal, the names never
        ([(CAT, 150), (OUTLINE, 195)], CAT, [("black cat", 200)], (0,)),  # written as the annotation's box
    ],
)
def test_a_copy_is_judged_by_the_name_that_is_written(duplicates, answered, truth, expected, left_out) -> None:
    """Objects match by geometry alone: one that is renamed can become the copy of a masked object of that name."""
    vocab = tiny_vocab()
    placed = [
        replace(obj, bins=(10, 20, x2, 220) if obj.kind == "bbox_2d" else (10, 20, x2, 20, x2, 220, 10, 220))
        for obj, x2 in answered
    ]
    got = rewritten(placed, [truth], vocab, TargetPolicy("rewritten", duplicates=duplicates))
    written = json.loads(taught_text(got, vocab)).values()
    assert [(body["desc"], int(re.findall(r"\d+", body["bbox_2d"][2])[0])) for body in written] == expected
    assert got.target.left_out_pred_idx == left_out


def test_an_unmatched_object_with_a_control_token_is_dropped() -> None:
    vocab = qwen_vocab()
    got = rewritten([replace(OWL, desc="owl <|box_start|>"), NEAR_CAT], [CAT], vocab)
    assert len(got.parsed.objects) == 2 and got.target.left_out_pred_idx == (0,)
    assert [desc for _, desc in names(got, vocab)] == ["black cat"]


@vocabs
@pytest.mark.parametrize("response", ["", "no idea", '{"object_1": {"desc": "cat", "bbox', "[]" + TURN_END])
def test_an_answer_without_valid_objects_becomes_the_annotations(make_vocab, response: str) -> None:
    vocab = make_vocab()
    got = outcome_of(response, [CAT, LEAF], vocab, policy=REWRITTEN)
    truth = build_gt_target([CAT, LEAF], vocab, sample_id="sample", field_order="desc_first")
    assert got.target.token_ids == truth.token_ids
    assert got.target.roles_T.tolist() == truth.roles_T.tolist()
    assert got.target.coord_bin_K.tolist() == truth.coord_bin_K.tolist()


@vocabs
def test_a_soft_object_has_weighted_text_and_no_coordinate_loss(make_vocab) -> None:
    vocab = make_vocab()
    soft_cat, soft_leaf = replace(CAT, soft=0.5), replace(LEAF, soft=0.25)
    for policy in (TargetPolicy(), REWRITTEN):
        weights = SupervisionWeights(rollout_fn_desc_ce=1.0)
        truth = [soft_cat, DOG, soft_leaf]
        target = rewritten([NEAR_CAT, NEAR_DOG], truth, vocab, policy, weights=weights).target
        assert target.coord_bin_K.tolist() == list(DOG.bins)
        assert target.box_bin_M4.tolist() == [list(DOG.bins)]
        assert (target.roles_T == TokenRole.SOFT_COORD).sum() == len(CAT.bins) + len(LEAF.bins)
        text_T = target.weights["struct_ce"] + target.weights["desc_ce"]
        desc = TokenRole.REWRITTEN_DESC if policy is REWRITTEN else TokenRole.GT_DESC
        assert set(text_T[target.roles_T == desc].tolist()) == ({0.5, 1.0} if policy is REWRITTEN else {0.25})
        assert set(text_T.tolist()) == ({0.0, 0.25, 0.5, 1.0} if policy is REWRITTEN else {0.0, 0.25, 1.0})
    gt = build_gt_target([soft_cat, DOG], vocab, sample_id="gt", field_order="desc_first")
    assert gt.coord_bin_K.tolist() == list(DOG.bins)
    hard = build_gt_target([CAT, DOG], vocab, sample_id="gt", field_order="desc_first")
    assert gt.token_ids == hard.token_ids
    assert set(gt.weights["desc_ce"].tolist()) == {0.0, 0.5, 1.0} and set(hard.weights["desc_ce"].tolist()) == {
        0.0,
        1.0,
    }


def test_target_defaults_are_the_contracts() -> None:
    vocab = qwen_vocab()
    got = rewritten([NEAR_CAT, OWL], [CAT, DOG], vocab, TargetPolicy())
    plain = build_target(got.parsed, got.match, [CAT, DOG], vocab, sample_id="sample")
    assert plain.token_ids == got.target.token_ids and plain.prefix_len == len(got.parsed.prefix_token_ids) > 0
