"""What rows leave on the device: looked at together, row by row the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.training.row_prefetch import FiguresOnDevice, RowFigures


def scores(nonfinite: list[bool], clamped: list[bool]) -> Any:
    return SimpleNamespace(nonfinite_N=torch.tensor(nonfinite), clamped_N=torch.tensor(clamped))


def query(num_scored: int) -> Any:
    return SimpleNamespace(num_scored=num_scored)


def test_one_look_takes_in_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with two forwards, and one without a term; each look waits for the device, so there is one for all."""
    looks, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or tolist(self))
    share = torch.tensor(0.1, dtype=torch.float32, requires_grad=True)
    figures = FiguresOnDevice()
    figures.note(
        {"loss/a": share, "loss/b": share * 2},
        [scores([True, False], [False, True]), scores([True], [False])],
        [query(2), query(1)],
    )
    figures.note({}, [scores([True, True], [False, False])], [query(2)])
    assert looks == []
    first, second = figures.look()
    assert looks == [1]
    assert first == RowFigures({"loss/a": share.item(), "loss/b": (share * 2).item()}, 3, nonfinite=2, clamped=1)
    assert second == RowFigures({}, 2, nonfinite=2, clamped=0)
    assert (first.all_broken, second.all_broken) == (False, True)
    assert list(figures.look()) == [] and looks == [1]


def test_a_row_that_scores_nothing_is_not_broken() -> None:
    assert not RowFigures({}, 0, 0, 0).all_broken
