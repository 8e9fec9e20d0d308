"""Plots of an evaluation: their counts, their files, and unusual class names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coordexp.evaluation import Detection, ImageAnswer, summarise
from coordexp.evaluation.answers import write_answers
from coordexp.evaluation.summary import CONFUSION, CURVES, INVENTED, MISSED, OTHERS, SIZES, confusion, save_plots
from coordexp.records import GTObject
from support.cli_runs import run_cli
from support.scored_answers import random_answers, with_soft


def answer(name: str, truth: dict[str, int], pred: dict[str, int]) -> ImageAnswer:
    """Boxes 100 bins wide, each at its own place: desc → place."""
    box = lambda at: (100 * at, 100, 100 * at + 90, 190)  # noqa: E731
    gt = tuple(GTObject(desc, "bbox_2d", box(at)) for desc, at in truth.items())
    found = tuple(Detection(desc, "bbox_2d", box(at), 0.5) for desc, at in pred.items())
    return ImageAnswer(name, f"{name}.png", 640, 480, gt, found)


def test_confusion_matrix() -> None:
    found = confusion([
        answer("a", {"cat": 0, "dog": 1, "fox": 2}, {"cat": 0, "wolf": 1, "ant": 5}),
        answer("b", {"cat": 0}, {"dog": 0}),
    ])  # fmt: skip
    counts = {
        (row, column): int(found.counts_AP[i, j])
        for i, row in enumerate(found.annotated)
        for j, column in enumerate(found.predicted)
        if found.counts_AP[i, j]
    }
    assert counts == {
        ("cat", "cat"): 1, ("cat", "dog"): 1, ("dog", OTHERS): 1, ("fox", MISSED): 1, (INVENTED, OTHERS): 1
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.booleans())
def test_every_object_is_counted_once(seed: int, most: int, soft: bool) -> None:
    answers = random_answers(6, seed)
    answers = with_soft(answers, seed) if soft else answers
    found = confusion(answers, most)
    figures = summarise(answers).figures
    assert found.counts_AP[:-1].sum() == figures["gt_objects"], "each row but the last sums to the annotated objects"
    assert found.counts_AP[:, :-1].sum() == figures["pred_objects"], "each column but the last sums to the predictions"
    diagonal = sum(
        found.counts_AP[i, found.predicted.index(name)]
        for i, name in enumerate(found.annotated)
        if name not in (OTHERS, INVENTED)
    )
    assert diagonal <= found.counts_AP[:-1, :-1].sum() and len(found.annotated) <= most + 2


def is_drawn(path: Path) -> bool:
    with Image.open(path) as image:
        return min(image.size) > 200 and float(np.asarray(image.convert("L")).std()) > 5


def test_evaluation_writes_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "$x_{1}$ [/b] \\alpha & a very long name of a class"
    answers = [
        replace(one, gt=tuple(replace(o, desc=hostile) for o in one.truth), pred=one.pred)
        for one in random_answers(8, 3)
    ]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    done = run_cli(capsys, "evaluate", tmp_path / "run", "--output", tmp_path / "figures")
    assert done.code == 0, done.err
    assert [name for name in (CONFUSION, CURVES, SIZES) if not is_drawn(tmp_path / "figures" / name)] == []


def test_no_annotations_no_plots(tmp_path: Path) -> None:
    assert save_plots([answer("a", {}, {"cat": 0})], tmp_path) == []
    assert save_plots([answer("a", {"cat": 0}, {})], tmp_path, coco=False) == [tmp_path / CONFUSION]


def test_the_sheet_is_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for k in range(7):
        image = tmp_path / f"{k}.png"
        Image.new("RGB", (320, 240), (10, 10, 10)).save(image)
        answers.append(replace(answer(f"s{k}", {"cat": 0}, {"dog": 0}), image=str(image), width=320, height=240))
    write_answers(answers, tmp_path / "predictions.jsonl")
    sheet = tmp_path / "sheet.png"
    assert run_cli(capsys, "evaluate", tmp_path, "--sheet", sheet).code == 0
    with Image.open(sheet) as image:
        assert image.size == (3 * 2 * 320, 26 + 3 * 240), "seven images, three side by side"
