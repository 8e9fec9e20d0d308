"""From a folder of annotated pictures to exported answers, by the commands that a user types."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from PIL import Image, ImageDraw

from coordexp.cli.predict import Format
from coordexp.data import read_jsonl
from coordexp.data.files import asset
from coordexp.evaluation.answers import read_answers
from support.cli_runs import Cli

SIZE = (96, 64)
NAME = "red square"
BOXES = [(8, 8, 40, 32), (40, 24, 80, 56), (16, 32, 64, 48), (48, 8, 88, 40)]


def yolo_folder(root: Path) -> Path:
    """Four pictures with a red square each, and one without, annotated in YOLO's format."""
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for number, box in enumerate([*BOXES, None]):
        image = Image.new("RGB", SIZE, (128, 128, 128))
        if box is not None:
            x1, y1, x2, y2 = box
            ImageDraw.Draw(image).rectangle((x1, y1, x2 - 1, y2 - 1), fill=(255, 0, 0))
            line = f"0 {(x1 + x2) / 192} {(y1 + y2) / 128} {(x2 - x1) / 96} {(y2 - y1) / 64}"
            (root / "labels" / f"{number}.txt").write_text(line, encoding="utf-8")
        image.save(root / "images" / f"{number}.png")
    (root / "classes.txt").write_text(NAME, encoding="utf-8")
    return root


def test_from_annotated_pictures_to_exported_answers(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*argv: object) -> str:
        outcome = cli(*argv)
        assert outcome.code == 0, outcome.err
        return outcome.out

    monkeypatch.chdir(tmp_path)
    folder, size = yolo_folder(tmp_path / "in"), ("--factor", 16, "--min-pixels", 256, "--max-pixels", 6144)
    run("data", "convert", "yolo", folder, "--out", "mine", "--name", "all", *size)
    run("data", "check", "mine/all.jsonl", "--sheet", "sheet.png")
    run("data", "split", "mine/all.jsonl", "--shares", "train=0.75,val=0.25")
    parts = [read_jsonl(Path(f"mine/all.{part}.jsonl"), check_images=True) for part in ("train", "val")]
    assert sorted(len(record.objects) for part in parts for record in part) == [0, 1, 1, 1, 1]
    for part in ("train", "val"):
        Path(f"mine/all.{part}.jsonl").rename(f"mine/{part}.jsonl")
    Path("mine/all.jsonl").unlink()
    run("init", "mine", "--model", asset("checkpoints/demo-stage1"), "--cpu")
    keys = ("training.max_steps=2", "training.learning_rate=1.0e-8", "training.vit_lr=null",
            "training.eval_strategy=no")  # fmt: skip
    run("config", "check", "stage1.yaml", *keys)
    run("train", "stage1.yaml", *keys)
    trained = "outputs/stage1"
    command = ("predict", "in/images", "--model", trained, "--out", "answers", "--save-images", "--classes", NAME)
    assert "5 images answered" in run(*command)
    answers = read_answers(Path("answers"))
    found = sum(len(answer.pred) for answer in answers)
    assert found and {obj.desc for answer in answers for obj in answer.pred} == {NAME}
    assert {(answer.width, answer.height) for answer in answers} == {SIZE}
    assert len(list(Path("answers/images").rglob("*.png"))) == 5
    for form in get_args(Format):
        assert f"{found} objects in 5 images" in run("export", form, "answers", "--out", form)
    for what in (trained, "answers"):
        run("view", what, "--out", "view.html")
        assert Path("view.html").stat().st_size > 10_000
