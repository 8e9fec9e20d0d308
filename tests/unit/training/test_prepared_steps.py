"""Preparation of a step: first the rollouts of all its samples, then one packed row per micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordexp.coords import TURN_END
from coordexp.data.dataset import Sample
from coordexp.errors import CarryBufferOverflow
from coordexp.modeling.load import LoadedModel
from coordexp.targets import SampleOutcome, count_terms, empty_target
from coordexp.training.rows import RowPlanner
from coordexp.training.step_answers import MatchedAnswer, TargetOptions
from support.tiny_run import InMemoryBackend, prepare, task_of, tiny_samples


@pytest.fixture(scope="module")
def samples(loaded: LoadedModel) -> list[Sample]:
    return tiny_samples(loaded)


def ids(segments: Sequence[Any]) -> list[str]:
    return [segment.sample_id for segment in segments]


def test_one_row_per_micro_step(loaded: LoadedModel, samples: list[Sample]) -> None:
    prepared, metrics = prepare(task_of(loaded), [samples[:2], samples[2:4], samples[4:5]])
    assert [ids(row.segments) for row in prepared.rows] == [
        [s.record.sample_id for s in batch] for batch in (samples[:2], samples[2:4], samples[4:5])
    ]
    assert metrics["train/samples_total"] == 5
    assert metrics["packing/segments_total"] == 5
    assert metrics["train/tokens_total"] == sum(row.length for row in prepared.rows)


def test_totals_are_summed_over_rows_not_samples(loaded: LoadedModel, samples: list[Sample]) -> None:
    """A segment that waits is counted in the step that trains on it."""
    task = task_of(loaded, capacity=120)
    prepared, _ = prepare(task, [samples[:4]])
    assert len(task.planner.buffer or ()) > 0
    assert prepared.totals == count_terms(s.target for row in prepared.rows for s in row.segments)
    everything, _ = prepare(task_of(loaded, capacity=None), [samples[:4]])
    assert prepared.totals != everything.totals


def test_totals_are_summed_over_all_ranks(
    loaded: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = prepare(task_of(loaded), [samples[:2]])
    monkeypatch.setattr("coordexp.distributed.all_reduce", lambda values, how: [2 * float(n) for n in values])
    both, _ = prepare(task_of(loaded), [samples[:2]])
    assert both.totals == {term: 2 * count for term, count in alone.totals.items()}


def draining(loaded: LoadedModel, backend: Any, capacity: int | None) -> Any:
    """Channel-B's task: it trains on all segments of a step, in as many rows as they need."""
    task = task_of(loaded, backend, drop_unclosed=True)
    return replace(task, planner=RowPlanner(None, capacity=capacity, drain=True))


def test_a_rank_with_fewer_rows_runs_blank_ones_first(
    loaded: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are exchanged with the last row, which is a real one where there is one."""
    backend = InMemoryBackend(loaded.vocab, lambda _: "{}" + TURN_END)
    monkeypatch.setattr(
        "coordexp.distributed.all_reduce", lambda values, how: [3.0] if how == "max" else [float(n) for n in values]
    )
    prepared, metrics = prepare(draining(loaded, backend, 400), [samples[:2]])
    supervised = [any(s.target.weights for s in row.segments) for row in prepared.rows]
    assert supervised == [False, False, True] and metrics["packing/blank_rows_total"] == 2
    assert metrics["packing/segments_total"] == 2, "a blank row's prompt is not trained on"


@pytest.mark.parametrize("capacity", [None, 400], ids=["unpacked", "packed"])
def test_a_micro_step_whose_answers_all_drop_out_has_no_row(
    loaded: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    backend = InMemoryBackend(loaded.vocab, lambda _: "{}" + TURN_END)
    dropped = samples[2].record.sample_id
    corrected = TargetOptions.corrected

    def unclosable(self: TargetOptions, answer: MatchedAnswer, policy: Any, complete: bool) -> SampleOutcome:
        outcome = corrected(self, answer, policy, complete)
        is_dropped = answer.sample.record.sample_id == dropped
        return replace(outcome, target=empty_target(dropped)) if is_dropped else outcome

    monkeypatch.setattr(TargetOptions, "corrected", unclosable)
    prepared, metrics = prepare(draining(loaded, backend, capacity), [samples[:2], samples[2:3]])
    assert [name for row in prepared.rows for name in ids(row.segments)] == [s.record.sample_id for s in samples[:2]]
    assert metrics["stage2/closure_dropped_total"] == 1


def test_every_sample_is_trained_once_or_waits(loaded: LoadedModel, samples: list[Sample]) -> None:
    task = task_of(loaded, capacity=150)
    trained: list[str] = []
    for step in range(4):
        prepared, _ = prepare(task, [samples[3 * step : 3 * step + 3]], step)
        trained += [name for row in prepared.rows for name in ids(row.segments)]
        assert all(row.length <= 150 for row in prepared.rows)
    assert task.planner.buffer is not None and len(task.planner.buffer) > 0
    assert sorted(trained + ids(task.planner.buffer.segments)) == sorted(s.record.sample_id for s in samples)


def test_all_rollouts_come_before_the_first_row(loaded: LoadedModel, samples: list[Sample]) -> None:
    backend = InMemoryBackend(loaded.vocab, lambda _: "{}" + TURN_END)
    prepare(task_of(loaded, backend), [samples[:2], samples[2:5]], 7)
    assert backend.versions == [7]
    assert backend.calls == [tuple(s.record.sample_id for s in batch) for batch in (samples[:2], samples[2:5])]
    assert [seeds.micro_step_idx for seeds in backend.seeds] == [0, 1]
    assert {(seeds.training_seed, seeds.global_step, seeds.rank) for seeds in backend.seeds} == {(3, 7, 0)}


def test_without_packing_rows_have_no_limit(loaded: LoadedModel, samples: list[Sample]) -> None:
    prepared, metrics = prepare(task_of(loaded, capacity=None), [samples, samples[:1]])
    assert [len(row.segments) for row in prepared.rows] == [len(samples), 1]
    assert not [name for name in metrics if name.startswith("packing/") and name != "packing/segments_total"]


def test_underfilled_rows_are_counted_and_warn_once(
    loaded: LoadedModel, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    _, metrics = prepare(task_of(loaded, capacity=4000, fill=0.65), [samples[:1], samples[1:2]])
    assert metrics["packing/underfilled_rows_total"] == 2
    assert len([line for line in caplog.messages if "training.packing_min_fill_ratio 0.65" in line]) == 1


def test_a_filling_buffer_warns_once_before_it_overflows(
    loaded: LoadedModel, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    length = prepare(task_of(loaded), [samples[:1]])[0].rows[0].length
    task = task_of(loaded, capacity=length, most=8)  # a row takes one of the two that a step brings
    waiting, warned_at = [], []
    with pytest.raises(CarryBufferOverflow):
        for step in range(20):
            prepare(task, [[samples[0], samples[0]]], step)
            waiting.append(len(task.planner.buffer or ()))
            if any("training.packing_buffer allows" in line for line in caplog.messages):
                warned_at.append(step)
    (warning,) = [line for line in caplog.messages if "training.packing_buffer allows" in line]
    assert waiting == [1, 2, 3, 4, 5, 6, 7] and warned_at[0] == 4, "half of eight and filling"
    assert "5 segments" in warning and "about 3 steps" in warning


def test_a_stable_buffer_does_not_warn(
    loaded: LoadedModel, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(loaded, capacity=40_000, most=2)
    for step in range(4):
        prepare(task, [[samples[0], samples[1]]], step)
    assert not [line for line in caplog.messages if "packing_buffer allows" in line]
