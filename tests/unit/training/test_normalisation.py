"""An optimizer step's gradient is a function of its segments, not of how they were packed, split or ordered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from config_samples import pipeline
from coordexp.config.objective import PipelineConfig
from coordexp.matching import match_objects
from coordexp.modeling.inputs import row_inputs
from coordexp.modeling.load import LoadedModel
from coordexp.objective import ObjectiveContext, SupervisionCounts, SupervisionTensors, build_pipeline
from coordexp.parsing import parse_rollout
from coordexp.records import Segment
from coordexp.targets import build_target
from coordexp.training.scoring import ScoreRow
from tiny_run import gt_segments, load_tiny, nearly_right, row_of, tiny_samples

PIPELINE = build_pipeline(PipelineConfig.model_validate(pipeline()), channel="B")


@pytest.fixture(scope="module", params=["packed", "sdpa"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    loaded = load_tiny(attention=request.param, sharpen=2.0)
    loaded.model.double()
    return loaded


@pytest.fixture(scope="module")
def segments(loaded: LoadedModel) -> list[Segment]:
    """Three answers written from ground truth, and three of the model's own with something found and missed."""
    found = []
    for sample in tiny_samples(loaded, 6)[3:]:
        record, vocab = sample.record, loaded.vocab
        parsed = parse_rollout(vocab.encode(nearly_right(record.objects)), vocab)
        match = match_objects(parsed.objects, record.objects)
        target = build_target(parsed, match, record.objects, vocab, sample_id=record.sample_id)
        found.append(Segment(record.sample_id, sample.request.prompt_token_ids, target, sample.request.model_inputs))
    assert sum(len(segment.target.matched_pred_idx) for segment in found) > 0
    return [*gt_segments(loaded, 3), *found]


def step(loaded: LoadedModel, micro_steps: Sequence[Sequence[Segment]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of an optimizer step with these rows, as the trainer computes them."""
    model = loaded.model
    model.zero_grad()
    counts = SupervisionCounts.of(segment.target for row in micro_steps for segment in row)
    total = 0.0
    for row in map(row_of, micro_steps):
        rope_index = model.model.get_rope_index
        inputs = row_inputs(row, rope_index, loaded.image_token_id, loaded.attention, torch.float64)
        supervision = SupervisionTensors.of(row)
        query = PIPELINE.query(supervision)
        scores = model(program=ScoreRow(inputs, supervision, query, loaded.vocab.coord_token_ids))
        loss = PIPELINE(ObjectiveContext(supervision, query, scores, counts)).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "split",
    [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5, 4, 3, 2, 1, 0]], [[0, 3, 5], [4], [2, 1]]],
    ids=["one each", "two rows", "reversed", "uneven"],
)
def test_any_packing_gives_the_same_step(loaded: LoadedModel, segments: list[Segment], split: list[list[int]]) -> None:
    loss, gradient = step(loaded, [segments])
    other_loss, other = step(loaded, [[segments[index] for index in row] for row in split])
    assert other_loss == pytest.approx(loss, rel=1e-12)
    scale = max(value.abs().max().item() for value in gradient.values())
    worst = max((other[name] - value).abs().max().item() / scale for name, value in gradient.items())
    assert worst < 1e-9


def test_a_mean_of_rows_would_be_another_step(loaded: LoadedModel, segments: list[Segment]) -> None:
    """The test above can fail: averaging per micro-step, as trainers do by default, gives another gradient."""
    _, exact = step(loaded, [segments])
    first, second = (step(loaded, [part])[1] for part in (segments[:1], segments[1:]))
    scale = max(value.abs().max().item() for value in exact.values())
    assert max(((first[n] + second[n]) / 2 - exact[n]).abs().max().item() / scale for n in exact) > 1e-2
