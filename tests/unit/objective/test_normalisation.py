"""However an optimizer step's segments are packed or spread, loss and gradient are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from coordexp.objective import ObjectivePipeline, build_pipeline, sft_pipeline
from coordexp.records import Segment
from coordexp.targets import TERMS, SupervisionWeights, count_terms
from support.objective_rows import EVERYTHING, EVERYTHING_WEIGHTS, Trigram, config, scored, segments

PIPELINES = {
    "stage2": (build_pipeline(config(**EVERYTHING)), EVERYTHING_WEIGHTS),
    "sft": (sft_pipeline(None), SupervisionWeights.for_sft(None)),
}
ROWS = {
    "one each": [[0], [1], [2], [3], [4]],
    "two rows": [[0, 1, 2], [3, 4]],
    "reversed": [[4, 3, 2, 1, 0]],
    "interleaved": [[4, 0], [3, 1], [2]],
}


def step(rows: Sequence[Sequence[Segment]], pipeline: ObjectivePipeline) -> tuple[float, dict[str, float], list]:
    """Backward over each row in turn, with the whole step's totals: the sum over micro-steps and ranks."""
    totals = count_terms(segment.target for row in rows for segment in row)
    model, loss, terms = Trigram(), 0.0, {}
    for row in rows:
        result = scored(pipeline, row, model, totals)
        result.loss.backward()
        loss += result.loss.item()
        for name, share in result.terms.items():
            terms[name] = terms.get(name, 0.0) + share.item()
    return loss, terms, list(model.gradients())


@pytest.mark.parametrize(("pipeline", "weights"), PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packing_changes_nothing(
    rows: list[list[int]], pipeline: ObjectivePipeline, weights: SupervisionWeights
) -> None:
    of_step = segments(weights)
    loss, terms, gradients = step([of_step], pipeline)
    other_loss, other_terms, other_gradients = step([[of_step[i] for i in row] for row in rows], pipeline)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert {name: other_terms.get(name, 0.0) for name in terms} == pytest.approx(terms, rel=1e-9)
    for got, want in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        assert want.abs().max() > 1e-3


def test_duplicating_segments_does_not_change_the_mean() -> None:
    pipeline, weights = PIPELINES["stage2"]
    loss, _, gradients = step([segments(weights)], pipeline)
    doubled, _, twice = step([segments(weights), segments(weights)], pipeline)
    assert doubled == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(twice, gradients, rtol=1e-9, atol=1e-12)


def test_a_row_without_scored_positions_still_has_a_graph() -> None:
    """Every rank runs backward: an image without objects under a coordinates-only pipeline has a zero gradient."""
    model = Trigram()
    result = scored(build_pipeline(config(["token_ce", "bbox_geo"])), [segments()[4]], model)
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert all(torch.count_nonzero(gradient) == 0 for gradient in model.gradients())


def test_totals_are_additive() -> None:
    parts = [count_terms([segment.target]) for segment in segments()]
    assert all(tuple(part) == TERMS for part in parts), "the same order on every rank"
    assert {term: sum(part[term] for part in parts) for term in TERMS} == count_terms(s.target for s in segments())
