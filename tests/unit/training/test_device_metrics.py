"""Numbers that rows leave on the device: read together, row by row the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.training.rows import DeviceMetrics, RowMetrics


def scores(nonfinite: list[bool], clamped: list[bool]) -> Any:
    return SimpleNamespace(nonfinite_N=torch.tensor(nonfinite), clamped_N=torch.tensor(clamped))


def query(num_scored: int) -> Any:
    return SimpleNamespace(num_scored=num_scored)


def test_one_device_read_returns_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with two forwards, and one without a term."""
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    share = torch.tensor(0.1, dtype=torch.float32, requires_grad=True)
    metrics = DeviceMetrics()
    metrics.add(
        {"loss/a": share, "loss/b": share * 2},
        [scores([True, False], [False, True]), scores([True], [False])],
        [query(2), query(1)],
    )
    metrics.add({}, [scores([True, True], [False, False])], [query(2)])
    assert reads == []
    first, second = metrics.sync()
    assert reads == [1]
    assert first == RowMetrics({"loss/a": share.item(), "loss/b": (share * 2).item()}, 3, nonfinite=2, clamped=1)
    assert second == RowMetrics({}, 2, nonfinite=2, clamped=0)
    assert (first.all_broken, second.all_broken) == (False, True)
    assert list(metrics.sync()) == [] and reads == [1]


def test_a_row_without_scored_positions_is_not_broken() -> None:
    assert not RowMetrics({}, 0, 0, 0).all_broken
