"""Detection figures from counts: one row per kind of answer."""

from dataclasses import replace

import pytest

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.evaluation.answers import ImageAnswer, make_answer
from coordexp.evaluation.detection import (
    count_image,
    detection_metrics,
    ignored_predictions,
    match_answer,
    match_by_desc,
)
from coordexp.evaluation.several_answers import merge_answers, side_by_side
from coordexp.evaluation.summary import COUNTS_ONLY
from coordexp.matching import MatchingConfig, match_objects
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, Rollout
from support.answers import CAT, DOG, LEAF, answer, entry, record
from support.qwen_tokenizer import qwen_vocab
from support.scored_answers import detection_counts, random_answers

SCENE = [CAT, DOG, LEAF]
WRONG_DESC = GTObject("dog", "bbox_2d", CAT.bins)
ELSEWHERE = GTObject("black cat", "bbox_2d", (600, 20, 800, 220))
LOOSE = GTObject("black cat", "bbox_2d", (10, 20, 200, 370))  # IoU with CAT is 200/350


def predicted(text: str, truth: list[GTObject], truncated: bool = False) -> ImageAnswer:
    vocab: CoordVocab = qwen_vocab()
    ids = tuple(vocab.encode(text))
    parsed = parse_rollout(ids, vocab, ended=not truncated)
    return make_answer(record(truth), Rollout("s", (), ids, text, truncated), parsed)


def figures(text: str, truth: list[GTObject], **options: bool) -> dict[str, float]:
    return detection_metrics(detection_counts([predicted(text, truth, **options)]))


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (serialize_objects(SCENE), SCENE,
         {"f1": 1, "precision": 1, "recall": 1, "f1_any_desc": 1, "mean_matched_iou": 1, "duplicate_rate": 0,
          "invalid_rate": 0, "empty_rate": 0, "pred_per_image": 3, "gt_per_image": 3}),
        (serialize_objects(SCENE[::-1]), SCENE, {"f1": 1, "mean_matched_iou": 1}),
        (serialize_objects([CAT]), SCENE, {"f1": 0.5, "precision": 1, "recall": 1 / 3}),
        (serialize_objects([CAT, ELSEWHERE]), [CAT], {"f1": 2 / 3, "precision": 0.5, "recall": 1, "duplicate_rate": 0}),
        (serialize_objects([CAT, CAT, CAT]), [CAT],
         {"f1": 0.5, "precision": 1 / 3, "recall": 1, "duplicate_rate": 2 / 3}),
        (serialize_objects([CAT, WRONG_DESC]), [CAT], {"duplicate_rate": 0}),  # another description is not a duplicate
        (serialize_objects([WRONG_DESC]), [CAT], {"f1": 0, "f1_any_desc": 1, "precision": 0, "mean_matched_iou": 0}),
        (serialize_objects([LOOSE]), [CAT], {"f1": 1, "mean_matched_iou": pytest.approx(4 / 7, abs=0.01)}),
        (serialize_objects([LOOSE, CAT]), [CAT], {"f1": 2 / 3, "mean_matched_iou": 1, "duplicate_rate": 0.5}),
        (answer(entry(1), '"object_2": {"desc": "x"}'), [CAT], {"f1": 1, "invalid_rate": 0.5}),
        ("{}", SCENE, {"f1": 0, "precision": 0, "pred_objects": 0, "recall": 0, "empty_rate": 1, "invalid_rate": 0}),
        ("{}", [], {"f1": 1, "precision": 1, "recall": 1, "empty_rate": 1, "gt_per_image": 0}),
        (serialize_objects([CAT]), [], {"f1": 0, "precision": 0, "recall": 0, "gt_objects": 0}),
        ("no JSON at all", [CAT], {"f1": 0, "recall": 0, "empty_rate": 1}),
    ],
)  # fmt: skip
def test_metrics_of_one_image(text, truth, expected):
    got = figures(text, truth)
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_truncation_and_length_are_reported():
    got = figures(serialize_objects([CAT])[:-20], [CAT], truncated=True)
    assert got["truncated_rate"] == 1
    assert got["tokens_per_image"] == len(qwen_vocab().encode(serialize_objects([CAT])[:-20]))
    assert got["invalid_rate"] == 1  # the unfinished entry


