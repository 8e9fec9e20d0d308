"""One optimizer step, prepared: rollouts for the whole window first, un-packed, then a row per micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordexp.coords import TURN_END
from coordexp.data.dataset import Sample
from coordexp.errors import CarryBufferOverflow, SegmentTooLong
from coordexp.matching import MatchingConfig
from coordexp.modeling.load import LoadedModel
from coordexp.packing import CarryBuffer
from coordexp.targets import TransportConfig, count_terms
from coordexp.training.sources import GroundTruthSource, RolloutSource, SegmentSource
from coordexp.training.window import WindowBuilder
from support.tiny_run import InMemoryBackend, load_tiny, nearly_right, tiny_samples


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny()


@pytest.fixture(scope="module")
def samples(loaded: LoadedModel) -> list[Sample]:
    return tiny_samples(loaded)


@pytest.fixture(scope="module")
def gt(loaded: LoadedModel) -> GroundTruthSource:
    return GroundTruthSource(loaded.vocab, "desc_first")


def rollouts(backend: InMemoryBackend, loaded: LoadedModel, flag: str = "rollout/decode_greedy") -> RolloutSource:
    return RolloutSource(backend, loaded.vocab, MatchingConfig(), TransportConfig(), "desc_first", 3, flag)


def builder(source: SegmentSource, capacity: int | None = 400, most: int = 64, fill: float = 0.01) -> WindowBuilder:
    buffer = None if capacity is None else CarryBuffer(capacity, most)
    return WindowBuilder(source, buffer, fill)


def ids(segments: Sequence[Any]) -> list[str]:
    return [segment.sample_id for segment in segments]


def test_one_row_per_micro_step(gt: GroundTruthSource, samples: list[Sample]) -> None:
    window = builder(gt).prepare([samples[:2], samples[2:4], samples[4:5]], 0)
    assert [ids(row.segments) for row in window.rows] == [
        [s.record.sample_id for s in batch] for batch in (samples[:2], samples[2:4], samples[4:5])
    ]
    assert window.metrics["train/samples_total"] == 5
    assert window.metrics["packing/segments_total"] == 5
    assert window.metrics["train/tokens_total"] == sum(row.length for row in window.rows)


def test_totals_are_those_of_the_rows_not_of_the_samples(gt: GroundTruthSource, samples: list[Sample]) -> None:
    """A segment that waits is counted in the step that trains on it."""
    build = builder(gt, capacity=120)
    first = build.prepare([samples[:4]], 0)
    assert first.metrics["packing/buffer_segments"] == len(build.buffer or ()) > 0
    assert first.totals == count_terms(s.target for row in first.rows for s in row.segments)
    assert first.totals != count_terms(s.target for batch in gt.segments([samples[:4]], 0, {})[0] for s in batch)


def test_totals_are_the_sum_over_all_ranks(
    gt: GroundTruthSource, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = builder(gt).prepare([samples[:2]], 0).totals
    monkeypatch.setattr(
        "coordexp.training.window.distributed.all_reduce", lambda values, how: tuple(2 * n for n in values)
    )
    assert builder(gt).prepare([samples[:2]], 0).totals == {term: 2 * n for term, n in alone.items()}


def test_every_sample_is_trained_on_exactly_once_or_waits(gt: GroundTruthSource, samples: list[Sample]) -> None:
    build = builder(gt, capacity=150)
    trained: list[str] = []
    for step in range(4):
        window = build.prepare([samples[3 * step : 3 * step + 3]], step)
        trained += [name for row in window.rows for name in ids(row.segments)]
        assert all(row.length <= 150 for row in window.rows)
    assert build.buffer is not None
    assert sorted(trained + ids(build.buffer.segments)) == sorted(s.record.sample_id for s in samples)
    assert len(build.buffer) > 0


def test_the_next_step_begins_with_the_oldest(gt: GroundTruthSource, samples: list[Sample]) -> None:
    build = builder(gt, capacity=120)
    build.prepare([samples[:4]], 0)
    assert build.buffer is not None
    oldest = build.buffer.segments[0].sample_id
    assert build.prepare([samples[4:5]], 1).rows[0].segments[0].sample_id == oldest


def test_all_rollouts_come_before_the_first_row(loaded: LoadedModel, samples: list[Sample]) -> None:
    backend = InMemoryBackend(loaded.vocab, lambda _: "{}" + TURN_END)
    builder(rollouts(backend, loaded)).prepare([samples[:2], samples[2:5]], 7)
    assert backend.versions == [7]
    assert backend.calls == [tuple(s.record.sample_id for s in batch) for batch in (samples[:2], samples[2:5])]
    assert [seeds.micro_step_idx for seeds in backend.seeds] == [0, 1]
    assert {(seeds.training_seed, seeds.global_step, seeds.rank) for seeds in backend.seeds} == {(3, 7, 0)}


def test_targets_are_built_on_the_models_own_answer(loaded: LoadedModel, samples: list[Sample]) -> None:
    truth = {sample.record.sample_id: sample.record.objects for sample in samples}
    backend = InMemoryBackend(loaded.vocab, lambda request: nearly_right(truth[request.sample_id]))
    window = builder(rollouts(backend, loaded)).prepare([samples[:3]], 0)
    for sample, outcome, segment in zip(samples, window.outcomes, window.rows[0].segments, strict=False):
        assert segment.target is outcome.target
        assert segment.prompt_token_ids == sample.request.prompt_token_ids
        answer = outcome.rollout.response_token_ids
        assert outcome.target.token_ids[: outcome.target.prefix_len] == answer[: outcome.target.prefix_len]
        assert len(outcome.match.pairs) + len(outcome.match.fn_gt_idx) == len(sample.record.objects)
    assert window.metrics["rollout/matched_total"] > 0


def test_a_beam_runs_flag_names_the_decoding(loaded: LoadedModel, samples: list[Sample]) -> None:
    backend = InMemoryBackend(loaded.vocab, lambda _: TURN_END)
    window = builder(rollouts(backend, loaded, "rollout/decode_beam")).prepare([samples[:1]], 0)
    assert {name for name in window.metrics if name.startswith("rollout/decode_")} == {"rollout/decode_beam"}


def test_without_a_buffer_rows_have_no_limit(gt: GroundTruthSource, samples: list[Sample]) -> None:
    window = builder(gt, capacity=None).prepare([samples, samples[:1]], 0)
    assert [len(row.segments) for row in window.rows] == [len(samples), 1]
    assert not [name for name in window.metrics if name.startswith("packing/") and name != "packing/segments_total"]


def test_underfilled_rows_are_counted_and_said_once(
    gt: GroundTruthSource, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    build = WindowBuilder(gt, CarryBuffer(4000, 64), 0.65)
    window = build.prepare([samples[:1], samples[1:2]], 0)
    assert window.metrics["packing/underfilled_rows_total"] == 2
    (said,) = [line for line in caplog.messages if "training.packing_min_fill_ratio 0.65" in line]
    assert said.startswith("a packed row is filled to 0.0")


def test_a_buffer_that_will_overflow_is_said_once_and_in_time(
    gt: GroundTruthSource, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [segment.length for segment in gt.segments([samples[:1]], 0, {})[0][0]]
    build = builder(gt, capacity=lengths[0], most=8)  # a row takes one of the two that a step brings
    waiting, said_at = [], []
    with pytest.raises(CarryBufferOverflow):
        for step in range(20):
            build.prepare([[samples[0], samples[0]]], step)
            waiting.append(len(build.buffer or ()))
            if any("training.packing_buffer allows" in line for line in caplog.messages):
                said_at.append(step)
    (said,) = [line for line in caplog.messages if "training.packing_buffer allows" in line]
    assert waiting == [1, 2, 3, 4, 5, 6, 7] and said_at[0] == 4, "half of eight and filling"
    assert said.startswith("5 segments wait for a row, of 8 that") and "in about 3 steps" in said


def test_a_buffer_that_does_not_fill_is_not_spoken_of(
    gt: GroundTruthSource, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    build = builder(gt, capacity=40_000, most=2)
    for step in range(4):
        build.prepare([[samples[0], samples[1]]], step)
    assert not [line for line in caplog.messages if "packing_buffer allows" in line]


@pytest.mark.parametrize(
    ("capacity", "most", "error"), [(30, 64, SegmentTooLong), (400, 2, CarryBufferOverflow)], ids=["too long", "full"]
)
def test_what_does_not_fit_is_an_error(
    capacity: int, most: int, error: type[Exception], gt: GroundTruthSource, samples: list[Sample]
) -> None:
    with pytest.raises(error):
        builder(gt, capacity, most).prepare([samples[:4]], 0)


def test_control_tokens_in_an_answer_never_reach_a_row(loaded: LoadedModel, samples: list[Sample]) -> None:
    """An image placeholder in the middle of an answer would ask the forward pass for an image that is not there."""
    answers = iter(
        [
            '{"object_1": {"desc": "a<|image_pad|>b", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", ',
            "<|image_pad|>" + TURN_END,
            "{<|vision_start|>}" + TURN_END,
        ]
    )
    backend = InMemoryBackend(loaded.vocab, lambda _: next(answers))
    window = builder(rollouts(backend, loaded)).prepare([samples[:3]], 0)
    for segment in window.rows[0].segments:
        assert loaded.image_token_id not in segment.target.token_ids
        assert not loaded.vocab.control_ids.intersection(segment.target.token_ids[:-1])
