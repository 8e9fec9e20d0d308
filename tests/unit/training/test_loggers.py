"""TensorBoard's files: one curve across resumes, and every name once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.tiny_run import Killed, kill_at, run_config, train


def test_a_killed_and_resumed_run_is_one_curve(tmp_path: Path) -> None:
    keys = {"training__report_to": ["tensorboard"], "training__logging_steps": 1, "training__max_steps": 4,
            "training__save_strategy": "steps", "training__save_steps": 2,
            "training__resume_from_checkpoint": True}  # fmt: skip
    config = run_config(tmp_path, 1, **keys)

    with pytest.raises(Killed):
        train(config, on_built=kill_at(3))
    whole = train(config)
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert folder == tmp_path / "run" / "runs"
    found = EventAccumulator(str(folder))
    found.Reload()
    names = found.Tags()["scalars"]
    assert [name for name in names if name.startswith("train/train/")] == []
    assert {"train/loss", "train/samples_total"} <= set(names)
    assert [event.step for event in found.Scalars("train/samples_total")] == [1, 2, 3, 4]
    logged = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx(logged)
