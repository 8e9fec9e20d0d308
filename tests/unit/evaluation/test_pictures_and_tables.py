"""Plots, sheets of answers and the table of figures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from rich.console import Console

from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers
from coordexp.evaluation.detection import detection_metrics
from coordexp.evaluation.drawing import draw_comparison, most_informative_images, save_drawings
from coordexp.evaluation.summary import (
    CONFUSION,
    CURVES,
    FIGURES,
    INVENTED,
    MISSED,
    OTHERS,
    SIZES,
    confusion,
    figures_table,
    save_plots,
    summarise,
)
from coordexp.records import GTObject
from support.answers import CAT, DOG, LEAF
from support.cli_runs import Cli
from support.scored_answers import detection_counts, random_answers, with_soft

# --- plots ---


def answer(name: str, truth: dict[str, int], pred: dict[str, int]) -> ImageAnswer:
    """Boxes 100 bins wide, each at its own place: desc → place."""
    box = lambda at: (100 * at, 100, 100 * at + 90, 190)  # noqa: E731
    gt = tuple(GTObject(desc, "bbox_2d", box(at)) for desc, at in truth.items())
    found = tuple(ScoredObject(desc, "bbox_2d", box(at), 0.5) for desc, at in pred.items())
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


@settings(max_examples=25)
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


def test_evaluation_writes_plots(tmp_path: Path, cli: Cli) -> None:
    hostile = "$x_{1}$ [/b] \\alpha & a very long name of a class"
    answers = [
        replace(one, gt=tuple(replace(o, desc=hostile) for o in one.truth), pred=one.pred)
        for one in random_answers(8, 3)
    ]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    done = cli("evaluate", tmp_path / "run", "--out", tmp_path / "figures")
    assert done.code == 0, done.err
    assert [name for name in (CONFUSION, CURVES, SIZES) if not is_drawn(tmp_path / "figures" / name)] == []


def test_no_annotations_no_plots(tmp_path: Path) -> None:
    assert save_plots([answer("a", {}, {"cat": 0})], tmp_path) == []
    assert save_plots([answer("a", {"cat": 0}, {})], tmp_path, coco=False) == [tmp_path / CONFUSION]


# --- tables and sheets ---

GREEN, ORANGE, RED, GREY = (24, 150, 70), (230, 140, 0), (205, 30, 45), (112, 117, 125)


def prediction(folder: Path, said: list[GTObject], truth: list[GTObject], size: tuple[int, int]) -> ImageAnswer:
    image = folder / f"{size[0]}x{size[1]}.png"
    Image.new("RGB", size, (10, 10, 10)).save(image)
    found = tuple(ScoredObject(obj.desc, obj.kind, obj.bins, 0.5) for obj in said)
    return ImageAnswer("s", str(image), *size, tuple(truth), found)


@pytest.mark.parametrize(
    ("samples", "drawn"),
    [
        (["a.2.png", "a.bmp", "a.png"], ["a.2.png", "a.png", "a.3.png"]),
        (["one/7.gif", "two/7.gif"], ["one/7.png", "two/7.png"]),
        (["one/7.jpg", "one/7"], ["one/7.jpg", "one/7.png"]),
        (["d.jsonl:1", "d.jsonl:2"], ["x.png", "x.1.png"]),
    ],
)
def test_each_image_has_a_drawing_of_its_own(samples: list[str], drawn: list[str], tmp_path: Path) -> None:
    answers = []
    for sample in samples:
        image = tmp_path / ("x.png" if ":" in sample else sample)
        image.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 24), (10, 10, 10)).save(image, format=None if image.suffix else "PNG")
        answers.append(ImageAnswer(sample, str(image), 40, 24, None, ()))
    assert save_drawings(answers, tmp_path / "out") == [tmp_path / "out" / name for name in drawn]


def rendered(columns: dict[str, dict[str, float]]) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(figures_table(columns, "what changed"))
    return console.export_text(styles=True).splitlines()


def test_the_table_marks_the_better_run_in_each_row(tmp_path):
    better = prediction(tmp_path, [CAT, DOG], [CAT, DOG], (64, 64))
    worse = prediction(tmp_path, [CAT, CAT], [CAT, DOG], (64, 64))
    runs = {
        "before": detection_metrics(detection_counts([worse])),
        "after": detection_metrics(detection_counts([better])),
    }
    lines = rendered(runs)
    row = {label: next(line for line in lines if label in line) for label, _ in FIGURES.values()}
    bold = "\x1b[1m"
    assert f"{bold}1.000" in row["recall"] and f"{bold}0.500" not in row["recall"] and "0.500" in row["recall"]
    assert f"{bold}0.000" in row["duplicate rate"] and "0.500" in row["duplicate rate"]  # less is better
    assert bold not in row["objects / image"] and row["objects / image"].count("2.000") == 2
    assert any("before" in line and "after" in line for line in lines)


def test_a_single_run_is_not_compared(tmp_path):
    figures = detection_metrics(detection_counts([prediction(tmp_path, [CAT], [CAT], (64, 64))]))
    assert not any("\x1b[1m1.000" in line for line in rendered({"now": figures}))


def colours(image: Image.Image) -> set[Any]:
    return {colour for _, colour in image.getcolors(maxcolors=1 << 20) or ()}


def test_the_picture_shows_matched_wrong_and_missed_objects(tmp_path):
    truth = [CAT, LEAF]
    before = prediction(tmp_path, [DOG], truth, (128, 128))
    after = prediction(tmp_path, [CAT], truth, (128, 128))
    path = tmp_path / "new" / "folder" / "sheet.png"
    draw_comparison({"before": [before], "after": [after]}, path)
    with Image.open(path) as sheet:
        assert sheet.size == (3 * 256, 26 + 256 + 26)  # 128 pixels are enlarged twice; names above, counts below
        first, second, third = (sheet.crop((x, 26, x + 256, 282)) for x in (0, 256, 512))
        assert {GREEN, ORANGE} <= colours(first) and RED not in colours(first)  # the last run found CAT, missed LEAF
        assert RED in colours(second) and GREEN not in colours(second)
        assert GREEN in colours(third) and RED not in colours(third)
        counts = [sheet.crop((x, 282, x + 256, 308)) for x in (0, 256, 512)]
        assert colours(counts[0]) == {(255, 255, 255)} and all(
            {GREEN, RED, ORANGE} <= colours(one) for one in counts[1:]
        )


def test_the_picture_counts_what_it_shows(tmp_path, monkeypatch):
    written = []
    draw_text = ImageDraw.ImageDraw.text

    def text(self, at, said, *rest, **named):
        written.append(said.strip())
        draw_text(self, at, said, *rest, **named)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    soft = replace(LEAF, soft=0.5)
    one = prediction(tmp_path, [CAT, DOG, LEAF], [CAT, soft], (64, 64))
    two = prediction(tmp_path, [], [CAT, DOG], (64, 64))
    draw_comparison({"run": [one, two, two]}, tmp_path / "sheet.png", max_rows=2)
    assert written[-3:] == ["1 found", "1 wrong", "2 missed"]


def test_soft_objects_are_grey_and_dashed(tmp_path):
    box = GTObject("cat", "bbox_2d", (100, 300, 900, 900))
    sides = []
    for annotation in (box, replace(box, soft=0.5)):
        draw_comparison({"run": [prediction(tmp_path, [box], [annotation], (320, 320))]}, tmp_path / "sheet.png")
        with Image.open(tmp_path / "sheet.png") as sheet:
            bottom = 26 + round(900 / 999 * 320)
            sides.append([sheet.getpixel((x, bottom)) for x in range(40, 280)])
            assert {GREEN if annotation.soft is None else GREY} <= colours(sheet.crop((320, 26, 640, 346)))
    assert set(sides[0]) == {GREEN} and set(sides[1]) == {GREY, (10, 10, 10)}


def test_images_of_other_sizes_are_never_cut_and_max_rows_are_drawn(tmp_path):
    sizes = [(60, 120), (300, 100), (1000, 50), (320, 320)]
    run = [prediction(tmp_path, [DOG], [], size) for size in sizes]
    path = tmp_path / "sheet.png"
    draw_comparison({"run": run}, path, max_rows=3)
    scaled = [(180, 360), (300, 100), (640, 32)]  # small ones are enlarged, large ones made smaller
    with Image.open(path) as sheet:
        assert sheet.size == (2 * 640, 26 + sum(height for _, height in scaled) + 26)
        top = 26
        for width, height in scaled:
            corner = sheet.getpixel((640 + width - 1, top + height - 1))
            assert corner == (255, 255, 255)  # the panel's own frame …
            assert sheet.getpixel((640 + width - 4, top + 4)) == (10, 10, 10)  # … around the image
            top += height


def test_a_name_at_the_edge_is_moved_into_the_picture(tmp_path):
    far = GTObject("a name of many letters", "bbox_2d", (950, 500, 999, 600))
    draw_comparison({"run": [prediction(tmp_path, [], [far], (320, 320))]}, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        label = sheet.crop((320 - 130, 26 + 144, 317, 26 + 160))
        assert (255, 255, 255) in colours(label) and ORANGE in colours(label)
        assert label.getpixel((60, 8)) != (10, 10, 10)  # a label 120 pixels wide begins far left of the object


def test_the_most_informative_images_have_mistakes_or_differ(tmp_path):
    right, empty = prediction(tmp_path, [CAT, DOG], [CAT, DOG], (8, 8)), prediction(tmp_path, [], [CAT, DOG], (8, 8))
    half = prediction(tmp_path, [CAT], [CAT, DOG], (8, 8))
    assert most_informative_images([[right, half, empty, half]], 9) == [2, 1, 3]
    assert most_informative_images([[right, half, empty, half]], 1) == [2]
    assert most_informative_images([[right, empty, empty], [half, empty, right]], 9) == [2, 0]
    assert most_informative_images([[right], [right]], 9) == []


@pytest.mark.parametrize("columns", [{}, {"run": []}])
def test_nothing_to_draw_is_reported(tmp_path, columns):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_comparison(columns, tmp_path / "sheet.png")
