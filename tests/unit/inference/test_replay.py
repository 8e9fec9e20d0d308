"""Recorded rollouts, replayed: the same targets and losses, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp.cli import main
from coordexp.errors import ConfigError, DataError
from coordexp.inference.replay import config_beside, replay_records
from support.tiny_run import finder, run_config, step_lines, tiny_checkpoint, train


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    config = run_config(
        tmp_path_factory.mktemp("recorded"), 2, rollout_matching__monitor_dump={"enabled": True},
        training__max_steps=1, training__per_device_train_batch_size=1, custom__train_sample_limit=1,
    )  # fmt: skip
    trainer = train(config, finder())
    trainer.close()
    return config, trainer


def folder_of(config: Any) -> Path:
    return Path(config.training.output_dir) / "rollout_records"


def test_replay_gives_the_recorded_targets_and_losses(
    recorded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config, trainer = recorded
    (one,) = replay_records(folder_of(config), config, model=tiny_checkpoint())  # the weights of the first step
    assert one.differences == ()
    assert one.losses is not None
    logged = step_lines(trainer)[0]
    for name, value in one.losses.items():
        assert value == pytest.approx(logged[name], rel=1e-4, abs=1e-6), name
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder_of(config)), "model.model=/start/is/gone", "--model", str(tiny_checkpoint())])
    assert not ended.value.code
    out = " ".join(capsys.readouterr().out.split())
    assert "1 records replayed, 0 differently" in out
    assert all(f"{name} {value:.4f}" in out for name, value in one.losses.items())


def test_a_target_that_differs_is_named(
    recorded: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = recorded
    line = json.loads((folder_of(config) / "rollouts_rank0.jsonl").read_text())
    line["target"]["coord_bin"][0] += 1
    changed = tmp_path / "rollouts_rank0.jsonl"
    changed.write_text(json.dumps(line) + "\n")
    (one,) = replay_records(changed, config)
    assert one.losses is None
    assert [difference.split(":")[0] for difference in one.differences] == ["target.coord_bin"]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(changed), "--config", str(config_beside(folder_of(config)))])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "target.coord_bin: recorded" in out and "1 records replayed, 1 differently" in out


def test_the_runs_own_configuration_is_found(recorded: tuple[Any, Any], tmp_path: Path) -> None:
    config, _ = recorded
    assert config_beside(folder_of(config)) == Path(config.training.output_dir).resolve() / "resolved_config.yaml"
    with pytest.raises(ConfigError, match=r"resolved_config\.yaml"):
        config_beside(tmp_path)


def test_another_prompt_is_refused(recorded: tuple[Any, Any]) -> None:
    config, _ = recorded
    other = config.model_copy(update={"template": config.template.model_copy(update={"prompt": "Something else."})})
    with pytest.raises(DataError, match="recorded"):
        list(replay_records(folder_of(config), other, model=tiny_checkpoint()))
