"""Any pipeline and any packing: loss and gradients equal those from all the logits, one row per segment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.objective import ObjectivePipeline, SupervisionTensors, build_pipeline, sft_pipeline
from coordexp.packing import build_row
from coordexp.records import Segment
from coordexp.targets import TERMS, SupervisionWeights, count_terms
from support.objective_rows import (
    COORDS,
    EVERYTHING,
    EVERYTHING_WEIGHTS,
    Trigram,
    config,
    result_from_logits,
    rewritten_and_soft_segments,
    scored,
    segments,
)

FACTOR = st.sampled_from([0.0, 0.5, 1.0, 1.3])
KEYS = st.fixed_dictionaries(
    {
        **{
            key: FACTOR
            for key in (
                *("struct_ce_weight", "desc_ce_weight", "rollout_fn_desc_weight", "coord_ce_weight", "soft_ce_weight"),
                *("w1_weight", "coord_gate_weight", "text_gate_weight", "smoothl1_weight", "ciou_weight"),
            )
        },
        "temperature": st.sampled_from([0.7, 1.0, 1.5]),
        "target_truncate": st.sampled_from([None, 12.0]),
    }
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[ObjectivePipeline, list[list[Segment]]]:
    """A pipeline, and the rows of a step with targets weighted by it."""
    keys = draw(KEYS)
    kind = draw(st.sampled_from(["stage 2", "Channel-B", "stage 1", "stage 1 with a coordinate loss"]))
    if kind in ("stage 2", "Channel-B"):
        declared = config(**keys)
        dropped = draw(st.sampled_from([None, "bbox_geo", "token_ce", "coord_reg"]))
        kept = tuple(spec for spec in declared.objective if spec.name != dropped)
        declared = declared.model_copy(update={"objective": kept})
        pipeline = build_pipeline(declared)
        weights = SupervisionWeights.from_pipeline(declared, with_matched_prefix=kind == "Channel-B")
    else:
        coord_loss = CoordSoftCEW1Config(
            enabled="with" in kind,
            ce_weight=draw(FACTOR),
            gate_weight=draw(FACTOR),
            text_gate_weight=draw(FACTOR),
        )
        pipeline, weights = sft_pipeline(coord_loss), SupervisionWeights.for_sft(coord_loss)
    pool = [*segments(weights), *rewritten_and_soft_segments(weights)]
    chosen = draw(st.lists(st.sampled_from(range(len(pool))), min_size=1, max_size=6, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, len(chosen)), max_size=2)) | {len(chosen)})
    return pipeline, [[pool[i] for i in chosen[a:b]] for a, b in zip([0, *cuts], cuts, strict=False) if a < b]


@settings(max_examples=40)
@given(step=steps())
def test_loss_and_gradients_equal_those_from_all_logits(step: tuple[ObjectivePipeline, list[list[Segment]]]) -> None:
    pipeline, rows = step
    totals = count_terms(segment.target for row in rows for segment in row)
    ours, reference = Trigram(), Trigram()
    loss = sum(_backward(scored(pipeline, row, ours, totals).loss) for row in rows)
    expected = 0.0
    for segment in (segment for row in rows for segment in row):
        row = build_row([segment])
        found = SupervisionTensors.from_row(row)
        logits_NV = reference(torch.from_numpy(row.token_ids_L), found.position_N) @ reference.head
        expected += _backward(result_from_logits(pipeline, found, logits_NV, COORDS, totals).loss)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    for got, want in zip(ours.gradients(), reference.gradients(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-11)


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


# -- normalisation -----------------------------------------------------------------------------------------------------

STAGE2 = build_pipeline(config(**EVERYTHING))


def step(rows: Sequence[Sequence[Segment]]) -> tuple[float, list[torch.Tensor]]:
    """Backward over each row in turn, with the whole step's totals: the sum over micro-steps and ranks."""
    totals = count_terms(segment.target for row in rows for segment in row)
    model = Trigram()
    loss = sum(_backward(scored(STAGE2, row, model, totals).loss) for row in rows)
    return loss, list(model.gradients())


def test_duplicating_segments_does_not_change_the_mean() -> None:
    loss, gradients = step([segments(EVERYTHING_WEIGHTS)])
    doubled, twice = step([segments(EVERYTHING_WEIGHTS)] * 2)
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
