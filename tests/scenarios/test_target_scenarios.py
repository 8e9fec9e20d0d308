"""The contract's scenarios about the training target: prefix, corrections, appended objects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coordexp.coords import COORD_TOKENS, TURN_END
from coordexp.geometry import barycentric_targets
from coordexp.matching import MatchingConfig
from coordexp.records import DropReason, GTObject, TokenRole
from support.answers import CAT, DOG, LEAF, answer, entry, outcome_of, taught_text
from support.qwen_tokenizer import qwen_vocab

NEAR_CAT = GTObject("cat", "bbox_2d", (12, 25, 195, 230))
NEAR_LEAF = GTObject("leaf", "poly", (310, 25, 470, 22, 485, 195))
SCENE = [CAT, LEAF, DOG]


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


@pytest.mark.scenario("Highest retained object key controls FN start even when object is invalid")
def test_first_appended_key_is_object_10_after_an_invalid_object_9() -> None:
    got = outcome_of(answer(entry(2, NEAR_CAT), '"object_9": {"desc": "", "bbox_2d": []}'), SCENE, qwen_vocab())
    assert [obj.index for obj in got.parsed.objects] == [2]
    assert got.parsed.max_object_index == 9
    assert appended(got) == ["object_10", "object_11"]


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


@pytest.mark.scenario("Poly prediction is supervised by barycentric-projected targets")
@pytest.mark.parametrize("truth", [LEAF, GTObject("leaf", "bbox_2d", (300, 20, 490, 210))], ids=["poly", "box"])
def test_a_matched_polygon_is_pulled_to_its_barycentric_projection(truth: GTObject) -> None:
    got = outcome_of(answer(entry(1, DOG), entry(2, NEAR_LEAF)), [truth, DOG], qwen_vocab(), MatchingConfig(10, 0.3))
    leaf = got.parsed.objects[1]
    own = np.isin(got.target.coord_pos_K, leaf.coord_token_idx)
    points = np.array(NEAR_LEAF.bins).reshape(-1, 2)
    if truth.kind == "poly":
        onto = np.array(truth.bins).reshape(-1, 2)
    else:
        x1, y1, x2, y2 = truth.bins
        onto = np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)])
    wanted = barycentric_targets(points, onto).ravel()
    assert got.target.coord_bin_K[own] == pytest.approx(wanted)
    assert np.abs(wanted - np.array(NEAR_LEAF.bins)).max() > 5  # not what it wrote
    # Coordinate tokens only: the polygon takes part in no box, so nothing ever decodes it.
    assert not np.isin(got.target.box_pos_M4, leaf.coord_token_idx).any()


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
