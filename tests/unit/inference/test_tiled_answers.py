"""The demo's checkpoint on a photograph made of its scenes, answered tile by tile by every command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.files import append_line, asset
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.evaluation.answers import ImageAnswer, read_answers
from coordexp.geometry import pixel_ring, to_bin
from coordexp.inference.detector import Detector
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import Cli

MODEL = asset("checkpoints/demo-stage1")
SIDE = 128  # of a scene
Mosaic = tuple[Path, list[ImageRecord]]


def photographed(folder: Path, scenes: Sequence[ImageRecord]) -> Path:
    """A dataset of one photograph of rows of two scenes."""
    size = 2 * SIDE, len(scenes) // 2 * SIDE
    photo = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    objects = []
    for at, scene in enumerate(scenes):
        x0, y0 = at % 2 * SIDE, at // 2 * SIDE
        photo[y0 : y0 + SIDE, x0 : x0 + SIDE] = np.asarray(Image.open(scene.image))
        for obj in scene.objects:
            ring = pixel_ring(obj, SIDE, SIDE)
            corners = [ring[0], ring[2]] if obj.kind == "bbox_2d" else ring
            bins = [to_bin(v, size[side]) for x, y in corners for side, v in enumerate((x + x0, y + y0))]
            objects.append(GTObject(obj.desc, obj.kind, tuple(bins)))
    Image.fromarray(photo).save(folder / "photo.png")
    write_jsonl([ImageRecord("p", folder / "photo.png", *size, tuple(objects))], folder / "photo.jsonl")
    return folder / "photo.jsonl"


@pytest.fixture(scope="module")
def mosaic(tmp_path_factory: pytest.TempPathFactory) -> Mosaic:
    """A photograph of 2 x 2 scenes, and the scenes."""
    folder = tmp_path_factory.mktemp("mosaic")
    scenes = read_jsonl(write_scenes(folder, 4, SPECS["framed"], 4))
    return photographed(folder, scenes), list(scenes)


@pytest.fixture(scope="module")
def detector() -> Iterator[Detector]:
    with Detector(MODEL, device="cpu", batch_size=3) as found:
        yield found


def test_a_photographs_objects_are_those_of_its_tiles(detector: Detector, mosaic: Mosaic) -> None:
    photo, scenes = mosaic
    found = detector(photo.with_name("photo.png"), tiles=SIDE, overlap=0.0)
    expected = [
        (obj.name, obj.confidence, tuple(v + (at % 2, at // 2)[k % 2] * SIDE for k, v in enumerate(obj.box)))
        for at, scene in enumerate(detector([scene.image for scene in scenes]))
        for obj in scene
    ]
    assert len(found) == len(expected) > 4 and (found.width, found.height) == (256, 256)
    for obj, (name, confidence, box) in zip(found, expected, strict=True):
        assert (obj.name, obj.box) == (name, pytest.approx(box, abs=0.01))
        assert obj.confidence == pytest.approx(confidence, abs=1e-4)
    assert found.plot().size[0] >= 256 and json.loads(found.to_json())["width"] == 256


def test_images_in_memory_have_tiles_too(detector: Detector, mosaic: Mosaic) -> None:
    path = mosaic[0].with_name("photo.png")
    pixels = np.asarray(Image.open(path))
    one, other = detector([pixels, path], tiles=(SIDE, SIDE), overlap=0.0)
    assert one.names == other.names and len(one) > 4


def answer_of(folder: Path) -> ImageAnswer:
    (answer,) = read_answers(folder)
    return answer


def test_predict_continues_within_a_photograph(
    mosaic: Mosaic, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo, out = photographed(tmp_path, mosaic[1][:2]).with_name("photo.png"), tmp_path / "out"
    two_at_once = "rollout_matching.decode_batch_size=2"
    command = ("predict", photo, two_at_once, "--model", MODEL, "--tiles", SIDE, "--overlap", 0.1, "--out", out)
    done = cli(*command, "--json")
    assert done.code == 0 and json.loads(done.out)["images"] == 1
    whole = answer_of(out)
    assert whole.gt is None and whole.pred and whole.tiling is not None and whole.tiling.overlap == 0.1
    assert json.loads((out / "prediction.json").read_text())["tiles"] == {"width": 128, "height": 128, "overlap": 0.1}
    again = cli(*command, "--json")
    assert json.loads(again.out)["resumed"] == 1 and answer_of(out) == whole
    from coordexp.inference import prediction

    written: list[bytes] = []

    def stopped(path: Path, line: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(line)
        append_line(path, line)

    with monkeypatch.context() as patched:
        patched.setattr(prediction, "append_line", stopped)
        interrupted = cli(*command[:-1], tmp_path / "two")
    assert interrupted.code == 130 and written[0].count(b"\n") == 2  # of 3 tiles
    continued = cli(*command[:-1], tmp_path / "two")
    assert continued.code == 0 and answer_of(tmp_path / "two") == whole
    other = cli(*command[:-4], "--overlap", 0.3, "--out", out)
    assert other.code == 2 and "tiles" in other.err


def test_evaluate_finds_with_tiles_what_it_does_not_find_without(mosaic: Mosaic, tmp_path: Path, cli: Cli) -> None:
    figures = {}
    for name, more in {"whole": (), "tiles": ("--tiles", SIDE, "--overlap", 0)}.items():
        out = tmp_path / name
        done = cli("evaluate", "--model", MODEL, "--data", mosaic[0], "--out", out, "--json", *more)
        figures[name] = json.loads(done.out)["metrics"]
    assert figures["tiles"]["f1"] > figures["whole"]["f1"] and figures["tiles"]["matched_objects"] > 4
    again = cli("evaluate", tmp_path / "tiles", "--json")
    assert json.loads(again.out)["metrics"]["f1"] == pytest.approx(figures["tiles"]["f1"])


def test_several_answers_of_tiles_are_evaluated_as_they_are_predicted(mosaic: Mosaic, tmp_path: Path, cli: Cli) -> None:
    """Those of a tile are merged first. Merged by photograph first, objects had other confidences and numbers, and the
    thresholds were of predictions that no command gives."""
    data = photographed(tmp_path, mosaic[1][:2])
    options = ("--model", MODEL, "--tiles", SIDE, "--overlap", 0.4, "--answers", 3)
    predicted, evaluated = tmp_path / "predicted", tmp_path / "evaluated"
    assert cli("predict", data, "--out", predicted, *options).code == 0
    assert cli("evaluate", "--data", data, "--out", evaluated, *options).code == 0
    (one,), (other,) = read_answers(predicted), read_answers(evaluated)
    found = [[(obj.desc, obj.bins, obj.answers) for obj in answer.pred] for answer in (one, other)]
    assert found[0] == found[1] and len(found[0]) > 4
    sure = [[obj.confidence for obj in answer.pred] for answer in (one, other)]
    assert sure[0] == pytest.approx(sure[1], abs=1e-4)
    figures = json.loads((evaluated / "metrics.json").read_text())
    assert figures["by_answers"]["union"]["f1"] == figures["metrics"]["f1"]


def test_complete_adds_whole_bins_found_in_tiles(mosaic: Mosaic, tmp_path: Path, cli: Cli) -> None:
    (record,) = read_jsonl(mosaic[0])
    few = mosaic[0].with_name("few.jsonl")
    write_jsonl([ImageRecord("p", record.image, 256, 256, record.objects[:1], record.metadata)], few)
    out = tmp_path / "completed.jsonl"
    done = cli("data", "complete", few, "--model", MODEL, "--tiles", SIDE, "--overlap", 0, "--out", out)
    assert done.code == 0
    (completed,) = read_jsonl(out)
    assert len(completed.objects) > 2 and all(obj.soft is not None for obj in completed.objects[1:])
