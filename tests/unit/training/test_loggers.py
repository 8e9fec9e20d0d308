"""Files of loggers: one curve across resumes, and every name once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.tiny_run import Killed, kill_at, run_config, train

_BLOCK, _HEADER, _MAGIC = 32768, struct.Struct("<IHB"), 7  # LevelDB's log, behind seven bytes of W&B's own
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    record = import_module("wandb.proto.wandb_internal_pb2").Record  # made when it is imported
    data, at, parts = path.read_bytes(), _MAGIC, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        parts += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield record.FromString(parts)
            parts = b""


def told(path: Path) -> tuple[str, list[dict[str, Any]], set[str]]:
    """(run id, logged values in order, the metrics' axes)"""
    run, lines, axes = "", [], set[str]()
    for record in records(path):
        if record.HasField("run"):
            run = record.run.run_id
        if record.HasField("history"):
            items = record.history.item
            lines.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("metric") and record.metric.step_metric:
            axes.add(record.metric.step_metric)
    return run, lines, axes


def test_a_resumed_run_continues_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, value in (("MODE", "offline"), ("DIR", str(folder)), ("PROJECT", "detector"), ("RUN_ID", "stage1-a"),
                        ("RESUME", "allow"), ("SILENT", "true")):  # fmt: skip
        monkeypatch.setenv(f"WANDB_{name}", value)
    keys = {"training__report_to": ["wandb"], "training__logging_steps": 1, "training__save_strategy": "steps",
            "training__save_steps": 2, "training__resume_from_checkpoint": True}  # fmt: skip
    for last in (2, 4):
        train(run_config(tmp_path, 1, training__max_steps=last, **keys))
        wandb.finish()
    wandb.teardown()  # its own process writes the files, and has written all when it has ended
    found = [told(path) for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)]
    assert [run for run, _, _ in found] == ["stage1-a", "stage1-a"]
    assert all("train/global_step" in axes for _, _, axes in found)
    lines = [line for _, part, _ in found for line in part if "train/loss" in line]
    assert [line["train/global_step"] for line in lines] == [1, 2, 3, 4]
    assert [line["train/samples_total"] for line in lines] == sorted(line["train/samples_total"] for line in lines)
    assert [name for line in lines for name in line if name.startswith("train/train/")] == []


# -- TensorBoard -------------------------------------------------------------------------------------------------------


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
