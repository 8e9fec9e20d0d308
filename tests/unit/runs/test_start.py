"""A run's start is decided once, without torch; a schedule that ends before what is trained is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordexp.config import RunConfig, load_config, resolved_yaml
from coordexp.errors import CheckpointError, ConfigError, RunFinished
from coordexp.runs.start import decide_start
from support.cli_runs import Cli, small_checkpoint, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("model"))


def configured(folder: Path, model: Path, **training: Any) -> RunConfig:
    keys = {f"training__{key}": value for key, value in training.items()}
    path = write_run(folder, 1, model, training__resume_from_checkpoint=True, **keys)
    content = yaml.safe_load(path.read_text())
    if "num_train_epochs" in training:
        del content["training"]["max_steps"]
    path.write_text(yaml.safe_dump(content))
    return load_config(path)


def trained(config: RunConfig, step: int, of: int, epoch: float) -> Path:
    """A checkpoint as a run of ``config`` leaves it, by its seal, settings, manifest and state."""
    folder = Path(config.training.output_dir) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text(json.dumps({"resumable": True, "step": step}))
    (folder / "resolved_config.yaml").write_text(resolved_yaml(config))
    (folder / "run_manifest.json").write_text(json.dumps({"seed": 42}))
    state = {"global_step": step, "max_steps": of, "epoch": epoch}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"num_train_epochs": 14}, {"num_train_epochs": 3}),
        ({"max_steps": 252}, {"max_steps": 100}),
        ({"max_steps": 252}, {"max_steps": 177}),
        ({"num_train_epochs": 14}, {"max_steps": 54}),
    ],
)
def test_a_schedule_that_ends_before_what_is_trained_is_refused(
    was: dict[str, Any], now: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    """Of epochs when the data are known: 3 are 54 steps."""
    checkpoint = trained(configured(tmp_path, model, **was), 177, 252, 9.83)
    with pytest.raises(ConfigError) as refused:
        decide_start(configured(tmp_path, model, **now)).check_steps(54)
    text = str(refused.value)
    steps = now.get("max_steps", 54)
    assert f"{checkpoint} has trained 177 of 252 steps (9.83 epochs), and the run ends after {steps} now" in text
    key, value = next(iter(was.items()))
    assert f"training.{key}: {float(value) if key == 'num_train_epochs' else value} in the checkpoint" in text
    assert f"coordexp model export {checkpoint} FOLDER" in text


@pytest.mark.parametrize(
    ("was", "now", "step", "epoch"),
    [
        ({"num_train_epochs": 14}, {"num_train_epochs": 14}, 177, 9.83),
        ({"num_train_epochs": 14}, {"num_train_epochs": 10}, 177, 9.83),
        ({"max_steps": 252}, {"max_steps": 300}, 177, 9.83),
        ({"max_steps": 252}, {"max_steps": 252}, 252, 14.0),
    ],
)
def test_other_schedules_resume(
    was: dict[str, Any], now: dict[str, Any], step: int, epoch: float, tmp_path: Path, model: Path
) -> None:
    """The last one saves the model of a run that ended between its last checkpoint and its model."""
    checkpoint = trained(configured(tmp_path, model, **was), step, 252, epoch)
    start = decide_start(configured(tmp_path, model, **now))
    start.check_steps(252)
    assert start.checkpoint == checkpoint
    assert [one.key for one in start.applied] == ([] if was == now else [f"training.{next(iter(now))}"])


def finished(config: RunConfig) -> Path:
    output = Path(config.training.output_dir)
    output.mkdir(parents=True)
    (output / "trainer_state.json").write_text(json.dumps({"global_step": 2, "max_steps": 2, "epoch": 1.0}))
    (output / "resolved_config.yaml").write_text(resolved_yaml(config))
    return output


def test_a_run_is_finished_only_if_its_model_is_there(tmp_path: Path, model: Path) -> None:
    config = configured(tmp_path, model, max_steps=2)
    output = finished(config)
    with pytest.raises(ConfigError, match=r"finished .*, but its model is gone"):
        decide_start(config)
    checkpoint = trained(config, 2, 2, 1.0)
    assert decide_start(config).checkpoint == checkpoint, "its model is saved again"
    (output / "model.safetensors").touch()
    with pytest.raises(RunFinished, match=r"its model is saved; nothing was done\. Raise training\.max_steps"):
        decide_start(config)
    with pytest.raises(RunFinished, match=r"Raise training\.num_train_epochs to train longer"):
        decide_start(configured(tmp_path, model, num_train_epochs=1))


def test_a_trainer_state_that_is_cut_off_names_the_file_and_what_there_is_to_continue_from(
    tmp_path: Path, model: Path
) -> None:
    config = configured(tmp_path, model, max_steps=2)
    state = finished(config) / "trainer_state.json"
    state.write_text('{"global_step": 2')
    with pytest.raises(CheckpointError, match=r"trainer_state\.json cannot be read \(Expecting .*\); put it back$"):
        decide_start(config)
    checkpoint = trained(config, 2, 2, 1.0)
    with pytest.raises(CheckpointError, match=rf"; remove it to continue from {checkpoint}, or put it back$"):
        decide_start(config)
    state.unlink()
    assert decide_start(config).checkpoint == checkpoint


def test_a_start_from_another_checkpoint_is_decided_again(tmp_path: Path, model: Path) -> None:
    config = configured(tmp_path, model, max_steps=300)
    older = trained(configured(tmp_path, model, max_steps=200), 50, 200, 1.0)
    newest = trained(config, 100, 300, 2.0)
    start = decide_start(config)
    assert (start.checkpoint, start.applied) == (newest, ()) and start.at(newest) is start
    (change,) = start.at(older).applied
    assert (change.key, change.was, change.now) == ("training.max_steps", "200", "300")


def test_the_start_of_a_run_is_decided_and_its_model_and_data_are_opened_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.data import dataset_cache
    from coordexp.runs import start

    counted: list[str] = []

    def counting(name: str, act: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return act(*args, **kwargs)

        return call

    import coordexp.training.checked_run as training

    monkeypatch.setattr(start, "checked_changes", counting("start", start.checked_changes))
    reading = counting("data", dataset_cache.open_records)
    monkeypatch.setattr(dataset_cache, "open_records", reading)
    monkeypatch.setattr(training, "open_records", reading)
    opened, open_it = [], Checkpoint.open

    def opening(path: Any) -> Checkpoint:
        if not isinstance(path, Checkpoint):
            opened.append(path)
        return open_it(path)

    monkeypatch.setattr(Checkpoint, "open", opening)
    done = cli("train", write_run(tmp_path, 1, model))
    assert done.code == 0, done.err
    assert sorted(counted) == ["data", "data", "start"], "train and val, each once"
    assert opened == [str(model)]
