"""Names are data: what a class or a file is called is printed as it is, through every command that prints any."""

from __future__ import annotations

import csv
import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
import typer

from coordexp.cli import app
from coordexp.evaluation.answers import write_answers
from coordexp.records import GTObject
from support.annotation_folders import paint, voc_object
from support.cli_runs import Outcome, run_cli, small_checkpoint, write_run
from support.scored_answers import random_answers
from support.view_runs import hostile_answers

CLASSES = ("sign [/stop]", "[bold]x[/]", "[a0]", ":car:", "[link=file:///etc]y")
CONVERTED = ("coco", "csv", "labelme", "lvis", "panoptic", "voc", "yolo")
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


def test_a_conversion_prints_names_as_they_are(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_cli(
        capsys, "data", "convert", "labelme", labelme_file(hostile), "--out", hostile / "o [1]", "--no-resize"
    )
    expect(found, *CLASSES, "[c1] left out", "p [a0] [x].json", hostile / "o [1]")


def annotated_as(form: str, folder: Path) -> list[Path]:
    """The classes, each in a box of its own, in a format's file: what its converter is given."""
    boxes = [(name, 10 * k, 1, 10 * k + 9, 30) for k, name in enumerate(CLASSES)]
    if form == "csv":
        with (folder / "t [c].csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("image", "name", "x1", "y1", "x2", "y2"), *((IMAGE, *box) for box in boxes)])
        return [folder / "t [c].csv", Path("--images"), folder / "images"]
    if form == "yolo":
        lines = [f"{k} {(x1 + x2) / 128} 0.3 {(x2 - x1) / 64} 0.5" for k, (_, x1, _, x2, _) in enumerate(boxes)]
        (folder / "images" / IMAGE).with_suffix(".txt").write_text("\n".join(lines), encoding="utf-8")
        (folder / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
        return [folder]
    if form == "voc":
        sides = "".join(voc_object(escape(name), *box) for name, *box in boxes)
        xml = f"<annotation><filename>{IMAGE}</filename>{sides}</annotation>"
        (folder / "images" / IMAGE).with_suffix(".xml").write_text(xml, encoding="utf-8")
        return [folder / "images"]
    if form == "labelme":
        return [labelme_file(folder)]
    segments = [{"image_id": 1, "category_id": k, "bbox": [x, y, 9, 29]} for k, (_, x, y, *_) in enumerate(boxes)]
    content = {
        "images": [{"id": 1, "file_name": IMAGE, "width": 64, "height": 48}],
        "annotations": segments if form in ("coco", "lvis") else [{"image_id": 1, "segments_info": segments}],
        "categories": [{"id": k, "name": name} for k, name in enumerate(CLASSES)],
    }
    (folder / "a [j].json").write_text(json.dumps(content), encoding="utf-8")
    return [folder / "a [j].json", folder / "images"]


@pytest.mark.parametrize("form", CONVERTED)
def test_every_converter_prints_names_as_they_are(form: str, hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("data", "convert", form, *annotated_as(form, hostile), "--out", hostile / "o [1]", "--no-resize")
    expect(run_cli(capsys, *command), *CLASSES, hostile / "o [1]")
    expect(run_cli(capsys, *command), hostile / "o [1]", "exists already", code=2)


def test_looking_at_a_dataset_prints_names_as_they_are(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(hostile)
    expect(
        run_cli(capsys, "data", "check", data, "--sheet", hostile / "s [b].png"), *CLASSES, data, hostile / "s [b].png"
    )
    expect(run_cli(capsys, "data", "stats", data), *CLASSES)
    expect(
        run_cli(capsys, "data", "sample", data, "--count", 1, "--out", hostile / "x [y].jsonl"), hostile / "x [y].jsonl"
    )
    paint(hostile / "images" / "other.png", (64, 48))
    second = data.read_text(encoding="utf-8").replace(IMAGE, "other.png")
    data.write_text(data.read_text(encoding="utf-8") + second, encoding="utf-8")
    expect(run_cli(capsys, "data", "split", data, "--shares", "train=0.5,val=0.5"), hostile / "d [b].train.jsonl")
    data.write_text(data.read_text(encoding="utf-8").replace(CLASSES[0], " [gap] "), encoding="utf-8")
    (hostile / "images" / IMAGE).unlink()
    expect(run_cli(capsys, "data", "check", data), IMAGE, data, code=2)


def test_evaluation_prints_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    expect(run_cli(capsys, "evaluate", run, "--output", tmp_path / "f [i]"), *CLASSES[:4], run, tmp_path / "f [i]")
    expect(run_cli(capsys, "evaluate", "--compare", run, run, "--resamples", 10), *CLASSES[:4], run)
    expect(run_cli(capsys, "evaluate", run / "[none]"), run / "[none]", code=2)


def test_training_and_predicting_print_names_as_they_are(
    tmp_path: Path, hostile: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    data, out = write_dataset(hostile), tmp_path / "out [o1]"
    run = write_run(tmp_path, 1, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                    training__output_dir=str(out), training__per_device_train_batch_size=1)  # fmt: skip
    expect(run_cli(capsys, "config", "check", run), out, data, model)
    (tmp_path / "other").mkdir()
    expect(run_cli(capsys, "config", "diff", run, write_run(tmp_path / "other", 1, model)), out, data, code=1)
    expect(run_cli(capsys, "train", run), f"saved to {out}")
    again = write_run(tmp_path, 1, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                      training__output_dir=str(out),
                      training__resume_from_checkpoint=True, training__max_steps=2,
                      training__per_device_train_batch_size=1)  # fmt: skip
    expect(run_cli(capsys, "train", again), f"resuming from {out / 'checkpoint-1'}", f"saved to {out}")
    expect(
        run_cli(capsys, "predict", run, hostile / "images", "--output", tmp_path / "a [1]"), tmp_path / "a [1]", model
    )
    expect(run_cli(capsys, "evaluate", run), *CLASSES[:3], model, out)
    expect(run_cli(capsys, "model", "info", model), model)
    expect(run_cli(capsys, "model", "export", model, tmp_path / "e [2]"), tmp_path / "e [2]")


def test_the_viewer_prints_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_answers(hostile_answers(tmp_path), tmp_path / FOLDER / "predictions.jsonl")
    out = tmp_path / "v [w].html"
    expect(run_cli(capsys, "view", tmp_path / FOLDER, "--out", out), f"wrote {out}")


def test_changing_a_dataset_prints_names_as_they_are(
    hostile: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    data, out = write_dataset(hostile), hostile / "o [1].jsonl"
    drop = ("data", "drop", data, "--per-class", f"{CLASSES[0]}=0", "--out", out)
    expect(run_cli(capsys, *drop), *CLASSES, out)
    expect(run_cli(capsys, *drop), out, "exists already", code=2)
    expect(run_cli(capsys, "data", "drop", data, "--per-class", "[no]=0", "--out", out, "--overwrite"), "[no]", code=2)
    expect(run_cli(capsys, "data", "pack", data, "--out", hostile / "k [2]" / "k.jsonl"), hostile / "k [2]")
    full = hostile / "f [3].jsonl"
    expect(run_cli(capsys, "data", "complete", data, "--model", model, "--out", full), full)
    expect(run_cli(capsys, "data", "scenes", "--out", hostile / "s [4]", "--count", 1), hostile / "s [4]")


def test_exports_print_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_answers(hostile_answers(tmp_path), tmp_path / FOLDER / "predictions.jsonl")
    for form in ("coco", "csv", "labelme", "voc", "yolo"):
        out = tmp_path / f"{form} [e]"
        expect(run_cli(capsys, "export", form, tmp_path / FOLDER, "--out", out), out)
    expect(run_cli(capsys, "export", "csv", tmp_path / "[none]", "--out", tmp_path), tmp_path / "[none]", code=2)


def test_models_are_printed_as_they_are_called(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    expect(run_cli(capsys, "model", "tiny", tmp_path / "t [1]"), tmp_path / "t [1]")
    expect(run_cli(capsys, "model", "expand-vocab", tmp_path / "t [1]", tmp_path / "x [2]"), tmp_path / "t [1]", code=2)
    expect(run_cli(capsys, "model", "merge", model, tmp_path / "m [3]"), model, code=2)


def test_a_first_configuration_prints_names_as_they_are(
    hostile: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    out = hostile / "r [y].yaml"
    expect(run_cli(capsys, "init", write_dataset(hostile), "--model", model, "--out", out, "--cpu"), f"wrote {out}")
    missing = run_cli(capsys, "init", hostile / "[none]", "--model", model, "--out", hostile / "other.yaml")
    expect(missing, hostile / "[none]", code=2)


def test_stage_2_its_launch_and_its_replay_print_names_as_they_are(
    tmp_path: Path, hostile: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    data, out = write_dataset(hostile), tmp_path / "out [o2]"
    run = write_run(hostile, 2, model, custom__train_jsonl=str(data), custom__val_jsonl=str(data),
                    training__output_dir=str(out), training__per_device_train_batch_size=1,
                    rollout_matching__monitor_dump={"enabled": True, "min_free_gb": 0.0})  # fmt: skip
    expect(run_cli(capsys, "launch", "--config", run, "--dry-run"), run, out)
    expect(run_cli(capsys, "launch", "--config", run, "--print"), model, data, out)
    expect(run_cli(capsys, "launch", "--config", hostile / "[none].yaml"), hostile / "[none].yaml", code=2)
    expect(run_cli(capsys, "serve", "--config", hostile / "[none].yaml"), hostile / "[none].yaml", code=2)
    expect(run_cli(capsys, "train", run), f"saved to {out}")
    expect(run_cli(capsys, "replay", out / "rollout_records", "--model", model), data.name, "1 records replayed")
    expect(run_cli(capsys, "replay", tmp_path / "[none]"), tmp_path / "[none]", code=2)


def subcommands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, below in subcommands(command).items():
        yield from commands(below, (*words, name))


SILENT = {"config schema", "demo"}  # print no name that a person has given, but the demo's folder
SHOWN_BY = {
    test_changing_a_dataset_prints_names_as_they_are: ("data drop", "data pack", "data complete", "data scenes"),
    test_looking_at_a_dataset_prints_names_as_they_are: ("data check", "data stats", "data sample", "data split"),
    test_evaluation_prints_names_as_they_are: ("evaluate",),
    test_training_and_predicting_print_names_as_they_are: (
        "config check", "config diff", "train", "predict", "model info", "model export",
    ),
    test_exports_print_names_as_they_are: ("export",),
    test_models_are_printed_as_they_are_called: ("model tiny", "model expand-vocab", "model merge"),
    test_a_first_configuration_prints_names_as_they_are: ("init",),
    test_stage_2_its_launch_and_its_replay_print_names_as_they_are: ("launch", "serve", "replay"),
    test_the_viewer_prints_names_as_they_are: ("view",),
    test_every_converter_prints_names_as_they_are: tuple(f"data convert {form}" for form in CONVERTED),
}  # fmt: skip


def test_every_command_has_its_case() -> None:
    """A new command without one fails here, and so does a case that its test does not run."""
    leaves = {" ".join(words) for words, command in commands(typer.main.get_command(app)) if words}
    leaves -= {" ".join(words) for words, command in commands(typer.main.get_command(app)) if subcommands(command)}
    assert {command for shown in SHOWN_BY.values() for command in shown} == leaves - SILENT
    for case, shown in SHOWN_BY.items():
        source = inspect.getsource(case)
        for command in shown:
            words = [word for word in command.split() if word not in CONVERTED]
            assert ", ".join(f'"{word}"' for word in words) in source, command


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_every_text_whole(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(commands(typer.main.get_command(app)))
    assert len(rows) >= 30
    for words, command in rows:
        shown = squeezed(run_cli(capsys, *words, flag).out)
        texts = [param.help for param in command.params if getattr(param, "help", None)]
        assert [text for text in texts if squeezed(text) not in shown] == [], " ".join(words)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    import coordexp

    assert run_cli(capsys, flag).out == f"coordexp {coordexp.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_COORDEXP_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "coordexp data con")
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "coordexp data con")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "convert" in run_cli(capsys).out
