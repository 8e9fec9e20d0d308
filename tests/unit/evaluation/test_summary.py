"""Figures by class and density, their files, and the comparison of two runs."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordexp.config.rollout import EvalDetectionConfig
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, read_answers, to_line
from coordexp.evaluation.compare import compare, comparison_json
from coordexp.evaluation.detection import ImageCounts, count_image
from coordexp.evaluation.renaming import Renaming, read_aliases
from coordexp.evaluation.summary import (
    CONFUSION,
    COUNTS_ONLY,
    CURVES,
    SIZES,
    check_replaced,
    summarise,
    summary_tables,
    write_summary,
)
from coordexp.records import GTObject
from support.answers import CAT, DOG
from support.scored_answers import random_answers

WHOLE = GTObject("black cat", "bbox_2d", (0, 0, 999, 999))


def answered(truth: list[GTObject], found: list[GTObject], name: str = "s", **fields) -> ImageAnswer:
    pred = tuple(ScoredObject(obj.desc, obj.kind, obj.bins, 0.5) for obj in found)
    return ImageAnswer(name, "a.png", 640, 480, tuple(truth), pred, **fields)


@pytest.mark.parametrize(
    ("count", "name"), [(0, "0"), (1, "1-5"), (5, "1-5"), (6, "6-10"), (20, "11-20"), (50, "21-50"), (51, "51+")]
)
def test_density_bins(count: int, name: str) -> None:
    assert ImageCounts(Counter(gt=count)).density == name


def test_classes_and_densities_sum_to_the_total() -> None:
    answers = random_answers(30, 3)
    summary = summarise(answers)
    for rows in (summary.by_class, summary.by_density):
        assert sum(row.gt for row in rows) == summary.figures["gt_objects"]
        assert sum(row.pred for row in rows) == summary.figures["pred_objects"]
        assert sum(row.matched for row in rows) == summary.figures["matched_objects"]
    assert sum(row.images for row in summary.by_density) == 30
    for row in summary.by_class[:-1]:
        with_it = [a for a in answers if any(obj.desc == row.name for obj in (*a.truth, *a.pred))]
        assert row.images == len(with_it)
    frequent = [row.gt for row in summary.by_class[:-1]]
    assert frequent == sorted(frequent, reverse=True)
    assert (summary.by_class[-1].name, summary.by_class[-1].gt) == ("(not annotated anywhere)", 0)
    assert summary.by_class[-1].recall is None and summary.by_class[-1].ap is None
    assert any("annotated nowhere: 'unheard of'" in note for note in summary.notes)


def test_average_precision_by_density_uses_only_those_images() -> None:
    answers = random_answers(30, 3)
    for row in summarise(answers).by_density:
        alone = [a for a in answers if row.name == f"{count_image(a).density} objects"]
        assert row.ap == pytest.approx(summarise(alone).figures["AP"]) if row.gt else row.ap is None


def test_counts_that_ap_does_not_show() -> None:
    figures = summarise(
        [
            answered([CAT], [CAT, CAT, WHOLE], "a", truncated=True, dropped={"wrong_arity": 1}),
            answered([DOG], [], "b"),
            answered([WHOLE], [WHOLE], "c", repeat_terminated=True),  # right, so no giant
        ]
    ).figures
    assert figures["duplicate_rate"] == pytest.approx(1 / 4)
    assert figures["giant_rate"] == pytest.approx(1 / 4)
    assert (
        figures["truncated_rate"] == figures["empty_rate"] == figures["repeat_terminated_rate"] == pytest.approx(1 / 3)
    )
    assert figures["invalid_rate"] == pytest.approx(1 / 5)


def test_no_predictions_are_reported_and_have_no_precision() -> None:
    summary = summarise([answered([CAT], [])])
    assert (summary.figures["precision"], summary.figures["AP"]) == (0, 0)
    assert summary.by_class[0].precision is None
    assert any("nothing was predicted" in note for note in summary.notes)


def test_thresholds_have_their_own_metrics_and_the_table_names_the_first() -> None:
    """It said 0.5 at any first threshold."""
    near = GTObject("black cat", "bbox_2d", (10, 20, 200, 370))  # IoU 4/7 with CAT
    figures = summarise([answered([CAT], [near])], EvalDetectionConfig(f1ish_iou_thrs=(0.5, 0.6)).scored(None)).figures
    assert (figures["f1"], figures["f1@0.6"]) == (1, 0)
    summary = summarise([answered([CAT], [near])], EvalDetectionConfig(f1ish_iou_thrs=(0.6,)).scored(None))
    assert (summary.figures["f1"], summary.iou) == (0, 0.6)
    assert "mask IoU ≥ 0.6" in str(next(iter(summary_tables(summary, "figures"))).caption)


def test_files_contain_metrics_and_answers(tmp_path: Path) -> None:
    answers = random_answers(30, 3)
    options = EvalDetectionConfig(use_segm=True).scored(None)
    summary = summarise(answers, options)
    paths = write_summary(tmp_path / "out", summary, answers, {"model": "m"}, options)
    assert {path.name for path in paths} == {
        "metrics.json", "per_class.csv", "per_density.csv", "predictions.jsonl", "coco_ground_truth.json",
        "coco_results_bbox.json", "coco_results_segm.json", CONFUSION, CURVES, SIZES,
    }  # fmt: skip
    assert read_answers(tmp_path / "out") == answers
    content = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))
    assert content["metrics"] == summary.figures and content["model"] == "m"
    rows = list(csv.DictReader((tmp_path / "out" / "per_class.csv").open(encoding="utf-8")))
    assert [row["name"] for row in rows] == [row.name for row in summary.by_class]
    assert rows[-1]["recall"] == ""


def test_a_table_of_classes_has_no_formula(tmp_path: Path) -> None:
    """A spreadsheet would compute ``=1+1``: as in `export csv`, a ``'`` is in front."""
    answers, options = [answered([replace(CAT, desc="=1+1")], [])], EvalDetectionConfig().scored(None)
    write_summary(tmp_path, summarise(answers, options), answers, {}, options)
    assert (tmp_path / "per_class.csv").read_text(encoding="utf-8").splitlines()[1].startswith("'=1+1,1,1,0,0,")


