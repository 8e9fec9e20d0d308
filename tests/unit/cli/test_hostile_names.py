"""Commands print class and file names as they are, although they look like rich markup or emoji."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.evaluation.answers import write_answers
from coordexp.records import GTObject
from support.annotation_folders import paint
from support.cli_runs import Cli, Outcome, small_checkpoint, write_run
from support.scored_answers import random_answers
from support.view_runs import hostile_answers

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint") / FOLDER / "model")


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


def test_train_predict_and_models(tmp_path: Path, hostile: Path, cli: Cli, model: Path) -> None:
    data, out = write_dataset(hostile), tmp_path / "out [o1]"
    run = write_run(tmp_path, 1, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                    training__output_dir=str(out), training__per_device_train_batch_size=1)  # fmt: skip
    expect(cli("config", "check", run), out, data, model)
    (tmp_path / "other").mkdir()
    expect(cli("config", "diff", run, write_run(tmp_path / "other", 1, model)), out, data, code=1)
    expect(cli("train", run), f"saved to {out}")
    again = write_run(tmp_path, 1, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                      training__output_dir=str(out),
                      training__resume_from_checkpoint=True, training__max_steps=2,
                      training__per_device_train_batch_size=1)  # fmt: skip
    expect(cli("train", again), f"resuming from {out / 'checkpoint-1'}", f"saved to {out}")
    expect(cli("predict", run, hostile / "images", "--out", tmp_path / "a [1]"), tmp_path / "a [1]", model)
    expect(cli("evaluate", run), *CLASSES[:3], model, out)
    expect(cli("model", "info", model), model)
    expect(cli("model", "export", model, tmp_path / "e [2]"), tmp_path / "e [2]")


def test_view(tmp_path: Path, cli: Cli) -> None:
    write_answers(hostile_answers(tmp_path), tmp_path / FOLDER / "predictions.jsonl")
    out = tmp_path / "v [w].html"
    expect(cli("view", tmp_path / FOLDER, "--out", out), f"wrote {out}")


def test_drop_pack_complete_and_scenes(hostile: Path, cli: Cli, model: Path) -> None:
    data, out = write_dataset(hostile), hostile / "o [1].jsonl"
    drop = ("data", "drop", data, "--per-class", f"{CLASSES[0]}=0", "--out", out)
    expect(cli(*drop), *CLASSES, out)
    expect(cli(*drop), out, "exists already", code=2)
    expect(cli("data", "drop", data, "--per-class", "[no]=0", "--out", out, "--overwrite"), "[no]", code=2)
    expect(cli("data", "pack", data, "--out", hostile / "k [2]" / "k.jsonl"), hostile / "k [2]")
    full = hostile / "f [3].jsonl"
    expect(cli("data", "complete", data, "--model", model, "--out", full), full)
    expect(cli("data", "scenes", "--out", hostile / "s [4]", "--count", 1), hostile / "s [4]")


def test_export(tmp_path: Path, cli: Cli) -> None:
    write_answers(hostile_answers(tmp_path), tmp_path / FOLDER / "predictions.jsonl")
    for form in ("coco", "csv", "labelme", "voc", "yolo"):
        out = tmp_path / f"{form} [e]"
        expect(cli("export", form, tmp_path / FOLDER, "--out", out), out)
    expect(cli("export", "csv", tmp_path / "[none]", "--out", tmp_path), tmp_path / "[none]", code=2)


def test_tiny_expand_and_merge(tmp_path: Path, cli: Cli, model: Path) -> None:
    expect(cli("model", "tiny", tmp_path / "t [1]"), tmp_path / "t [1]")
    expect(cli("model", "expand-vocab", tmp_path / "t [1]", tmp_path / "x [2]"), tmp_path / "t [1]", code=2)
    expect(cli("model", "merge", model, tmp_path / "m [3]"), model, code=2)


def test_init(hostile: Path, cli: Cli, model: Path) -> None:
    out = hostile / "r [y].yaml"
    expect(cli("init", write_dataset(hostile), "--model", model, "--out", out, "--cpu"), f"wrote {out}")
    missing = cli("init", hostile / "[none]", "--model", model, "--out", hostile / "other.yaml")
    expect(missing, hostile / "[none]", code=2)


def test_launch_serve_and_replay(tmp_path: Path, hostile: Path, cli: Cli, model: Path) -> None:
    data, out = write_dataset(hostile), tmp_path / "out [o2]"
    run = write_run(hostile, 2, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                    training__output_dir=str(out), training__per_device_train_batch_size=1,
                    rollout_matching__monitor_dump={"enabled": True, "min_free_gb": 0.0})  # fmt: skip
    expect(cli("launch", "--config", run, "--dry-run"), run, out)
    expect(cli("launch", "--config", run, "--print"), model, data, out)
    expect(cli("launch", "--config", hostile / "[none].yaml"), hostile / "[none].yaml", code=2)
    expect(cli("serve", "--config", hostile / "[none].yaml"), hostile / "[none].yaml", code=2)
    expect(cli("train", run), f"saved to {out}")
    expect(cli("replay", out / "rollout_records", "--model", model), data.name, "1 records replayed")
    expect(cli("replay", tmp_path / "[none]"), tmp_path / "[none]", code=2)
