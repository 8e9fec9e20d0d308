"""The contract's scenarios about the loss: which positions it touches, and one arithmetic for every consumer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.objective import (
    ObjectivePipeline,
    ObjectiveResult,
    SupervisionTensors,
    build_pipeline,
    coord_gate,
    score_head,
    sft_pipeline,
)
from coordexp.packing import build_row
from coordexp.records import GTObject, Segment, TokenRole
from coordexp.targets import TERMS, SupervisionWeights, TransportConfig, build_gt_target, count_terms
from support.answers import CAT, DOG, LEAF, answer, entry, outcome_of, tiny_vocab
from support.objective_rows import COORD_IDS, COORDS, EVERYTHING, config, result_from_logits

PROMPT = (3, 4, 5, 6)
NEAR_CAT = GTObject("cat", "bbox_2d", (12, 25, 195, 230))
FALSE_POSITIVE = GTObject("red circle", "bbox_2d", (700, 10, 800, 90))


def rollout_segment(**changes: float | None) -> Segment:
    """A matched object, a false positive, and a missed object in the tail; weights as the changed pipeline has them."""
    weights = SupervisionWeights.from_pipeline(config(**changes))
    got = outcome_of(answer(entry(1, NEAR_CAT), entry(2, FALSE_POSITIVE)), [CAT, DOG], tiny_vocab(), weights=weights)
    assert len(got.match.pairs) == 1 and len(got.match.fp_pred_idx) == 1
    return Segment("s", PROMPT, got.target)


def gradient_of(segment: Segment, **changes: float | None) -> torch.Tensor:
    """Gradient of the loss on every logit of the row, (L, V): row p is what predicts token p + 1."""
    logits_LV = logits_of(segment)
    score(segment, logits_LV, build_pipeline(config(**changes))).loss.backward()
    assert logits_LV.grad is not None
    return logits_LV.grad


def logits_of(segment: Segment) -> torch.Tensor:
    """Any logits for every position of the segment's row, (L, V)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(segment.length, len(tiny_vocab()), dtype=torch.float64, generator=generator).requires_grad_()


def score(segment: Segment, logits_LV: torch.Tensor, pipeline: ObjectivePipeline) -> ObjectiveResult:
    supervision = SupervisionTensors.from_row(build_row([segment]))
    logits_NV = logits_LV[supervision.position_N - 1]
    return result_from_logits(pipeline, supervision, logits_NV, COORDS, count_terms([segment.target]))


def positions(segment: Segment, *roles: TokenRole) -> list[int]:
    """Row positions of the logits that predict the target's tokens of these roles."""
    return (np.flatnonzero(np.isin(segment.target.roles_T, roles)) + len(segment.prompt_token_ids) - 1).tolist()


@pytest.mark.scenario("Prefix coord tokens can be supervised without supervising prefix text tokens")
def test_only_matched_prefix_coordinates_and_the_tail_get_gradient() -> None:
    segment = rollout_segment()
    gradient = gradient_of(segment, coord_gate_weight=0.0, rollout_fn_desc_weight=0.0)
    touched = gradient.abs().sum(dim=1) > 0
    prefix_text = {TokenRole.MASKED, TokenRole.MATCHED_STRUCT, TokenRole.MATCHED_DESC}
    assert all(positions(segment, role) for role in prefix_text)
    supervised = positions(segment, *(set(TokenRole) - prefix_text - {TokenRole.GT_DESC}))
    assert torch.nonzero(touched)[:, 0].tolist() == supervised
    assert len(positions(segment, TokenRole.MATCHED_COORD)) == 4  # the false positive's four are not among them
    # Coordinates: only the distribution over bins is touched, never the text vocabulary. Text: all of it.
    at_coords = gradient[positions(segment, TokenRole.MATCHED_COORD, TokenRole.GT_COORD)]
    text_columns = torch.ones(gradient.shape[1], dtype=torch.bool)
    text_columns[COORD_IDS] = False
    assert at_coords[:, COORD_IDS].abs().sum() > 0
    assert at_coords[:, text_columns].abs().sum() == 0
    at_text = gradient[positions(segment, TokenRole.GT_STRUCT, TokenRole.CLOSE, TokenRole.EOS)]
    assert (at_text != 0).all()


@pytest.mark.scenario("Prefix coord tokens can be supervised without supervising prefix text tokens")
@pytest.mark.parametrize(("weight", "touched"), [(0.0, False), (0.5, True)])
def test_appended_descriptions_are_masked_unless_weighted(weight: float, touched: bool) -> None:
    segment = rollout_segment(rollout_fn_desc_weight=weight)
    rows = positions(segment, TokenRole.GT_DESC)
    assert rows
    gradient = gradient_of(segment, rollout_fn_desc_weight=weight)
    assert bool((gradient[rows].abs().sum(dim=1) > 0).all()) is touched
    assert bool((gradient[rows].abs().sum(dim=1) > 0).any()) is touched