def test_files_of_an_earlier_evaluation_do_not_stay(tmp_path: Path) -> None:
    answers, masks = random_answers(4, 1), EvalDetectionConfig(use_segm=True)
    assert len(write_summary(tmp_path, summarise(answers, masks), answers, {}, masks)) == 10
    counts = ["confusion_matrix.png", "metrics.json", "per_class.csv", "per_density.csv", "predictions.jsonl"]
    write_summary(tmp_path, summarise(answers, COUNTS_ONLY), answers, {}, COUNTS_ONLY)
    assert sorted(path.name for path in tmp_path.iterdir()) == counts


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not a line of predictions"),
        ('{"sample_id": "a', "not a line of predictions"),
        ('{"sample_id": 1}', "sample_id"),
        (to_line(answered([CAT], [])).replace("[10,20,200,220]", "[10,20,200]"), "bbox_2d"),
        (to_line(answered([], [CAT])).replace("0.5", '"high"'), "score"),
        (to_line(answered([], [CAT])).replace('"score":0.5', '"confidence":99.5'), "<= 1.0 - at .*confidence"),
    ],
)
def test_invalid_lines_are_refused_with_their_place(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "predictions.jsonl"
    path.write_text(to_line(answered([CAT], [])) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"predictions.jsonl:2: .*{complaint}"):
        read_answers(path)
    path.write_text(path.read_text().removesuffix("\n"))
    is_cut = "not a line" in complaint
    with pytest.raises(DataError, match=r"l:2: ends in the middle of a line: .*repeat" if is_cut else complaint):
        read_answers(path)


def test_aliases_rename_predictions(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text("black cat: [Kitten, cat ]\ndog: [puppy]\n")
    answers = [answered([CAT], [GTObject("kitten", CAT.kind, CAT.bins)])]
    assert summarise(answers).figures["f1"] == 0
    rename = Renaming(read_aliases(path))
    assert summarise(rename(answers)).figures["f1"] == 1
    assert rename.note(answers, rename(answers)) == ("1 predictions were renamed: 'kitten' → 'black cat' (1)",)
    (note,) = rename.note(answers, rename(answers), calibrated=True)
    assert note.endswith("(1); the calibration counts them by their new names, and predict keeps the old ones")
    assert rename.note(answers, answers, calibrated=True) == ("0 predictions were renamed",)
    assert Renaming().note(answers, answers) == ()
    # Names have one form, NFC, in datasets and answers.
    path.write_text("cafe\u0301: [bistro\u0301]\n", encoding="utf-8")
    assert read_aliases(path) == {"caf\u00e9": "caf\u00e9", "bistr\u00f3": "caf\u00e9"}
    path.write_text("a: [x]\nb: [X]\n")
    with pytest.raises(DataError, match=r"'X'.*'a'.*'b'"):
        read_aliases(path)


def test_two_equal_runs_do_not_differ() -> None:
    answers = random_answers(15, 2)
    found = compare(answers, answers[::-1], resamples=50)
    groups = [row.f1 for row in (*found.by_class, *found.by_density)]
    assert (found.figures[0].name, found.figures[0].interval) == ("AP", None)
    for difference in (*found.figures[1:], *groups):
        assert difference.interval == (0, 0) and not difference.is_clear
        assert difference.a == difference.b


def test_a_run_that_misses_half_is_clearly_worse_and_the_pairing_helps() -> None:
    answers = random_answers(40, 8)
    worse = [replace(answer, pred=answer.pred[::2]) for answer in answers]
    whole = compare(answers, worse, resamples=200)
    found = {difference.name: difference for difference in whole.figures}
    recall, f1 = found["recall"].interval, found["f1"].interval
    assert recall is not None and f1 is not None and recall[1] < 0
    assert found["AP"].b < found["AP"].a and not found["AP"].is_clear  # it has no interval
    assert found["f1"].is_clear and f1[0] <= found["f1"].b - found["f1"].a <= f1[1]
    assert compare(answers, worse, resamples=200) == whole  # the same seed, the same intervals
    assert compare(answers, worse, resamples=200, seed=1) != whole
    # Images are paired by name, in any order.
    assert compare(answers, worse[::-1], resamples=200) == whole
    # With unpaired draws the interval of the difference is wider.
    rng = np.random.default_rng(0)
    counted = [np.array([[one.counts["matched"], one.counts["gt"]] for one in map(count_image, run)])
               for run in (answers, worse)]  # fmt: skip
    sums = [np.stack([run[rng.integers(0, 40, 40)].sum(axis=0) for _ in range(200)]) for run in counted]
    before, after = (drawn[:, 0] / drawn[:, 1] for drawn in sums)
    low, high = np.quantile(after - before, [0.025, 0.975])
    assert recall[1] - recall[0] < 0.8 * (high - low)


def test_differences_by_class_and_density_are_those_of_the_summaries() -> None:
    a, b = random_answers(30, 8), [replace(one, pred=one.pred[1:]) for one in random_answers(30, 8)]
    found = compare(a, b, resamples=20)
    before, after = summarise(a), summarise(b)
    rows = [[row for row in one.by_class if row.gt] for one in (before, after)]
    assert [row.name for row in found.by_class] == [row.name for row in rows[0]]
    of_name = {row.name: row for row in rows[1]}
    for row, one in zip(found.by_class, rows[0], strict=True):
        other = of_name[row.name]
        assert row.ap is not None and row.gt == one.gt
        assert (row.f1.a, row.f1.b) == pytest.approx((one.f1, other.f1))
        assert (row.ap.a, row.ap.b) == pytest.approx((one.ap, other.ap))
    dense = [[row for row in one.by_density if row.gt] for one in (before, after)]
    assert [row.name for row in found.by_density] == [row.name for row in dense[0]]
    for row, one, other in zip(found.by_density, *dense, strict=True):
        assert (row.gt, row.f1.a, row.f1.b) == (one.gt, pytest.approx(one.f1), pytest.approx(other.f1))


def test_a_class_in_a_single_image_is_not_a_significant_difference() -> None:
    a = [answered([CAT], [CAT], f"s{i}") for i in range(8)] + [answered([DOG], [DOG], "dog")]
    b = [*a[:-1], answered([DOG], [], "dog")]
    cat, dog = compare(a, b, resamples=300).by_class
    assert (dog.name, dog.f1.b - dog.f1.a) == ("dog", -1) and not dog.f1.is_clear and not cat.f1.is_clear


def test_runs_of_other_images_cannot_be_compared() -> None:
    answers = random_answers(3, 0)
    with pytest.raises(DataError, match="1 images"):
        compare(answers, answers[1:])
    with pytest.raises(DataError, match="1 images"):
        compare(answers[1:], answers)
    for change in ({"image": "/elsewhere/a.png"}, {"width": 7}):
        with pytest.raises(DataError, match=f"{answers[0].sample_id}: the two runs answered other pictures"):
            compare(answers, [replace(answers[0], **change), *answers[1:]])
    compare(answers, [replace(one, image=f"/elsewhere/{Path(one.image).name}") for one in answers], resamples=2)
    with pytest.raises(DataError, match="other annotations"):
        compare(answers, [replace(answers[0], gt=(CAT,)), *answers[1:]])


def test_the_ledger_shows_what_equal_totals_hide() -> None:
    """Both runs find two of three objects, with one wrong box each: other objects, and another wrong box."""
    cow, ghost, other = (GTObject(name, "bbox_2d", box) for name, box in (
        ("cow", (300, 10, 400, 100)), ("ghost", (800, 10, 900, 90)), ("ghost", (10, 800, 90, 900))))  # fmt: skip
    a = [answered([CAT, DOG, cow], [CAT, DOG, ghost]), answered([CAT], [CAT, ghost], "t")]
    b = [answered([CAT, DOG, cow], [CAT, cow, other]), answered([CAT], [CAT, CAT, ghost], "t")]
    comparison = compare(a, b, resamples=50)
    assert [one.a == one.b for one in comparison.figures if one.name == "recall"] == [True]
    ledger = comparison.ledger
    assert (ledger.kept.part, ledger.lost.part, ledger.kept.whole, ledger.lost.whole) == (2, 1, 3, 3)
    assert (ledger.gained.part, ledger.gained.whole) == (1, 1)
    # In t both have the ghost; b's second cat is wrong as well.
    assert (ledger.false_lost.part, ledger.false_lost.whole) == (1, 5)
    assert (ledger.false_gained.part, ledger.false_gained.whole) == (2, 6)
    assert (ledger.repeats_a.part, ledger.repeats_b.part) == (0, 1)
    low, high = ledger.lost.interval
    assert low <= ledger.lost.value <= high and ledger.lost.value == pytest.approx(1 / 3)
    found: Any = comparison_json(comparison, ("a", "b"))["ledger"]
    assert (found["lost"]["part"], found["gained"]["part"]) == (1, 1)


def test_soft_objects_are_not_in_the_ledger() -> None:
    soft = replace(DOG, soft=0.5)
    ledger = compare([answered([CAT, soft], [CAT, DOG])], [answered([CAT, soft], [CAT])], resamples=10).ledger
    assert (ledger.kept.part, ledger.lost.part, ledger.gained.part) == (1, 0, 0)
    assert (ledger.false_lost.part, ledger.false_gained.part) == (0, 0)


def test_the_order_of_annotations_does_not_matter_to_a_comparison() -> None:
    ledger = compare([answered([CAT, DOG], [CAT])], [answered([DOG, CAT], [CAT])], resamples=10).ledger
    assert (ledger.kept.part, ledger.lost.part, ledger.gained.part) == (1, 0, 0)
    with pytest.raises(DataError, match="other annotations"):
        compare([answered([CAT, DOG], [CAT])], [answered([CAT, CAT], [CAT])], resamples=10)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [({"aliases": "a.yaml"}, {"aliases": None}), ({}, {"aliases": "a.yaml"}), ({"score": None}, {"score": "constant"}),
     ({"tiles": {"width": 9}}, {"tiles": None}), ({"vllm.dtype": "float16", "seed": 1}, {"vllm.dtype": None})],
)  # fmt: skip
def test_an_evaluation_with_other_settings_is_not_replaced(
    earlier: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"predictions": "p.jsonl", **earlier}))
    with pytest.raises(DataError, match=r"holds an evaluation with another (aliases|score|tiles|vllm\.dtype)"):
        check_replaced(tmp_path, {"predictions": "p.jsonl", **now}, False)
    check_replaced(tmp_path, {"predictions": "p.jsonl", **earlier}, False)
    check_replaced(tmp_path, {"predictions": "p.jsonl", **now}, True)
