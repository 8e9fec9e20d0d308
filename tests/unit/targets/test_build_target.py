"""Training targets of single rollouts: corrections in place, appended objects and their numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from coordexp.coords import COORD_TOKENS, TURN_END
from coordexp.errors import AlignmentError
from coordexp.geometry import barycentric_targets
from coordexp.matching import MatchingConfig
from coordexp.records import DropReason, GTObject, Match, MatchResult, PredictedObject, TokenRole
from coordexp.targets import TransportConfig, build_target, empty_target, is_closed
from coordexp.targets.build import coordinate_targets
from support.answers import CAT, DOG, LEAF, NEAR_CAT, answer, entry, outcome_of, taught_text, vocabs
from support.qwen_tokenizer import qwen_vocab

PREFIX_ROLES = {TokenRole.MASKED, TokenRole.MATCHED_COORD, TokenRole.MATCHED_STRUCT, TokenRole.MATCHED_DESC}

NEAR_POLY = GTObject("cat", "poly", (12, 22, 198, 25, 190, 215, 15, 210))  # lies near CAT
SCENE = [CAT, LEAF, DOG]


@vocabs
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_a_matched_object_is_corrected_and_a_missed_one_appended(make_vocab, order) -> None:
    vocab = make_vocab()
    got = outcome_of(answer(entry(1, NEAR_CAT)), [DOG, CAT], vocab, field_order=order)
    target = got.target
    assert (target.matched_pred_idx, target.matched_gt_idx) == ((0,), (1,))
    assert (target.appended_gt_idx, target.appended_object_index) == ((0,), (2,))
    assert target.context == "rollout"
    assert target.token_ids[: target.prefix_len] == got.parsed.prefix_token_ids
    body = json.loads(taught_text(got, vocab))
    assert [body[key]["desc"] for key in body] == ["cat", "dog"]
    assert body["object_1"]["bbox_2d"] == [COORD_TOKENS[k] for k in NEAR_CAT.bins]  # its text stays its own
    in_prefix = target.coord_pos_K < target.prefix_len
    assert target.coord_pos_K[in_prefix].tolist() == list(got.parsed.objects[0].coord_token_idx)
    assert target.coord_bin_K[in_prefix].tolist() == list(CAT.bins)  # the ground truth
    assert target.coord_bin_K[~in_prefix].tolist() == list(DOG.bins)
    assert target.box_bin_M4.tolist() == [list(CAT.bins), list(DOG.bins)]
    assert target.box_pos_M4.tolist() == target.coord_pos_K.reshape(2, 4).tolist()  # both boxes at their own tokens
    assert set(target.roles_T[: target.prefix_len].tolist()) == PREFIX_ROLES
    assert (target.roles_T == TokenRole.MATCHED_COORD).sum() == 4
    assert not set(target.roles_T[target.prefix_len :].tolist()) & PREFIX_ROLES


def test_a_target_is_closed_if_brace_and_end_of_turn_are_supervised() -> None:
    target = outcome_of(answer(entry(1, NEAR_CAT)), [CAT], qwen_vocab()).target
    assert is_closed(target)
    unending = replace(target, roles_T=np.append(target.roles_T[:-1], np.uint8(TokenRole.MASKED)))
    assert not is_closed(unending) and not is_closed(empty_target("none"))


@pytest.mark.scenario("Poly prediction is supervised by barycentric-projected targets")
@vocabs
@pytest.mark.parametrize("predicted", [NEAR_CAT, NEAR_POLY], ids=["pred-box", "pred-poly"])
@pytest.mark.parametrize("truth", [CAT, GTObject("c", "poly", (10, 20, 200, 20, 200, 220, 10, 220))],
                         ids=["gt-box", "gt-poly"])  # fmt: skip
def test_targets_are_at_the_tokens_of_the_predicted_objects(make_vocab, predicted, truth) -> None:
    vocab = make_vocab()
    # A false positive before and after: its tokens must stay untouched.
    text = answer(entry(3, DOG), entry(1, predicted), entry(2, DOG))
    got = outcome_of(text, [truth], vocab)
    (own,) = [obj for obj in got.parsed.objects if obj.index == 1]
    target = got.target
    assert target.coord_pos_K.tolist() == list(own.coord_token_idx)
    assert [vocab.bin_of(target.token_ids[p]) for p in target.coord_pos_K] == list(predicted.bins)
    assert np.flatnonzero(target.roles_T == TokenRole.MATCHED_COORD).tolist() == list(own.coord_token_idx)
    assert len(target.coord_bin_K) == len(predicted.bins)
    # Every predicted corner is near its own corner of the annotation.
    if predicted.kind == "bbox_2d":
        assert target.coord_bin_K.tolist() == [10, 20, 200, 220]
    elif truth.kind == "poly":
        assert target.coord_bin_K == pytest.approx([10, 20, 200, 20, 200, 220, 10, 220], abs=0.05)
    else:  # the nearest points of the box's outline
        assert target.coord_bin_K.tolist() == [10, 22, 200, 25, 190, 220, 10, 210]
    if predicted.kind == truth.kind == "bbox_2d":
        assert target.box_pos_M4.tolist() == [list(own.coord_token_idx)]
        assert target.box_bin_M4.tolist() == [[10, 20, 200, 220]]
    else:  # no loss on decoded boxes where a polygon is involved
        assert target.box_pos_M4.shape == (0, 4) and "box" not in target.weights
    assert np.flatnonzero(target.weights["coord"]).tolist() == list(own.coord_token_idx)
    assert got.num_mixed_kind == (predicted.kind != truth.kind)


def predicted_of(obj: GTObject) -> PredictedObject:
    return PredictedObject(1, obj.desc, obj.kind, obj.bins, tuple(range(len(obj.bins))), (0, 1), (0, 1), (0, 1))


SQUARE_POLY = GTObject("s", "poly", (100, 100, 200, 100, 200, 200, 100, 200))
SQUARE_BOX = GTObject("s", "bbox_2d", (100, 100, 200, 200))
TRIANGLE = GTObject("t", "poly", (120, 110, 220, 110, 220, 210))
MOVED_BOX = GTObject("s", "bbox_2d", (120, 110, 220, 210))
DIAMOND = GTObject("d", "poly", (140, 80, 190, 130, 140, 180, 90, 130))
INSIDE = GTObject("s", "poly", (110, 140, 150, 120, 190, 160, 145, 185))


@pytest.mark.scenario("Poly prediction is supervised by barycentric-projected targets")
@pytest.mark.parametrize(
    ("predicted", "truth", "wanted", "tolerance"),
    [
        (SQUARE_BOX, MOVED_BOX, (120, 110, 220, 210), 0.0),
        (SQUARE_POLY, SQUARE_POLY, (100, 100, 200, 100, 200, 200, 100, 200), 0.01),
        (SQUARE_POLY, TRIANGLE, (120, 110, 220, 110, 220, 210, 170, 160), 0.5),  # the fourth is as far from two
        (SQUARE_BOX, TRIANGLE, (120, 110, 220, 210), 0.0),  # bounds
        (SQUARE_BOX, DIAMOND, (90, 80, 190, 180), 0.0),  # no two of its vertices are the corners of its bounds
        (SQUARE_POLY, MOVED_BOX, (120, 110, 200, 110, 200, 210, 120, 200), 0.0),  # nearest points of the outline
        (INSIDE, SQUARE_BOX, (100, 140, 150, 100, 200, 160, 145, 200), 0.0),
    ],
    ids=["box-box", "same-poly", "poly-poly", "box-poly", "box-diamond", "poly-box", "poly-inside-box"],
)
def test_coordinate_targets(predicted, truth, wanted, tolerance) -> None:
    (got,) = coordinate_targets([(predicted_of(predicted), truth)], TransportConfig())
    assert got == pytest.approx(wanted, abs=tolerance)


def test_transport_settings_reach_the_targets() -> None:
    pair = predicted_of(SQUARE_POLY), TRIANGLE
    (got,) = coordinate_targets([pair], TransportConfig("l1", 50.0, 3))
    points = np.array(SQUARE_POLY.bins).reshape(-1, 2), np.array(TRIANGLE.bins).reshape(-1, 2)
    assert got == pytest.approx(barycentric_targets(*points, cost="l1", epsilon=50.0, iters=3).ravel())
    (got_10,) = coordinate_targets([pair], TransportConfig(epsilon=10.0))
    assert got_10 == pytest.approx((121.53, 110.00, 220.00, 110.00, 220.00, 208.48, 185.11, 144.88), abs=0.01)
    assert got != pytest.approx(coordinate_targets([pair], TransportConfig())[0], abs=1)


@pytest.mark.scenario("Highest retained object key controls FN start even when object is invalid")
@vocabs
@pytest.mark.parametrize(
    ("response", "keys"),
    [
        (answer(), ["object_1", "object_2"]),  # {}: an empty answer
        ("", ["object_1", "object_2"]),
        (TURN_END, ["object_1", "object_2"]),
        ("I see nothing.", ["object_1", "object_2"]),
        (f"{{{entry(1)[:-9]}", ["object_1", "object_2"]),  # cut inside the first entry
        (answer('"object_0": {}'), ["object_0", "object_1", "object_2"]),
        (answer('"object_41": 5, "x": {}'), ["object_41", "x", "object_42", "object_43"]),
        (answer(entry(7, NEAR_CAT), '"object_3": {}'), ["object_7", "object_3", "object_8"]),
        (answer(entry(2, NEAR_CAT), '"object_9": {"desc": "", "bbox_2d": []}'), ["object_2", "object_9", "object_10"]),
    ],
)
def test_appended_keys_follow_the_highest_one_kept(make_vocab, response: str, keys: list[str]) -> None:
    vocab = make_vocab()
    assert list(json.loads(taught_text(outcome_of(response, [CAT, DOG], vocab), vocab))) == keys


def test_missed_objects_keep_the_order_of_the_ground_truth() -> None:
    got = outcome_of(answer(entry(1, NEAR_CAT)), [LEAF, CAT, DOG], qwen_vocab(), MatchingConfig())
    assert got.target.appended_gt_idx == (0, 2)
    assert [body["desc"] for body in json.loads(taught_text(got, qwen_vocab())).values()] == ["cat", "leaf", "dog"]


@pytest.mark.parametrize(
    "shift",
    [
        pytest.param({"coord_token_idx": (0, 1, 2, 3)}, id="other tokens"),
        pytest.param({"coord_token_idx": (10_000, 10_001, 10_002, 10_003)}, id="after the prefix"),
        pytest.param({"coord_token_idx": (-1, -2, -3, -4)}, id="before the prefix"),
        pytest.param({"bins": (12, 25, 195, 231)}, id="other bins"),
    ],
)
def test_a_parse_of_another_rollout_is_an_error(shift: dict) -> None:
    vocab = qwen_vocab()
    parsed = outcome_of(answer(entry(1, NEAR_CAT)), [CAT], vocab).parsed
    foreign = replace(parsed, objects=(replace(parsed.objects[0], **shift),))
    match = MatchResult((Match(0, 0, 0.9),), (), (), 0)
    with pytest.raises(AlignmentError, match=r"sample 9: object_1"):
        build_target(foreign, match, [CAT], vocab, sample_id="sample 9")


def test_the_seam_is_written_as_two_tokens() -> None:
    """Appended text is tokenised separately, so the seam is not the single token that a model writes."""
    vocab = qwen_vocab()
    got = outcome_of(answer(entry(1, NEAR_CAT)), [CAT, DOG], vocab)
    seam = got.target.prefix_len
    assert [vocab.piece(t) for t in got.target.token_ids[seam - 1 : seam + 2]] == ["}", ",", ' "']
    assert "}," in [vocab.piece(t) for t in vocab.encode(taught_text(got, vocab))]


# --- which objects are appended, and how ---


def appended(outcome) -> list[str]:
    kept = json.loads(outcome.parsed.prefix_text + "}")
    return list(json.loads(taught_text(outcome, qwen_vocab())))[len(kept) :]


@pytest.mark.scenario("All GT is appended when no valid matches exist")
@pytest.mark.parametrize(
    "response",
    [
        answer(),
        "",
        "a cat",
        answer('"object_1": {"desc": "cat"}'),  # no usable prediction
        answer(entry(1, GTObject("cat", "bbox_2d", (700, 0, 900, 100)))),  # a prediction that finds nothing
        answer(entry(1, GTObject("cat", "bbox_2d", (190, 200, 420, 420)))),  # one that is gated out
    ],
)
def test_without_a_match_all_objects_are_appended(response: str) -> None:
    got = outcome_of(response, SCENE, qwen_vocab())
    assert got.match.pairs == () and got.match.fn_gt_idx == (0, 1, 2)
    assert got.target.appended_gt_idx == (0, 1, 2)
    body = json.loads(taught_text(got, qwen_vocab()))
    values = [body[key] for key in appended(got)]
    assert values == [{"desc": gt.desc, gt.kind: [COORD_TOKENS[k] for k in gt.bins]} for gt in SCENE]
    assert got.target.roles_T[-1] == TokenRole.EOS and got.target.token_ids[-1] == qwen_vocab().eos_id
    assert (got.target.coord_pos_K >= got.target.prefix_len).all()


@pytest.mark.scenario("geometry-first changes only per-object field order in FN append")
def test_geometry_first_reorders_fields_and_nothing_else() -> None:
    response = answer(entry(10, NEAR_CAT), entry(2, DOG))
    by_order = {order: outcome_of(response, SCENE, qwen_vocab(), field_order=order)
                for order in ("desc_first", "geometry_first")}  # fmt: skip
    texts = {order: json.loads(taught_text(got, qwen_vocab())) for order, got in by_order.items()}
    assert appended(by_order["geometry_first"]) == appended(by_order["desc_first"]) == ["object_11"]
    assert list(texts["geometry_first"]["object_11"]) == ["poly", "desc"]
    assert texts["geometry_first"] == texts["desc_first"]  # as mappings: the same content
    first, second = (by_order[order] for order in texts)
    assert (first.match, first.parsed) == (second.match, second.parsed)
    assert first.target.coord_bin_K.tolist() == second.target.coord_bin_K.tolist()


@pytest.mark.scenario("desc-first remains baseline append layout")
def test_desc_first_is_the_default() -> None:
    default = outcome_of(answer(), SCENE, qwen_vocab())
    explicit = outcome_of(answer(), SCENE, qwen_vocab(), field_order="desc_first")
    assert default.target.token_ids == explicit.target.token_ids
    body = json.loads(taught_text(default, qwen_vocab()))
    assert [list(value) for value in body.values()] == [["desc", "bbox_2d"], ["desc", "poly"], ["desc", "bbox_2d"]]


@pytest.mark.scenario("Ambiguous coord-slot alignment excludes object from self-context supervision")
def test_an_object_with_spelled_coordinates_is_unsupervised_and_appended() -> None:
    vocab = qwen_vocab()
    spelled = [token for char in COORD_TOKENS[12] for token in vocab.encode(char)]  # bin 12, not as one token
    head, tail = entry(1, NEAR_CAT).split(COORD_TOKENS[12])
    ids = [*vocab.encode("{" + head), *spelled, *vocab.encode(f"{tail}, {entry(2, DOG)}}}{TURN_END}")]
    got = outcome_of(ids, [CAT, DOG], vocab)
    assert got.parsed.dropped == {DropReason.AMBIGUOUS_COORDS: 1}
    assert json.loads(got.parsed.prefix_text + "}")["object_1"]["bbox_2d"] == [COORD_TOKENS[k] for k in NEAR_CAT.bins]
    assert [body["desc"] for body in json.loads(taught_text(got, vocab)).values()] == ["cat", "dog", "black cat"]
    prefix = got.target.coord_pos_K < got.target.prefix_len
    assert got.target.coord_bin_K[prefix].tolist() == list(DOG.bins)  # DOG alone, in the prefix
    assert got.target.appended_gt_idx == (0,)


@pytest.mark.scenario("One malformed object does not block training")
@pytest.mark.parametrize(
    "bad",
    [
        '"object_2": {"desc": "x", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"]}',
        '"object_2": {"desc": "x", "bbox_2d": [1, 2, 3, 4]}',
        '"object_2": {"desc": "x", "bbox": ["<|coord_1|>"]}',
        '"object_2": []',
    ],
)
def test_a_malformed_object_drops_only_itself(bad: str) -> None:
    got = outcome_of(answer(entry(1, NEAR_CAT), bad, entry(3, DOG)), SCENE, qwen_vocab())
    assert got.parsed.num_dropped == 1
    assert [obj.index for obj in got.parsed.objects] == [1, 3]
    assert appended(got) == ["object_4"]
    supervised = got.target.coord_pos_K[got.target.coord_pos_K < got.target.prefix_len]
    assert supervised.tolist() == [p for obj in got.parsed.objects for p in obj.coord_token_idx]