@pytest.mark.scenario("Poly prediction is supervised by barycentric-projected targets")
def test_polygon_slots_have_fractional_targets_and_no_decoding() -> None:
    near_leaf = GTObject("leaf", "poly", (310, 25, 470, 22, 485, 195))
    blurred = TransportConfig(epsilon=10.0)
    outcome = outcome_of(answer(entry(1, near_leaf)), [LEAF], tiny_vocab(), transport=blurred)
    segment = Segment("s", PROMPT, outcome.target)
    logits_LV = logits_of(segment)
    result = score(segment, logits_LV, build_pipeline(config(coord_gate_weight=0.0)))
    assert not [name for name in result.terms if name.startswith("loss/bbox_geo")]
    # Independent: the slot's softmax against a Gaussian around the transported coordinate.
    bins = torch.arange(1000, dtype=torch.float64)
    centers = torch.from_numpy(segment.target.coord_bin_K)[:, None]
    q = torch.exp(-0.5 * ((bins - centers) / 2.0) ** 2)
    q = q / q.sum(dim=1, keepdim=True)
    z = logits_LV[torch.from_numpy(segment.target.coord_pos_K) + len(PROMPT) - 1][:, COORD_IDS]
    expected = -(q * z.log_softmax(-1)).sum(dim=1).mean()
    assert result.terms["loss/coord_reg/soft_ce"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert not np.array_equal(segment.target.coord_bin_K, np.round(segment.target.coord_bin_K))


@pytest.mark.scenario("Supervision indices are validated against assistant span")
def test_every_supervised_position_is_in_the_assistants_tokens() -> None:
    segments = [
        rollout_segment(),
        Segment("gt", PROMPT, build_gt_target([LEAF], tiny_vocab(), sample_id="gt", field_order="desc_first")),
    ]
    row = build_row(segments)
    found = SupervisionTensors.from_row(row)
    assistant = np.concatenate(
        [np.arange(start + len(PROMPT), end) for start, end in zip(row.offsets[:-1], row.offsets[1:], strict=True)]
    )
    assert np.isin(found.position_N.numpy(), assistant).all()
    assert torch.isin(found.label_N[found.coord_in_N_K], COORD_IDS).all()


BROKEN = {
    "plain": (0.5, -1.0),
    "text NaN": (math.nan, 1.0),
    "coordinate NaN": (1.0, math.nan),
    "text +inf": (math.inf, 0.0),
    "coordinate +inf": (0.0, math.inf),
    "all -inf": (-math.inf, -math.inf),
    "beyond the clamp": (3e4, -3e38),
}


@pytest.mark.scenario("Gate-loss numeric fences are consistent across training and rollout paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("text", "coord"), BROKEN.values(), ids=BROKEN)
def test_stage_1_stage_2_and_metrics_agree_on_the_gate(text: float, coord: float, dtype: torch.dtype) -> None:
    """A head with one hidden unit that is 1: its weight is what every position's logits are, broken ones included."""
    supervision = SupervisionTensors.from_row(
        build_row(
            [Segment("gt", PROMPT, build_gt_target([CAT], tiny_vocab(), sample_id="gt", field_order="desc_first"))]
        )
    )
    logits_V = torch.randn(len(tiny_vocab()), dtype=dtype, generator=torch.Generator().manual_seed(1))
    logits_V[11] = text
    logits_V[COORD_IDS[3]] = coord
    helper = coord_gate(logits_V, logits_V[COORD_IDS], 1.0)
    assert torch.isfinite(helper) and helper >= 0

    def terms(pipeline: ObjectivePipeline) -> dict[str, torch.Tensor]:
        query = pipeline.query(supervision)
        hidden_N1 = torch.ones(len(supervision.position_N), 1, dtype=dtype)
        scores = score_head(hidden_N1, logits_V[:, None], query, supervision.label_N, COORDS)
        totals = dict.fromkeys(TERMS, 1) | {"coord": len(supervision.coord_in_N_K)}
        return pipeline(supervision, scores, totals).terms

    only_gate = {"soft_ce_weight": 0.0, "w1_weight": 0.0, "coord_gate_weight": 1.0}
    stage2 = terms(build_pipeline(config(["bbox_geo"], **only_gate)))
    stage1 = terms(sft_pipeline(CoordSoftCEW1Config(enabled=True, soft_ce_weight=0.0, w1_weight=0.0, gate_weight=1.0)))
    assert stage2["loss/coord_reg/coord_gate"].item() == pytest.approx(helper.item(), rel=1e-5, abs=1e-6)
    assert stage1["loss/coord_reg/coord_gate"].item() == stage2["loss/coord_reg/coord_gate"].item()
    for found in (stage1, stage2):  # the metric is the same helper's mass
        assert found["coord_diag/coord_mass"].item() == pytest.approx(torch.exp(-helper).item(), rel=1e-5)


@pytest.mark.scenario("Gate-loss numeric fences are consistent across training and rollout paths")
def test_rollout_slots_and_ground_truth_slots_use_the_same_gate() -> None:
    """Equal logits at a matched prefix slot and at a tail slot cost the same, at any temperature."""
    segment = rollout_segment()
    pipeline = build_pipeline(config(**(EVERYTHING | {"temperature": 0.7})))
    by_slot = []
    for role in (TokenRole.MATCHED_COORD, TokenRole.GT_COORD):
        logits_LV = torch.zeros(segment.length, len(tiny_vocab()), dtype=torch.float64)
        logits_LV[:, 11] = 4.0
        logits_LV[positions(segment, role), COORD_IDS[5]] = math.nan
        by_slot.append(score(segment, logits_LV, pipeline).terms["loss/coord_reg/coord_gate"].item())
    assert by_slot[0] == pytest.approx(by_slot[1], rel=1e-12)
