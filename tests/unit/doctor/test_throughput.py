"""What the rows about speed advise: the log lines of a run decide, and the rates of both ways of decoding."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config import load_config
from coordexp.data.files import asset
from coordexp.doctor import Row, Settings, throughput
from coordexp.doctor.engine import advice_to_skip, which_is_faster
from coordexp.doctor.runs import ShippedRun


def line(waited_s: float) -> dict[str, float]:
    return {
        "time/data_wait_s": waited_s, "time/window_prepare_s": 0.1, "time/pack_s": 0.1, "time/row_wait_s": 0.0,
        "time/learner_s": 0.8 - waited_s, "time/optimizer_s": 0.1, "train/tokens_total": 1000.0,
        "train/patches_total": 500.0, "train/supervised_total": 300.0, "train/samples_total": 8.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cores", "waited_s", "figure"),
    [
        (2, 0.5, "a step waits 50.0% for 4 of them"),  # the trainer itself computes on both
        (9, 0.5, "a step waits 50.0% for 4 of them; set data.num_workers: 7 (8 would be needed, and there are 7 cores "
         "for them), or convert the images to the size that the model sees, "
         "by coordexp data convert with --max-pixels"),
        (16, 0.5, "a step waits 50.0% for 4 of them; set data.num_workers: 8"),
        (16, 0.01, "a step waits 1.0% for 4 of them"),
    ],
)  # fmt: skip
def test_no_more_loader_processes_are_advised_than_have_a_core(
    cores: int, waited_s: float, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(file: str, keys: dict[str, Any], *_: object) -> ShippedRun:
        return ShippedRun(load_config(asset(f"configs/{file}"), keys), [line(waited_s)], 1.0, 0)

    monkeypatch.setattr(throughput, "train_shipped", finished)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows: list[Row] = list(throughput.training(Settings(tmp_path, 0, asset("checkpoints/demo-stage1"))))
    assert [row.figure for row in rows if row.check == "loader processes"] == [figure]


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ({1: 2.5, 8: 1.2}, "write true: 2.50 times as fast at 1, 1.20 times as fast at 8"),
        ({1: 0.9, 8: 0.5}, "write false: 0.90 times as fast at 1, 0.50 times as fast at 8"),
        ({64: 0.5, 1: 2.0, 8: 1.5}, "write true for decode_batch_size up to 8, false above"),
    ],
)
def test_the_faster_one_is_named(times: dict[int, float], advice: str) -> None:
    assert advice_to_skip(times).startswith(advice)


def test_rates_of_both_engines_are_compared(tmp_path: Path) -> None:
    (tmp_path / "decoding.json").write_text(json.dumps({"1": 100.0, "8": 500.0}))
    assert which_is_faster(Settings(tmp_path)).result == "skipped"
    (tmp_path / "skipping.json").write_text(json.dumps({"1": 200.0}))
    row = which_is_faster(Settings(tmp_path))
    assert (row.result, dict(row.numbers)) == ("ok", {"at_1": 2.0})
