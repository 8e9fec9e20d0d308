"""``coordexp.convert``, ``train``, ``evaluate``, ``tile`` and ``complete``: the commands from Python."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

import coordexp
from coordexp import CompletionRules, complete, convert, evaluate, tile, train
from coordexp.api import evaluated_run
from coordexp.config import load_config
from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import ConfigError, DataError, RunFinished
from coordexp.training.state import callback_states, restore_callbacks
from support.cli_runs import small_checkpoint, write_run
from support.one_scene import as_coco, as_labelme

TWO: Any = np.int64(2)
NOT_WHOLE: tuple[Any, ...] = (2.5, "2", True)


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps.append(state.global_step)


def test_editors_and_type_checkers_see_every_public_name() -> None:
    stub = ast.parse(Path(coordexp.__file__).with_suffix(".pyi").read_text())
    names = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names | {"__version__"} == set(dir(coordexp))


def test_validation_data_of_the_card_that_are_not_there_are_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error named --data, which nobody gave."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"custom\.val_jsonl: outputs/\S+\.jsonl: file not found"):
        evaluate(model=asset("checkpoints/demo-stage1"))


def test_a_run_has_metrics_history_and_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    watching = Watching()
    given = {"training.max_steps": 2, "training.logging_steps": 1, "training.run_name": "a #1", "training.vit_lr": None}
    run = train(config, given, callbacks=[watching])
    words = json.loads((run.checkpoint / "run_manifest.json").read_text())["overrides"]
    assert words[2:] == ["training.run_name='a #1'", "training.vit_lr=null"]
    assert watching.steps == [1, 2]
    losses = [line["loss"] for line in run.history if "loss" in line]
    assert len(losses) == 2 and run.metrics["loss"] == losses[-1]
    assert run.config.training.max_steps == 2 and (run.checkpoint / "model.safetensors").is_file()
    quiet = evaluate(config, model=run.checkpoint, limit=2, out=tmp_path / "figures", quiet=True)
    assert quiet.metrics["images"] == len(quiet.answers) == 2 and (tmp_path / "figures" / "metrics.json").is_file()
    own = evaluate(model=run.checkpoint, limit=TWO, out=tmp_path / "own", quiet=True)
    for given in NOT_WHOLE:  # 2.5 evaluated three images
        with pytest.raises(ConfigError, match=f"limit: {given!r}; give a whole number"):
            evaluate(model=run.checkpoint, limit=given, out=tmp_path / "never")
    assert [a.text for a in own.answers] == [a.text for a in quiet.answers], "with the run's own settings"
    several = evaluate(model=run.checkpoint, limit=2, out=tmp_path / "several", quiet=True, answers=2)
    assert several.answers[0].text == own.answers[0].text and several.answers[0].num_answers == 2
    assert several.by_answers["one"]["f1"] == own.metrics["f1"] and not own.by_answers
    evaluate(model=run.checkpoint, limit=2, out=tmp_path / "named", quiet=True, classes=["red circle"])
    for other in (
        {},
        {"classes": ["blue square"]},
        {"classes": ["red circle"], "limit": 1},
        {"classes": ["red circle"], "answers": 2},
    ):
        with pytest.raises(DataError, match="holds an evaluation with another"):
            evaluate(**{"model": run.checkpoint, "limit": 2, "out": tmp_path / "named", "quiet": True, **other})
    shorter = {"rollout_matching.max_new_tokens": 7}
    with pytest.raises(DataError, match=r"another max_new_tokens \(\d+, now 7\)"):
        evaluate(config, shorter, model=run.checkpoint, limit=2, out=tmp_path / "figures")
    assert "Loading weights" not in capsys.readouterr().err
    for wrong, says in (
        ({}, "name a configuration or model="),
        ({"model": run.checkpoint, "overrides": {"training.seed": 1}}, "overrides belong to a configuration"),
        ({"config": config, "overrides": {"template.prompt": "😀", "rollout_matching.decoding.temperature": 0},
          "answers": 2}, "0 makes all 2 answers the same"),  # they were sampled at 0.7
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            evaluate(**wrong)
    words: Any = ["training.max_steps=3"]  # as on a command line
    for call in (train, evaluate):
        with pytest.raises(ConfigError, match="is not a mapping of keys to values"):
            call(config, words)
    with pytest.raises(ConfigError, match="is not a mapping of keys to values"):
        complete(load_config(config).custom.train_jsonl[0].path, tmp_path / "out.jsonl", config=config, overrides=words)


def test_overrides_of_an_evaluation_are_values_not_words_of_a_command_line() -> None:
    config, words = asset("configs/demo/stage1.yaml"), "Detect 😀 for ${price}."
    found = {"model.model": str(asset("checkpoints/demo-stage1")), "custom.val_jsonl": str(config)}
    run, _ = evaluated_run(config, None, None, overrides={"template.prompt": words, **found})
    assert run.template.prompt == words
    with pytest.raises(ConfigError, match=r"training\.max_stepz \(override\): unknown key"):
        evaluate(config, {"training.max_stepz": 3})


def test_a_runs_configuration_has_the_prompt_that_it_was_trained_with(tmp_path: Path) -> None:
    """That of the run that wrote its model."""
    path = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    first = train(path, {"template.prompt": "Find."}, quiet=True)
    given = {"model.model": str(first.checkpoint), "training.output_dir": str(tmp_path / "second")}
    second = train(path, given, quiet=True)
    assert second.config.template.prompt == "Find."
    assert second.config == load_config(second.checkpoint / "resolved_config.yaml")


def test_an_evaluation_is_replaced_if_asked(tmp_path: Path) -> None:
    config, out = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model")), tmp_path / "figures"
    evaluate(config, limit=1, out=out, quiet=True)
    with pytest.raises(DataError, match="holds an evaluation with another"):
        evaluate(config, limit=2, out=out, quiet=True)
    assert evaluate(config, limit=2, out=out, quiet=True, overwrite=True).metrics["images"] == 2


def test_a_runs_limit_is_of_its_own_validation_data(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"), custom__val_sample_limit=1)
    data = load_config(config).custom.val_jsonl
    given: list[dict[str, Any]] = [{}, {"data": data}, {"data": data, "overrides": {"custom.val_sample_limit": 3}}]
    results = [evaluate(config, out=tmp_path / f"{n}", quiet=True, **one) for n, one in enumerate(given)]
    assert [len(one.answers) for one in results] == [1, 4, 3]


def test_tiles_are_cut_and_replaced_if_asked(tmp_path: Path) -> None:
    scenes, out = write_scenes(tmp_path, 4, SPARSE, 5), tmp_path / "tiles.jsonl"
    counts = tile(scenes, out, np.int64(64), overlap=0)
    assert (counts.photographs, counts.tiles, len(read_jsonl(out, check_images=True))) == (4, 16, 16)
    with pytest.raises(DataError, match="exists already"):
        tile(scenes, out, (128, 64))
    with pytest.raises(DataError, match="is the dataset of the photographs"):
        tile(out, out, 32, overwrite=True)
    assert tile(scenes, out, (128, 64), overlap=0, overwrite=True).tiles == 8
    with pytest.raises(ConfigError, match="overlap"):
        tile(scenes, tmp_path / "other.jsonl", 64, overlap=1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"size": None}, "tiles of None"),
        ({"size": 64.5}, "tiles of 64.5"),
        ({"size": (64, 32, 16)}, r"tiles of \(64, 32, 16\)"),
        ({"size": 0}, "tiles of 0x0"),
        ({"overlap": "x"}, "overlap of tiles: 'x'"),
        ({"overlap": float("nan")}, "overlap of tiles: nan"),
        ({"min_area_ratio": 20}, "min_area_ratio: 20; give a share"),
        ({"negatives": -1}, "negatives: -1; give a share"),
        ({"negatives": float("nan")}, "negatives: nan; give a share"),
        ({"data": "missing.jsonl", "overwrite": True}, r"missing\.jsonl: file not found"),
    ],
)
def test_impossible_tiles_are_refused_before_anything_is_written(
    wrong: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_scenes(tmp_path, 1, SPARSE, 5)
    (out := tmp_path / "tiles.jsonl").write_text("as before")
    with pytest.raises(ConfigError, match=named):
        tile(**{"data": tmp_path / "scenes.jsonl", "out": out, "size": 64, "overwrite": True, **wrong})
    assert out.read_text() == "as before"


def test_a_failed_replacement_leaves_no_old_boxes_on_new_images(tmp_path: Path) -> None:
    scenes, out = write_scenes(tmp_path, 2, SPARSE, 5), tmp_path / "tiles.jsonl"
    tile(scenes, out, 64)
    read_jsonl(scenes)[1].image.write_bytes(b"no picture")
    with pytest.raises(DataError):
        tile(scenes, out, 64, overwrite=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"sheet": "sheet.txt"}, r"sheet\.txt: a picture ends in"),
        ({"sheet": "sheet.png", "out": "sheet.png"}, "name another file for the sheet"),
        ({"sheet_images": 0}, "sheet_images: 0"),
        ({"rules": {"threshold": 0.3}}, "rules: .*CompletionRules"),
        ({"overlap": 0.5}, "overlap has no use here"),
        ({"tiles": 2.5}, "tiles of 2.5"),
        ({"out": "."}, "is a folder"),
        ({"out": "scenes.jsonl", "overwrite": True}, r"scenes\.jsonl: is the dataset to complete"),
    ],
)
def test_a_completion_is_refused_before_a_model_is_looked_for(
    wrong: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_scenes(tmp_path, 1, SPARSE, 5)
    (tmp_path / "model").mkdir()
    with pytest.raises((ConfigError, DataError), match=named):
        complete(**{"data": "scenes.jsonl", "out": "out.jsonl", "model": "model", **wrong})
    assert not list(tmp_path.glob("out*"))


def test_annotations_are_completed_by_a_models_own_settings_or_a_configuration(tmp_path: Path) -> None:
    model = asset("checkpoints/demo-stage1")
    config = write_run(tmp_path, 1, model)
    lines = [json.loads(line) for line in (tmp_path / "scenes.jsonl").read_text().splitlines()]
    without = tmp_path / "none.jsonl"
    without.write_text("".join(f"{json.dumps({**line, 'objects': []})}\n" for line in lines))
    counts = complete(without, tmp_path / "a.jsonl", model=model, sheet=tmp_path / "sheet.png", quiet=True)
    assert counts is not None and counts.annotated == 0 < counts.outcomes["added"] <= counts.predicted
    added = [obj for record in read_jsonl(tmp_path / "a.jsonl") for obj in record.objects]
    assert len(added) == counts.outcomes["added"] and all(obj.soft is not None for obj in added)
    assert (tmp_path / "sheet.png").is_file()
    with pytest.raises(DataError, match="exists already"):
        complete(without, tmp_path / "a.jsonl", model=model)
    fixed = complete(without, tmp_path / "a.jsonl", model=model, rules=CompletionRules(weight=0.25), overwrite=True)
    assert fixed is not None and fixed.outcomes == counts.outcomes
    assert {obj.soft for record in read_jsonl(tmp_path / "a.jsonl") for obj in record.objects} == {0.25}
    short = complete(without, tmp_path / "b.jsonl", config=config, overrides={"rollout_matching.max_new_tokens": 5})
    assert short is not None and short.predicted == 0 and short.truncated_answers == 4
    with pytest.raises(DataError, match=r"another prompt .*delete that folder of answers"):
        complete(without, tmp_path / "a.jsonl", model=model, prompt="Find all.", overwrite=True)
    with pytest.raises(ConfigError, match="name the checkpoint"):
        complete(without, tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match=r"missing\.jsonl: file not found"):
        complete(tmp_path / "missing.jsonl", tmp_path / "c.jsonl", model=model)


def test_early_stopping_ends_a_run_that_does_not_improve(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    keys = {**every_step, "max_steps": 9, "learning_rate": 1e-9, "load_best_model_at_end": True}
    keys |= {"metric_for_best_model": "eval_rollout/f1", "logging_steps": 5}
    overrides = {f"training.{name}": value for name, value in keys.items()}
    run = train(config, overrides, callbacks=[EarlyStoppingCallback(2)], quiet=True)
    assert max(line["step"] for line in run.history) == 3, "the first evaluation is the best, two more do not improve"
    (line,) = [line for line in run.history if "loss" in line]  # of the steps since the last line
    assert line["step"] == 3 and run.history[-1]["train_loss"] == line["loss"] > 0
    with pytest.raises(RunFinished, match=r"a callback ended it after step 3 of 9 .*checkpoint-3 to train longer"):
        train(config, {**overrides, "training.resume_from_checkpoint": True}, quiet=True)


def test_a_resumed_run_stops_early_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    keys = {**every_step, "max_steps": 2, "learning_rate": 1e-9, "metric_for_best_model": "eval_rollout/f1"}
    overrides = {f"training.{name}": value for name, value in keys.items()}
    train(config, overrides, callbacks=[EarlyStoppingCallback(3)], quiet=True)
    overrides |= {"training.max_steps": 9, "training.resume_from_checkpoint": True}
    run = train(config, overrides, callbacks=[EarlyStoppingCallback(3)], quiet=True)
    assert max(line["step"] for line in run.history) == 4, "one evaluation before, and two after, do not improve"


def test_two_callbacks_of_a_class_keep_their_own_states() -> None:
    before, after = ([EarlyStoppingCallback(3), EarlyStoppingCallback(5)] for _ in range(2))
    before[0].early_stopping_patience_counter, before[1].early_stopping_patience_counter = 1, 2
    restore_callbacks(after, callback_states(before))
    assert [one.early_stopping_patience_counter for one in after] == [1, 2]
    assert [one.early_stopping_patience for one in after] == [3, 5]


class EndsAfterEvaluation(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_training_stop = True


def test_an_evaluation_before_the_first_step_may_end_the_run(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"))
    overrides = {"training.eval_strategy": "steps", "training.eval_on_start": True}
    run = train(config, overrides, callbacks=[EndsAfterEvaluation()], quiet=True)
    assert {line["step"] for line in run.history} == {0}


def test_convert_takes_the_options_of_the_command(tmp_path: Path) -> None:
    labelme = convert(
        "labelme", as_labelme(tmp_path / "in"), tmp_path / "out", name="mine", min_pixels=64 * 64, max_pixels=160 * 96
    )
    assert labelme.jsonl == tmp_path / "out" / "mine.jsonl" and labelme.objects == 4
    annotations, images = as_coco(tmp_path / "coco")
    assert convert("coco", annotations, tmp_path / "out", images_dir=images).objects == 4
    with pytest.raises(ConfigError, match=r"'pascal'.*labelme.*voc"):
        convert("pascal", tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"splits.*split"):
        convert("voc", tmp_path, tmp_path / "out", splits="train")