def test_figures_come_from_summed_counts_over_images_and_ranks():
    good, bad = predicted(serialize_objects([CAT]), [CAT]), predicted(serialize_objects([DOG, DOG]), [CAT, LEAF])
    together = detection_counts([good, bad])
    assert together == detection_counts([good]) + detection_counts([bad])
    got = detection_metrics(together)
    assert (got["images"], got["gt_objects"], got["pred_objects"], got["matched_objects"]) == (2, 3, 3, 1)
    assert (got["precision"], got["recall"], got["f1"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_no_images_do_not_divide_by_zero():
    got = detection_metrics(detection_counts([]))
    assert got["images"] == 0
    assert all(value in (0, 1) for value in got.values())


def test_entries_of_merged_answers_are_counted_in_each_of_them() -> None:
    one = predicted(answer(entry(1), '"object_2": {"desc": "x"}'), [CAT])
    merged = merge_answers([one, one, one, one])
    assert (len(merged.pred), detection_metrics(count_image(merged).counts)["invalid_rate"]) == (1, 0.5)
    several = [one, predicted(serialize_objects([CAT, DOG]), [CAT]), predicted(serialize_objects([CAT, LEAF]), [CAT])]
    found = side_by_side(several, [merge_answers(several)], COUNTS_ONLY)
    assert {name: figures["invalid_rate"] for name, figures in found.items()} == {
        "one": 0.5, "union": 1 / 6, "majority": 1 / 6, "oracle": 0.5
    }  # fmt: skip


def test_soft_objects_and_their_matches_are_not_counted() -> None:
    soft_dog = replace(DOG, soft=0.7)
    alone = figures(serialize_objects([CAT]), [CAT, LEAF])
    for said in ([CAT], [CAT, DOG], [DOG, CAT]):
        assert (found := figures(serialize_objects(said), [CAT, LEAF, soft_dog])) == {
            **alone, "tokens_per_image": found["tokens_per_image"]
        }  # fmt: skip
    assert figures(serialize_objects([CAT, DOG, DOG]), [CAT, soft_dog])["precision"] == 0.5  # it is there once at most
    found = figures(answer(entry(1, DOG), '"object_2": {"desc": "x"}'), [soft_dog])
    assert (found["pred_objects"], found["empty_rate"], found["invalid_rate"]) == (0, 0, 0.5)  # a valid object, still
    both = predicted(serialize_objects([CAT]), [replace(CAT, soft=0.9), CAT])
    assert match_answer(both) == [(0, 1, 1.0)] and ignored_predictions(both) == set()  # annotated ones first


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_joint_assignment_equals_assignment_per_description(threshold: float) -> None:
    config = MatchingConfig(candidate_top_k=100, maskiou_gate=threshold)
    for found in random_answers(12, seed=7, per_image=25):
        expected = []
        for desc in {obj.desc for obj in found.truth}:
            preds = [i for i, obj in enumerate(found.pred) if obj.desc == desc]
            gts = [j for j, obj in enumerate(found.truth) if obj.desc == desc]
            alone = match_objects([found.pred[i] for i in preds], [found.truth[j] for j in gts], config)
            expected += [(preds[pair.pred_idx], gts[pair.gt_idx], pair.iou) for pair in alone.pairs]
        assert match_by_desc(found.pred, found.truth, threshold) == sorted(expected)
        counts = count_image(found, threshold).counts
        assert counts["matched"] == len(expected)
        assert counts["matched_any_desc"] == len(match_objects(found.pred, found.truth, config).pairs)
