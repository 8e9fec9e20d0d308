"""No command replaces the results of another one unasked, and a checkpoint answers to the prompt that it knows."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordexp.checkpoints.card import card_of_run, with_own_template, write_card
from coordexp.cli.commands import app
from coordexp.config import RunConfig, load_config
from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.preparation import NO_RESIZE
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import ImageAnswer, class_list_of, read_answers, write_answers
from coordexp.inference import evaluation
from coordexp.inference.evaluation import evaluation_folder
from coordexp.inference.prediction import AnswerFolder
from coordexp.records import GTObject
from support.cli_runs import Cli, Outcome, files_of_at_most, write_run
from support.scored_answers import random_answers


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "data", 3, SPARSE, 5)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_predict_deletes_no_answers(tmp_path: Path, cli: Cli, model: Path, data: Path) -> None:
    run, out = write_run(tmp_path, 1, model), tmp_path / "out"

    def predict(*options: object) -> Outcome:
        return cli("predict", run, data, "--out", out, *options)

    assert predict("--limit", 2).code == 0
    assert predict().code == 0 and len(read_answers(out)) == 3  # more images continue
    before = files_of(out)
    fewer = predict("--limit", 1)
    assert fewer.code == 2 and "2 images that are not among these 1," in fewer.err
    assert "--overwrite" in fewer.err and files_of(out) == before
    assert predict("--limit", 1, "--overwrite").code == 0 and len(read_answers(out)) == 1


def test_resumed_answers_have_the_annotations_of_now(tmp_path: Path, cli: Cli, model: Path, data: Path) -> None:
    """Corrected annotations need no new answers; figures of what was predicted before were of the old ones."""
    asked = ("predict", write_run(tmp_path, 1, model), data, "--out", tmp_path / "out")
    assert cli(*asked).code == 0
    corrected = (GTObject("corrected", "bbox_2d", (1, 2, 3, 4)),)
    write_jsonl([replace(record, objects=corrected) for record in read_jsonl(data)], data)
    assert "3 of them by an earlier run" in cli(*asked).out
    assert [answer.gt for answer in read_answers(tmp_path / "out")] == [corrected] * 3
    truth = json.loads((tmp_path / "out" / "coco_ground_truth.json").read_text())
    assert {category["name"] for category in truth["categories"]} == {"corrected"}


@pytest.mark.parametrize(
    ("command", "out", "file"), [("evaluate", "out", "out/metrics.json"), ("view", "page/view.html", "page/view.html")]
)
def test_what_a_full_disk_ended_is_made_again_and_replaces_nothing(
    command: str, out: str, file: str, tmp_path: Path, cli: Cli
) -> None:
    write_answers(random_answers(3, 1), tmp_path / "predictions.jsonl")
    words, written = (command, tmp_path, "--out", tmp_path / out), tmp_path / file
    with files_of_at_most(100):
        failed = cli(*words)
    assert failed.code == 2 and f"{written}: File too large" in failed.err
    assert cli(*words).code == 0
    before = files_of(written.parent)
    with files_of_at_most(100):
        assert cli(*words).code == 2
    assert files_of(written.parent) == before


def test_evaluations_of_two_models_stay_apart(tmp_path: Path, cli: Cli, model: Path, data: Path) -> None:
    run = write_run(tmp_path, 1, model)
    other, folder = shutil.copytree(model, tmp_path / "other"), tmp_path / "out1" / "evaluation"
    for options in ((), ("--model", other)):
        assert cli("evaluate", run, "--limit", 1, *options).code == 0
    found = {path.name: json.loads((path / "metrics.json").read_text()) for path in folder.iterdir()}
    assert {name: content["model"] for name, content in found.items()} == {"model": str(model), "other": str(other)}
    before = files_of(folder)
    assert cli("evaluate", run, "--limit", 1).code == 0  # the same evaluation again
    refused = cli("evaluate", run, "--limit", 2)
    assert refused.code == 2 and "limit (1, now 2)" in refused.err and "--overwrite" in refused.err
    assert files_of(folder) == before
    assert cli("evaluate", run, "--limit", 2, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("runs/a", "runs/a/evaluation"),
        ("runs/a/checkpoint-4", "runs/a/evaluation/checkpoint-4"),
        ("runs/b", "runs/a/evaluation/b"),
        ("runs/b/checkpoint-4", "runs/a/evaluation/b-checkpoint-4"),
    ],
)
def test_each_model_has_a_folder_for_its_evaluation(model: str, folder: str) -> None:
    assert evaluation_folder(Path("runs/a"), Path(model)) == Path(folder)


@pytest.mark.parametrize(
    "argv", [("export", "csv", "saved", "--out", "filled"), ("evaluate", "saved", "--out", "filled")]
)
def test_a_folder_with_other_results_needs_overwrite(
    argv: tuple[str, ...], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, seed in (("saved", 1), ("filled", 2)):
        write_answers(random_answers(4, seed), tmp_path / folder / "predictions.jsonl")
    before = files_of(tmp_path / "filled")
    refused = cli(*argv)
    assert refused.code == 2 and refused.err.startswith("error: filled: ") and "--overwrite" in refused.err
    assert files_of(tmp_path / "filled") == before
    assert cli(*argv, "--overwrite").code == 0


def test_a_folder_that_is_taken_over_has_answers_of_one_command(tmp_path: Path, cli: Cli) -> None:
    """``--overwrite`` in the other command's folder: its answers were taken for this command's, and its settings for
    those of the new answers."""
    saved, folder = tmp_path / "saved.jsonl", AnswerFolder(tmp_path / "out")
    write_answers(random_answers(4, 1), saved)
    assert cli("evaluate", saved, "--out", folder.path).code == 0 and len(folder.answers()) == 4
    folder.claim({"class_list": ["b"]}, [], True, "")
    assert folder.answers() == {} and not (folder.path / "metrics.json").exists()
    folder.append(random_answers(4, 2))
    assert class_list_of(folder.path) == ("b",)
    assert cli("evaluate", saved, "--out", folder.path, "--overwrite").code == 0
    assert class_list_of(folder.path) == () and not (folder.path / "prediction.json").exists()


def test_pictures_that_came_later_are_answered_once(tmp_path: Path) -> None:
    """A photo that was put into the folder after its first answers was a newer one than was answered, for ever."""
    (first, later), folder = read_jsonl(write_scenes(tmp_path / "data", 2, SPARSE, 5)), AnswerFolder(tmp_path / "out")
    folder.claim({}, [first], False, "")
    for file, age_s in ((first.image, 30), (folder.path / "prediction.json", 20), (later.image, 10)):
        os.utime(file, (time.time() - age_s, time.time() - age_s))
    for record in (first, later):
        folder.append([ImageAnswer.of(record, ())])
        folder.claim({}, [first, later], False, "")
    os.utime(later.image, (time.time() + 9, time.time() + 9))
    with pytest.raises(DataError, match="another picture now"):
        folder.claim({}, [first, later], False, "")


def test_pictures_of_a_later_time_do_not_stop_a_prediction_from_continuing(tmp_path: Path) -> None:
    """Their times are of another clock, or of an archive from another time zone; a later change is still seen."""
    (record,), folder = read_jsonl(write_scenes(tmp_path / "data", 1, SPARSE, 5)), AnswerFolder(tmp_path / "out")
    later = time.time() + 9 * 3600
    os.utime(record.image, (later, later))
    folder.claim({}, [record], False, "")
    folder.append([ImageAnswer.of(record, ())])
    folder.claim({}, [record], False, "")
    os.utime(record.image, (later + 10, later + 10))
    with pytest.raises(DataError, match="or a newer one"):
        folder.claim({}, [record], False, "")


def test_drawings_never_replace_the_images_to_answer(tmp_path: Path) -> None:
    records = read_jsonl(write_scenes(tmp_path, 1, SPARSE, 5))
    before = files_of(tmp_path)
    with pytest.raises(DataError, match="images is for drawings, which would replace the images to answer"):
        AnswerFolder(tmp_path).claim({}, records, True, "")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("evaluate", "RUN", "--out", "notes.txt/figures"), "notes.txt is a file, where a folder is needed"),
        (("evaluate", "RUN", "--out", "closed/figures"), "closed cannot be written to; name another folder with --out"),
        (("evaluate", "RUN", "--sheet", "closed/sheet.png"), "closed cannot be written to; name another folder"),
        (("evaluate", "RUN", "--model", "closed/model", "--calibrate"), "closed/model cannot be written to"),
        (("model", "export", "closed/model", "closed/copy"), "closed cannot be written to; name another folder"),
        (("model", "export", "closed/model", "nowhere/copy"), "nowhere is a link to nothing, where a folder is needed"),
    ],
)
def test_nothing_is_computed_for_a_folder_that_cannot_be_written(
    argv: tuple[str, ...], says: str, tmp_path: Path, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "nowhere").symlink_to("disk that is not mounted")
    shutil.copytree(model, tmp_path / "closed" / "model")
    # Not by the mode of a folder, which does not keep root from writing.
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and "closed" in str(path)))
    monkeypatch.setattr(evaluation, "answer_jsonl", None)
    run = write_run(tmp_path, 1, model)
    refused = cli(*(str(run) if word == "RUN" else word for word in argv))
    assert refused.code == 2 and says in refused.err, refused.err


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path, model: Path) -> Path:
    """A checkpoint of a run with a prompt of its own."""
    folder = shutil.copytree(model, tmp_path / "trained")
    keys = {"template__prompt": "Find it.", "custom__object_field_order": "geometry_first"}
    run = write_run(tmp_path, 1, model, **keys)
    write_card(card_of_run(load_config(run), NO_RESIZE, ()), folder)
    return folder


def configured(tmp_path: Path, model: Path, **keys: object) -> RunConfig:
    return load_config(write_run(tmp_path, 2, model, **keys))


def test_an_open_prompt_is_the_checkpoints_own(tmp_path: Path, trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = with_own_template(configured(tmp_path, trained))
    assert (config.template.prompt, config.custom.object_field_order) == ("Find it.", "geometry_first")
    assert "template.prompt: 'Find it.'" in caplog.text
    assert with_own_template(config) == config and len(caplog.messages) == 2


@pytest.mark.parametrize(("key", "value"), [("template.prompt", "Hello"), ("custom.object_field_order", "desc_first")])
@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_another_prompt_than_the_checkpoints_is_an_error(
    command: str, key: str, value: str, tmp_path: Path, cli: Cli, trained: Path, data: Path
) -> None:
    words = [f"{key}={value}"]
    if command == "predict":
        run = write_run(tmp_path, 2, trained, **{key.replace(".", "__"): value})
        outcome = cli(command, run, data, "--out", tmp_path / "x")
    else:
        outcome = cli(command, write_run(tmp_path, 2, trained), *words)
    assert outcome.code == 2 and f"{key}: '{value}'" in outcome.err and "template.allow_prompt_change" in outcome.err
    assert not (tmp_path / "out2").exists() and not (tmp_path / "x").exists()


def test_another_prompt_on_purpose_is_used(tmp_path: Path, trained: Path, model: Path) -> None:
    keys = {"template__prompt": "Hello", "template__allow_prompt_change": True}
    assert with_own_template(configured(tmp_path, trained, **keys)).template.prompt == "Hello"
    assert with_own_template(configured(tmp_path, model, template__prompt="Hello")).template.prompt == "Hello"
    with pytest.raises(ConfigError, match=r"template\.prompt"):
        with_own_template(configured(tmp_path, model, template__prompt="Hello"), trained)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_a_sheet_replaces_only_a_sheet(tmp_path: Path, cli: Cli, model: Path, data: Path, suffix: str) -> None:
    photo, sheet = data.parent / "images" / "000000.png", tmp_path / f"sheet{suffix}"
    before = photo.read_bytes()
    refused = cli("data", "check", data, "--model", model, "--sheet", photo)
    assert refused.code == 2 and "000000.png: is there already" in refused.err and photo.read_bytes() == before
    for _ in range(2):
        assert cli("data", "check", data, "--model", model, "--sheet", sheet).code == 0


def test_a_page_replaces_only_a_page(tmp_path: Path, cli: Cli) -> None:
    answers, page = tmp_path / "predictions.jsonl", tmp_path / "view.html"
    write_answers(random_answers(2, 0), answers)
    notes = tmp_path / "notes.html"
    notes.write_text("<p>mine</p>", encoding="utf-8")
    for other in (answers, notes, tmp_path):
        before = None if other.is_dir() else other.read_bytes()
        refused = cli("view", answers, "--out", other)
        assert refused.code == 2 and "no command of CoordExp wrote it" in refused.err
        assert other.is_dir() or other.read_bytes() == before
    for _ in range(2):
        assert cli("view", answers, "--out", page).code == 0


def test_a_served_page_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coordexp.viewer import serve

    class Served(Exception):
        pass

    def make_server(*_: object) -> None:
        raise Served

    answers = tmp_path / "predictions.jsonl"
    write_answers(random_answers(2, 0), answers)
    (tmp_path / "view.html").write_text("<p>mine</p>", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "make_server", make_server)
    outcome = CliRunner().invoke(app, ["view", str(answers), "--serve"])
    assert isinstance(outcome.exception, Served)
    written = CliRunner().invoke(app, ["view", str(answers), "--port", "8000"])
    assert "--port has no use here; it belongs to --serve" in str(written.exception)
