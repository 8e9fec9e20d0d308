"""Help explains every command by examples that work; spellings of other tools and earlier versions get an answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coordexp.data.scenes
import coordexp.inference.prediction
from coordexp.cli.commands import whole_command
from coordexp.data.files import asset
from coordexp.errors import ConfigError
from support.cli_runs import Cli, write_run
from support.config_samples import stage1, stage2, write_yaml

ROOT: Any = whole_command()


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


COMMANDS = {" ".join(path): command for path, command in commands()}
GROUPS = ["", *(name for name, command in COMMANDS.items() if hasattr(command, "commands"))]


@pytest.mark.parametrize("group", GROUPS)
def test_summaries_of_commands_are_whole_and_fit_in_a_line(group: str, cli: Cli) -> None:
    shown = cli(*group.split(), "--help").out
    inside = COMMANDS[group] if group else ROOT
    lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ") and line.split()}
    for name, command in inside.commands.items():
        summary = (command.help or "").split("\n")[0].rstrip(".")
        assert summary and summary in lines[name] and len(lines[name]) <= 80


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in GROUPS])
def test_examples_are_accepted_as_written(name: str, cli: Cli) -> None:
    shown = cli(*name.split(), "--help").out
    _, _, below = shown.partition("Example")
    examples = [line.strip() for line in below.splitlines() if f"coordexp {name}" in line]
    assert examples
    for line in examples:
        words = shlex.split(line.partition(" > ")[0])
        words = words[words.index("coordexp") + 1 + len(name.split()) :]
        COMMANDS[name].make_context(name, words)  # refuses options and values that do not exist


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("convert", "coordexp data convert"),
        ("help", "coordexp -h"),
        ("traim", "train"),
        ("model train", "coordexp train"),
        ("train x.yaml --max_steps 3", "training.max_steps=3"),
        ("train x.yaml --training.max_steps=3", "training.max_steps=3"),
        ("train x.yaml --lr 1e-4", "training.learning_rate=1e-4"),
        ("train x.yaml --batch 4", "training.effective_batch_size=4"),
        ("predict y.png --batch 4", "rollout_matching.decode_batch_size=4"),
        ("data complete y.jsonl --out z.jsonl --batch 4", "rollout_matching.decode_batch_size=4"),
        ("train x.yaml --max-step 3", "training.max_steps=3"),
        ("export onnx run", "'onnx' is not one of 'coco', 'yolo'"),
        ("init data --model Qwen/Qwen3-VL-2B-Instruct", "HF_HUB_OFFLINE is set; unset it"),
    ],
)
def test_what_does_not_exist_has_a_hint(typed: str, answer: str, cli: Cli) -> None:
    outcome = cli(*typed.split())
    assert outcome.code == 2 and answer in outcome.err and "Value error" not in outcome.err


@pytest.mark.parametrize("command", ["data check x.jsonl", "data complete x.jsonl --out y.jsonl", "evaluate run"])
def test_a_picture_of_another_suffix_is_refused_first(command: str, cli: Cli) -> None:
    outcome = cli(*command.split(), "--sheet", "sheet.webm")
    assert outcome.code == 2 and "sheet.webm" in outcome.err and ".png" in outcome.err


def test_options_may_name_the_home_folder(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells let it: --out=~/scenes reaches a command unchanged."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path)
    made = cli("data", "scenes", "--out=~/scenes", "--count", "1")
    assert (made.code, made.out) == (0, f"wrote {tmp_path}/me/scenes/scenes.jsonl: 1 images\n")
    assert [path.name for path in tmp_path.iterdir()] == ["me"]
    assert cli("data", "check", "~/scenes/scenes.jsonl").code == 0


def test_debug_may_come_after_the_command(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        cli("train", tmp_path / "missing.yaml", "--debug")


@pytest.mark.parametrize("command", ["train", "evaluate", "config check", "launch", "serve", "replay records"])
def test_the_configuration_is_positional_and_config_is_accepted(command: str, tmp_path: Path, cli: Cli) -> None:
    missing = tmp_path / "missing.yaml"
    for words in (["--config", missing], [f"--config={missing}"], [missing]):
        outcome = cli(*command.split(), *words)
        assert outcome.code == 2 and "missing.yaml" in outcome.err and "Usage" not in outcome.err


def test_evaluate_a_checkpoint_by_its_own_settings(tmp_path: Path, cli: Cli, model: Path) -> None:
    data = write_run(tmp_path, 1, model).parent / "scenes.jsonl"
    keys = ("rollout_matching.max_new_tokens=8", "rollout_matching.decode_batch_size=2")
    done = cli("evaluate", "--model", model, "--data", data, "--out", tmp_path / "figures", *keys)
    assert done.code == 0 and (tmp_path / "figures" / "metrics.json").is_file()
    lines = (tmp_path / "figures" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4 and all(json.loads(line)["truncated"] for line in lines), "8 tokens are too few"
    demo = asset("checkpoints/demo-stage1")
    shown = cli("evaluate", "--model", demo, "--data", data, "--print").out
    assert "prompt: Detect every object." in shown, "the prompt of the run that wrote it"
    refused = cli("evaluate", "--model", model)
    assert refused.code == 2 and "--data" in refused.err
    refused = cli("evaluate", "--model", model, "--data", data, "training.max_steps=3")
    assert refused.code == 2 and "training.max_steps" in refused.err, "an evaluation does not read it"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--aliases", "missing.yaml"), "missing.yaml: not readable"),
        (("--overlap", "0.3"), "overlap has no use here; it belongs to tiles (--tiles)"),
        (("--limit", "1"), "nobody/nothing: no such folder here"),
    ],
)
@pytest.mark.parametrize("by", ["--model nobody/nothing", "model.model=nobody/nothing"])
def test_mistakes_in_options_show_before_a_model_of_the_hub_is_fetched(
    by: str, words: tuple[str, ...], answer: str, tmp_path: Path, cli: Cli, model: Path
) -> None:
    outcome = cli("evaluate", write_run(tmp_path, 1, model), *by.split(), *words)
    assert outcome.code == 2 and answer in outcome.err


def test_keys_for_a_prediction_by_a_checkpoint_alone(
    tmp_path: Path, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupted(config: Any, *_: object, output: Path, **__: object) -> None:
        seen.append((config.rollout_matching.max_new_tokens, config.global_max_length))
        if len(seen) == 2:
            output.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(coordexp.inference.prediction, "run_prediction", interrupted)
    data = write_run(tmp_path, 1, model).parent / "scenes.jsonl"
    out = tmp_path / "answers"
    asked = ("predict", data, "--model", model, "--out", out)
    outcome = cli(*asked, "rollout_matching.max_new_tokens=8", "global_max_length=512")
    assert seen == [(8, 512)]
    assert outcome.code == 130 and outcome.err == "interrupted: nothing is answered yet\n"
    outcome = cli(*asked)
    assert outcome.code == 130 and len(outcome.err.splitlines()) == 1 and str(out) in outcome.err
    refused = cli(*asked, "rollout_matching.max_new_token=8")
    assert refused.code == 2 and "max_new_tokens" in refused.err


@pytest.mark.parametrize(("begun", "says"), [(False, "nothing is answered yet"), (True, "answers so far are in ")])
def test_an_interrupted_completion_says_how_it_continues(
    tmp_path: Path, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, says: str
) -> None:
    def interrupted(*_: object, output: Path, **__: object) -> None:
        if begun:
            output.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(coordexp.inference.prediction, "run_prediction", interrupted)
    data = write_run(tmp_path, 1, model).parent / "scenes.jsonl"
    outcome = cli("data", "complete", data, "--model", model, "--out", tmp_path / "completed.jsonl")
    assert outcome.code == 130 and says in outcome.err


def test_a_file_that_ends_too_early_is_not_an_abort(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's error of a compiled module that is cut off; click shows it as "Aborted!"."""

    def cut_off(*_: object, **__: object) -> None:
        raise EOFError("marshal data too short")

    monkeypatch.setattr(coordexp.data.scenes, "write_scenes", cut_off)
    with pytest.raises(RuntimeError, match=r"marshal data too short.*__pycache__"):
        cli("data", "scenes", "--out", "scenes", "--count", 1)


def test_keys_reach_a_replay(tmp_path: Path, cli: Cli) -> None:
    run = write_yaml(tmp_path, stage1())
    outcome = cli("replay", run, "records", "training.max_step=3")
    assert outcome.code == 2 and "did you mean 'max_steps'" in outcome.err


@pytest.mark.parametrize(
    ("word", "of_losses"),
    [
        ("rollout_matching.maskiou_gate=0.4", False),
        ("custom.object_field_order=geometry_first", False),
        ("template.prompt=Find.", True),
        ("rollout_matching.pipeline.objective[0].weight=2", True),
    ],
)
def test_a_key_that_a_replay_does_not_read_is_refused(word: str, of_losses: bool, tmp_path: Path, cli: Cli) -> None:
    run, refused = write_yaml(tmp_path, stage2()), f"{word.partition('=')[0]} has no use here: a record is matched"
    without = cli("replay", run, "records", word)
    assert without.code == 2 and refused in without.err
    with_losses = cli("replay", run, "records", word, "--model", asset("checkpoints/demo-stage1"))
    assert with_losses.code == 2 and (refused in with_losses.err) is not of_losses
