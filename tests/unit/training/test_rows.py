"""Rows are built one ahead in a second thread, the same rows in the same order; their metrics are read together."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp import background
from coordexp.errors import AlignmentError, RowLate
from coordexp.objective import RowTensors
from coordexp.records import PackedRow
from coordexp.training import rows as training_rows
from coordexp.training.rows import DeviceMetrics, PrefetchedRows, RowBuilder, RowMetrics
from support.tiny_run import (
    figures,
    gt_segments,
    load_tiny,
    row_of,
    run_config,
    same_weights,
    step_lines,
    train,
    weights,
)


class InTurn:
    """Like ``Prefetcher`` without its thread: an item is prepared when it is taken."""

    has_unconsumed = False

    def __init__(self, items: Any, prepare: Any, **_: object) -> None:
        self._items, self._prepare = list(items), prepare

    def __len__(self) -> int:
        return len(self._items)

    def take(self) -> tuple[Any, Any]:
        one = self._items.pop(0)
        return one, self._prepare(one)

    def stop(self) -> None: ...

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def rows() -> list[PackedRow]:
    return [row_of([segment]) for segment in gt_segments(load_tiny(), 5)]


def building() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rows"]


def none_is_built() -> bool:
    for thread in building():
        thread.join(10)
    return not building()


class Begun:
    """A build that records its rows; each of them waits for permission to continue."""

    def __init__(self, may_go_on: bool = True) -> None:
        self.rows: list[PackedRow] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.go_on = threading.Event()
        if may_go_on:
            self.go_on.set()

    def has_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.rows) >= count, 60)

    def __call__(self, row: PackedRow) -> Any:
        with self.changed:
            self.rows.append(row)
            self.changed.notify_all()
        self.threads.add(threading.get_ident())
        assert self.go_on.wait(60)
        return SimpleNamespace(row=row)


def test_rows_come_in_order_and_at_most_one_is_built_ahead(rows: list[PackedRow]) -> None:
    build, taken = Begun(), []
    with PrefetchedRows(build, rows) as prefetched:
        for built in prefetched:
            taken.append(built.row)
            build.has_begun(min(len(taken) + 1, len(rows)))
            assert build.rows == rows[: len(taken) + 1]
    assert taken == rows and none_is_built()
    assert len(build.threads) == 1 and threading.get_ident() not in build.threads
    assert min(prefetched.wait_s, prefetched.build_s) > 0


def test_a_row_that_times_out_names_its_samples(rows: list[PackedRow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_rows, "ROW_DEADLINE_S", 0.01)
    monkeypatch.setattr(background, "STOP_S", 0.01)
    build = Begun(may_go_on=False)
    with pytest.raises(RowLate, match=rows[0].segments[0].sample_id), PrefetchedRows(build, rows) as prefetched:
        next(iter(prefetched))
    build.go_on.set()
    assert none_is_built() and build.rows == rows[:1]


@pytest.mark.parametrize("stage", [1, "two_channel"])
def test_a_run_without_prefetch_is_bitwise_the_same(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws from the global random state, which building rows in a thread must not touch."""
    keys: dict[str, Any] = {"training__max_steps": 3, "training__gradient_accumulation_steps": 2,
                            "tuner__train_type": "lora", "tuner__lora_dropout": 0.2}  # fmt: skip
    ahead = train(run_config(tmp_path, stage, "ahead", **keys))
    monkeypatch.setattr(training_rows, "Prefetcher", InTurn)
    in_turn = train(run_config(tmp_path, stage, "in_turn", **keys))
    assert figures(ahead) == figures(in_turn)
    assert same_weights(weights(ahead.model), weights(in_turn.model))
    for line in step_lines(ahead):
        assert line["time/row_build_s"] > 0


def test_if_a_row_cannot_be_built_its_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth row is the second micro-step of the second step: the first step is saved."""
    build, calls = RowBuilder.__call__, iter(range(100))

    def failing(self: RowBuilder, row: PackedRow, *arguments: Any) -> RowTensors:
        if next(calls) == 3:
            raise AlignmentError(f"sample {row.segments[0].sample_id}: of no use")
        return build(self, row, *arguments)

    keys: dict[str, Any] = {"training__gradient_accumulation_steps": 2}
    first_alone = train(run_config(tmp_path, 1, "first_alone", training__max_steps=1, **keys))
    monkeypatch.setattr(RowBuilder, "__call__", failing)
    started: list[Any] = []
    with pytest.raises(AlignmentError, match=r"^sample scenes\.jsonl:\d+: of no use$"):
        train(run_config(tmp_path, 1, "failing", training__max_steps=3, **keys), on_built=started.append)
    assert none_is_built()
    assert [path.name for path in (tmp_path / "failing").glob("checkpoint-*")] == ["checkpoint-1"]
    assert same_weights(weights(started[0].model), weights(first_alone.model))


# -- numbers that rows leave on the device -----------------------------------------------------------------------------


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
