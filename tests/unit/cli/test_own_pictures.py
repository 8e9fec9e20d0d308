"""From pictures that people bring to checked parts, by the commands that they type; and once to a drawn answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from coordexp.cli.predict import Format
from coordexp.data import read_jsonl
from coordexp.data.files import asset
from coordexp.evaluation import read_answers
from coordexp.records import ImageRecord
from support.cli_runs import Outcome, run_cli
from support.drawn_sets import BOX_FORMS, NAME, POLYGON_FORMS, SIZE, Form, yolo

COUNTED = {  # what a report says beside the objects; every other form converts without a word
    "voc_beside_images": {"folders_found": 1},
    "coco_runs": {"mask_traced": 4},
    "coco_packed_runs": {"mask_traced": 4},
    "coco_crowds": {"crowd_kept": 4},
    "coco_crowds_as_polygons": {"crowd_kept": 4, "mask_traced": 4},
    "panoptic": {"stuff": 5},
    "panoptic_polygons": {"stuff": 5, "mask_traced": 4},
    "labelme_embedded": {"embedded_image": 5},
    "table": {"size_missing": 4},
}


def done(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.err
    return outcome.out


def red_box(image: Path) -> list[float] | None:
    """The red pixels' bounds in parts of the sides, which a resize smears by a pixel; None where there are none."""
    rgb = np.asarray(Image.open(image).convert("RGB")).astype(int)
    rows, columns = np.nonzero(rgb[..., 0] - rgb[..., 1] > 190)
    if not len(rows):
        return None
    height, width = rgb.shape[:2]
    return [columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height]


def where_drawn(record: ImageRecord, kind: str) -> bool:
    """Whether the record's objects say what its picture shows."""
    drawn = red_box(record.image)
    if drawn is None:
        return record.objects == ()
    (obj,) = record.objects
    x, y = np.array(obj.bins[::2]) / 999, np.array(obj.bins[1::2]) / 999
    assert (obj.desc, obj.kind) == (NAME, kind)
    return bool(np.abs(np.array([x.min(), y.min(), x.max(), y.max()]) - drawn).max() < 0.035)


@pytest.mark.parametrize(
    ("form", "kind"),
    [(form, "bbox_2d") for form in BOX_FORMS] + [(form, "poly") for form in POLYGON_FORMS],
    ids=[form.__name__ for form in BOX_FORMS + POLYGON_FORMS],
)
def test_own_pictures_become_checked_parts(
    form: Form, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, name = tmp_path / "out", form.__name__
    size = ("--factor", 16, "--min-pixels", 256, "--max-pixels", 3840)  # smaller than drawn
    shown = done(run_cli(capsys, "data", "convert", *form(tmp_path / "in"), "--out", out, "--name", "mine", *size))
    assert str(out / "mine.jsonl") in shown
    records = read_jsonl(out / "mine.jsonl", check_images=True)
    assert len(records) == (4 if name.startswith("table") else 5) and sum(len(r.objects) for r in records) == 4
    assert [r.image.name for r in records if not where_drawn(r, kind)] == []
    assert {(r.width, r.height) for r in records} == {(64, 48)}
    report = json.loads((out / "mine.conversion_report.json").read_text(encoding="utf-8"))
    assert report["skipped_images"] | report["skipped_objects"] | report["notes"] == COUNTED.get(name, {})

    found = json.loads(done(run_cli(capsys, "data", "check", out / "mine.jsonl", "--json")))
    assert (found["images"], found["objects"], found["errors"]) == (len(records), 4, 0)
    done(run_cli(capsys, "data", "check", out / "mine.jsonl", "--sheet", out / "sheet.png"))
    assert Image.open(out / "sheet.png").size[0] == 4 * 320
    done(run_cli(capsys, "data", "split", out / "mine.jsonl", "--shares", "train=0.75,val=0.25"))
    parts = [read_jsonl(out / f"mine.{part}.jsonl", check_images=True) for part in ("train", "val")]
    assert all(parts) and sorted(r.image for part in parts for r in part) == sorted(r.image for r in records)
    assert all(where_drawn(record, kind) for part in parts for record in part)


def test_once_from_pictures_to_a_drawn_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    annotated, size = yolo(tmp_path / "in"), ("--factor", 16, "--min-pixels", 256, "--max-pixels", 6144)
    for name in ("train", "val"):
        done(run_cli(capsys, "data", "convert", *annotated, "--out", "mine", "--name", name, *size))
    done(run_cli(capsys, "init", "mine", "--model", asset("checkpoints/demo-stage1"), "--cpu"))
    keys = (
        "training.max_steps=2",
        "training.learning_rate=1.0e-8",
        "training.vit_lr=null",
        "training.eval_strategy=no",
    )
    done(run_cli(capsys, "config", "check", "stage1.yaml", *keys))
    done(run_cli(capsys, "train", "stage1.yaml", *keys))
    run = "outputs/stage1"
    asked = ("predict", "in/images", "--model", run, "--output", "answers", "--save-images", "--classes", NAME)
    assert "5 images answered" in done(run_cli(capsys, *asked))
    answers = read_answers(Path("answers"))
    found = sum(len(answer.pred) for answer in answers)
    assert found and {obj.desc for answer in answers for obj in answer.pred} == {NAME}
    assert {(answer.width, answer.height) for answer in answers} == {SIZE}, "pixels of the pictures as drawn"
    assert len(list(Path("answers/images").rglob("*.png"))) == 5
    for other in get_args(Format):
        shown = done(run_cli(capsys, "export", other, "answers", "--out", other))
        assert f"{found} objects in 5 images" in shown
    for what in (run, "answers"):
        done(run_cli(capsys, "view", what, "--out", "view.html"))
        assert Path("view.html").stat().st_size > 10_000
