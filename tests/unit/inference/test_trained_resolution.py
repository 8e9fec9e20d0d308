"""A model is shown every image at the resolution it was trained at, and answers hold for the image as it was."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from coordexp.checkpoints.card import read_card
from coordexp.data import read_jsonl
from coordexp.data.preparation import ImagePreparation, ResizeRule
from coordexp.evaluation.answers import read_answers
from support.cli_runs import Cli, small_checkpoint, write_run

MAX_PIXELS = 128 * 160
SIZE, COPY = (378, 504), (96, 160)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(2):
        image = Image.new("RGB", SIZE, "white")
        ImageDraw.Draw(image).rectangle([40 * k + 30, 60, 250, 400], fill="red")
        image.save(folder / f"{k}.png")
        shape = {"label": "card", "shape_type": "rectangle", "points": [[40 * k + 30, 60], [250, 400]]}
        content = {"imagePath": f"{k}.png", "imageWidth": SIZE[0], "imageHeight": SIZE[1], "shapes": [shape]}
        (folder / f"{k}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def run(tmp_path: Path, photos: Path, cli: Cli) -> Path:
    made = cli("data", "convert", "labelme", photos, "--out", tmp_path / "data", "--min-pixels", 1024,
                   "--max-pixels", MAX_PIXELS)  # fmt: skip
    assert made.code == 0
    data = str(tmp_path / "data" / "photos.jsonl")
    model = small_checkpoint(tmp_path / "model")
    return write_run(tmp_path, 1, model, custom__train_jsonl=data, custom__val_jsonl=data)


def test_an_original_image_gives_the_same_answer_as_its_resized_copy(
    tmp_path: Path, photos: Path, run: Path, cli: Cli
) -> None:
    copies = read_jsonl(tmp_path / "data" / "photos.jsonl")
    assert {(record.width, record.height) for record in copies} == {COPY}
    assert cli("train", run).code == 0
    model = tmp_path / "out1"
    rule = ResizeRule(32, 1024, MAX_PIXELS)
    for folder in (model, model / "checkpoint-1"):
        card = read_card(folder)
        assert card.preparation == ImagePreparation(rule, (96 * 160, 96 * 160))
        assert card.classes == ("card",)
    for source, out in ((photos, "originals"), (tmp_path / "data" / "photos.jsonl", "copies")):
        assert cli("predict", run, source, "--model", model, "--out", tmp_path / out).code == 0
    originals, shown = read_answers(tmp_path / "originals"), read_answers(tmp_path / "copies")
    assert [(a.width, a.height) for a in originals] == [SIZE, SIZE]
    assert [a.text for a in originals] == [a.text for a in shown]
    settings = json.loads((tmp_path / "originals" / "prediction.json").read_text())
    assert settings["resize"] == asdict(rule)


def test_the_prompt_shows_the_size_of_training(tmp_path: Path, photos: Path, run: Path, cli: Cli) -> None:
    """The part that cannot be right by luck: pixels and image tokens are those of the copy."""
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import load_processor
    from coordexp.records import ImageRecord

    (copy, *_) = read_jsonl(tmp_path / "data" / "photos.jsonl")
    original = ImageRecord("x", photos / "0.png", *SIZE, ())
    preparation = ImagePreparation(ResizeRule(32, 1024, MAX_PIXELS))
    processor = load_processor(tmp_path / "model")
    as_trained = PromptEncoder(processor, None, None).encode(copy)
    by_rule = PromptEncoder(processor, None, None, preparation).encode(original)
    assert by_rule.prompt_token_ids == as_trained.prompt_token_ids
    assert by_rule.model_inputs["pixel_values"].equal(as_trained.model_inputs["pixel_values"])
    plain = PromptEncoder(processor, None, None).encode(original)
    assert len(plain.prompt_token_ids) > 4 * len(by_rule.prompt_token_ids)


def test_without_a_resize_rule_unusual_sizes_are_reported(tmp_path: Path, photos: Path, cli: Cli) -> None:
    run = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    assert cli("train", run).code == 0
    shown = cli("predict", run, photos, "--model", tmp_path / "out1", "--out", tmp_path / "out")
    assert (
        shown.code == 0 and "note: 2 of 2 images are far from the size" in shown.out and "0.png (378x504)" in shown.out
    )
    scenes = cli("predict", run, tmp_path / "scenes.jsonl", "--model", tmp_path / "out1", "--out", tmp_path / "o2")
    assert scenes.code == 0 and "far from the size" not in scenes.out
