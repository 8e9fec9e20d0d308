"""Which tokens each loss term is trained on, and with which weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordexp.config.objective import PipelineConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.records import TokenRole as R
from coordexp.records import TrainingTarget
from coordexp.targets import TERMS, SupervisionWeights, count_terms
from coordexp.targets.weights import weigh_tokens
from support.objective_rows import config, rewritten_and_soft_segments, segments

WEIGHTS = SupervisionWeights(
    struct_ce=1.25, desc_ce=0.75, rollout_fn_desc_ce=0.5, matched_struct_ce=2.0, coord_token_ce=3.0
)
WRITTEN = (R.GT_STRUCT, R.CLOSE, R.EOS, R.REWRITTEN_STRUCT)
NO_BOX = np.zeros((0, 4), dtype=np.int64)


def by_role(context: str, weights: SupervisionWeights) -> dict[str, dict[R, float]]:
    found = weigh_tokens(np.arange(len(R)), NO_BOX, context, weights)  # pyright: ignore[reportArgumentType]
    return {term: {R(t): float(weight_T[t]) for t in np.flatnonzero(weight_T)} for term, weight_T in found.items()}


@pytest.mark.parametrize(("context", "tail_desc"), [("gt", 0.75), ("rollout", 0.5)])
def test_weight_of_every_role(context: str, tail_desc: float) -> None:
    assert by_role(context, WEIGHTS) == {
        "struct_ce": {**dict.fromkeys(WRITTEN, 1.25), R.MATCHED_STRUCT: 2.0},
        "desc_ce": {R.GT_DESC: tail_desc, R.REWRITTEN_DESC: 0.75},
        "coord_token_ce": {R.GT_COORD: 3.0},
        "coord": {R.MATCHED_COORD: 1.0, R.GT_COORD: 1.0},
        "text_gate": dict.fromkeys((*WRITTEN, R.MATCHED_STRUCT, R.GT_DESC, R.REWRITTEN_DESC), 1.0),
    }


def test_by_default_prefix_text_and_appended_descriptions_are_not_trained() -> None:
    found = by_role("rollout", SupervisionWeights())
    assert "coord_token_ce" not in found
    for term in ("struct_ce", "desc_ce", "text_gate"):
        assert not {R.MATCHED_STRUCT, R.MATCHED_DESC, R.MASKED, R.GT_DESC, R.SOFT_COORD} & set(found[term])


@pytest.mark.parametrize(("annotated", "appended"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)])
def test_text_gate_covers_descriptions_where_they_are_trained(annotated: float, appended: float) -> None:
    weights = SupervisionWeights(desc_ce=annotated, rollout_fn_desc_ce=appended)
    for context, tail_desc in (("gt", annotated), ("rollout", appended)):
        gated = set(by_role(context, weights)["text_gate"])
        assert (R.GT_DESC in gated) is (tail_desc > 0) and (R.REWRITTEN_DESC in gated) is (annotated > 0)


@pytest.mark.parametrize("trained", [True, False])
def test_text_gate_covers_structure_of_matched_objects_where_it_is_trained(trained: bool) -> None:
    weights = SupervisionWeights(matched_struct_ce=0.5 if trained else 0.0)
    found = by_role("rollout", weights)
    assert (R.MATCHED_STRUCT in found["struct_ce"]) is (R.MATCHED_STRUCT in found["text_gate"]) is trained


def test_softness_lowers_only_cross_entropy() -> None:
    roles_T = np.array([R.GT_STRUCT, R.GT_DESC, R.SOFT_COORD, R.CLOSE, R.EOS])
    softness_T = np.array([0.25, 0.25, 0.25, 1.0, 1.0])
    found = weigh_tokens(roles_T, NO_BOX, "gt", WEIGHTS, softness_T)
    assert {term: weight_T.tolist() for term, weight_T in found.items()} == {
        "struct_ce": [0.3125, 0.0, 0.0, 1.25, 1.25],
        "desc_ce": [0.0, 0.1875, 0.0, 0.0, 0.0],
        "text_gate": [1.0, 1.0, 0.0, 1.0, 1.0],
    }


def test_the_weight_of_a_box_is_at_its_first_coordinate() -> None:
    found = weigh_tokens(np.full(9, R.GT_COORD), np.array([[4, 5, 6, 7]]), "gt", WEIGHTS)
    assert found["box"].tolist() == [0.0] * 4 + [1.0] + [0.0] * 4


@pytest.mark.parametrize("make_segments", [segments, rewritten_and_soft_segments], ids=lambda make: make.__name__)
def test_only_coordinates_and_boxes_of_a_target_have_weights(make_segments) -> None:
    for segment in make_segments(WEIGHTS):
        target: TrainingTarget = segment.target
        assert np.flatnonzero(target.weights.get("coord", [])).tolist() == target.coord_pos_K.tolist()
        assert np.flatnonzero(target.weights.get("box", [])).tolist() == sorted(target.box_pos_M4[:, 0].tolist())
        assert all(weight_T.dtype == np.float32 and weight_T.any() for weight_T in target.weights.values())
        assert set(target.weights) <= set(TERMS)


def test_totals_count_positions_with_a_weight() -> None:
    targets = [segment.target for segment in segments(WEIGHTS)]
    assert count_terms(targets) == {
        term: sum(int((target.weights[term] != 0).sum()) for target in targets if term in target.weights)
        for term in TERMS
    }
    assert count_terms([]) == dict.fromkeys(TERMS, 0)


# -- from the configuration ------------------------------------------------------------------------------------------


def test_a_pipeline_gives_the_weights_of_its_token_ce() -> None:
    declared = config(struct_ce_weight=1.25, desc_ce_weight=0.75, rollout_fn_desc_weight=0.5)
    aligned = SupervisionWeights(struct_ce=1.25, desc_ce=0.75, rollout_fn_desc_ce=0.5)
    assert SupervisionWeights.from_pipeline(declared) == aligned
    channel_b = SupervisionWeights.from_pipeline(declared, "B", with_matched_prefix=True)
    assert channel_b == replace(aligned, matched_struct_ce=1.25)
    assert SupervisionWeights.from_pipeline(declared, "A") == aligned


@pytest.mark.parametrize("change", [{"enabled": False}, {"channels": ("A",)}, {"weight": 0.0}])
def test_text_without_an_active_token_ce_has_no_cross_entropy(change: dict) -> None:
    token_ce, *others = config().objective
    declared = PipelineConfig(objective=(token_ce.model_copy(update=change), *others), diagnostics=())
    found = by_role("gt", SupervisionWeights.from_pipeline(declared, "B", with_matched_prefix=True))
    assert set(found) == {"coord", "text_gate"}
    assert set(found["text_gate"]) == set(WRITTEN), "descriptions are not trained"


@pytest.mark.parametrize(("enabled", "coord_token"), [(None, 1.0), (False, 1.0), (True, 0.0)])
def test_stage_1_trains_coordinates_as_tokens_without_a_coordinate_loss(
    enabled: bool | None, coord_token: float
) -> None:
    coord_loss = None if enabled is None else CoordSoftCEW1Config(enabled=enabled)
    assert SupervisionWeights.for_sft(coord_loss).coord_token_ce == coord_token
