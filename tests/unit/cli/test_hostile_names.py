"""Tables and lines of commands show class and file names as they are, although they look like rich markup or emoji.

Other commands print by the same console: ``tests/unit/test_one_place.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.evaluation.answers import write_answers
from coordexp.records import GTObject
from support.annotation_folders import paint
from support.cli_runs import Cli, Outcome
from support.scored_answers import random_answers

CLASSES = ("sign [/stop]", "[bold]x[/]", "[a0]", ":car:", "[link=file:///etc]y")
FOLDER = "p [a0] [x] :smile:"
IMAGE = "p [a0] [x].jpg"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "600")  # tables break no name apart


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    paint(folder / "images" / IMAGE, (64, 48))
    return folder


def write_dataset(folder: Path) -> Path:
    objects = [{"desc": name, "bbox_2d": [100 * k, 10, 100 * k + 90, 500]} for k, name in enumerate(CLASSES)]
    line = {"images": [f"images/{IMAGE}"], "width": 64, "height": 48, "objects": objects}
    path = folder / "d [b].jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return path


def labelme_file(folder: Path) -> Path:
    shapes: list[dict[str, Any]] = [
        {"label": name, "shape_type": "rectangle", "points": [[10 * k, 1], [10 * k + 9, 30]]}
        for k, name in enumerate(CLASSES)
    ]
    shapes.append({"label": "[c1] left out", "shape_type": "point", "points": [[1, 1]]})
    content = {"imagePath": IMAGE, "imageWidth": 64, "imageHeight": 48, "shapes": shapes}
    (folder / "images" / "p [a0] [x].json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "images"


def expect(outcome: Outcome, *names: object, code: int = 0) -> None:
    assert outcome.code == code, outcome.err
    shown = squeezed(outcome.out + outcome.err)  # titles are broken at the width of their table
    assert [str(name) for name in names if squeezed(str(name)) not in shown] == []


def squeezed(text: str) -> str:
    return "".join(text.split())


def test_convert(hostile: Path, cli: Cli) -> None:
    found = cli("data", "convert", "labelme", labelme_file(hostile), "--out", hostile / "o [1]", "--no-resize")
    expect(found, *CLASSES, "[c1] left out", "p [a0] [x].json", hostile / "o [1]")


def test_check_stats_sample_and_split(hostile: Path, cli: Cli) -> None:
    data = write_dataset(hostile)
    expect(cli("data", "check", data, "--sheet", hostile / "s [b].png"), *CLASSES, data, hostile / "s [b].png")
    expect(cli("data", "stats", data), *CLASSES)
    expect(cli("data", "sample", data, "--count", 1, "--out", hostile / "x [y].jsonl"), hostile / "x [y].jsonl")
    paint(hostile / "images" / "other.png", (64, 48))
    second = data.read_text(encoding="utf-8").replace(IMAGE, "other.png")
    data.write_text(data.read_text(encoding="utf-8") + second, encoding="utf-8")
    expect(cli("data", "split", data, "--shares", "train=0.5,val=0.5"), hostile / "d [b].train.jsonl")
    data.write_text(data.read_text(encoding="utf-8").replace(CLASSES[0], " [gap] "), encoding="utf-8")
    (hostile / "images" / IMAGE).unlink()
    expect(cli("data", "check", data), IMAGE, data, code=2)


def test_evaluate(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / FOLDER
    name: dict[str, str] = dict(zip(("person", "car", "手提包", "red cell"), CLASSES, strict=False))
    answers = [
        replace(
            answer,
            gt=tuple(GTObject(name[o.desc], o.kind, o.bins) for o in answer.truth),
            pred=tuple(replace(o, desc=name.get(o.desc, o.desc)) for o in answer.pred),
        )
        for answer in random_answers(12, 1)
    ]
    write_answers(answers, run / "predictions.jsonl")
    expect(cli("evaluate", run, "--out", tmp_path / "f [i]"), *CLASSES[:4], run, tmp_path / "f [i]")
    expect(cli("evaluate", "--compare", run, run, "--resamples", 10), *CLASSES[:4], run)
    expect(cli("evaluate", run / "[none]"), run / "[none]", code=2)
