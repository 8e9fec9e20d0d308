"""The contract's scenarios on matching."""

import pytest

from coordexp.coords import serialize_append
from coordexp.geometry import mask_iou
from coordexp.matching import MatchingConfig, match_objects
from coordexp.records import GTObject


@pytest.mark.scenario("Pre-assignment gating prevents wrong matches and triggers FN append")
def test_prediction_below_the_gate_is_a_false_positive():
    config = MatchingConfig(maskiou_gate=0.5)
    predicted = [GTObject("cat", "bbox_2d", (100, 100, 200, 200))]
    ground_truth = [
        GTObject("cat", "bbox_2d", (140, 100, 240, 200)),
        GTObject("dog", "poly", (100, 150, 200, 150, 150, 290)),
    ]
    ious = [mask_iou(predicted[0], obj) for obj in ground_truth]
    assert all(0 < iou < config.maskiou_gate for iou in ious)  # overlapping, so a laxer matcher would take one
    assert match_objects(predicted, ground_truth, MatchingConfig(maskiou_gate=0.1)).pairs

    result = match_objects(predicted, ground_truth, config)

    assert result.pairs == ()
    assert result.fp_pred_idx == (0,)
    assert result.fn_gt_idx == (0, 1)
    assert result.num_gate_rejections == 2
    appended = serialize_append([ground_truth[j] for j in result.fn_gt_idx], '{"object_1": {}', start_index=2)
    assert appended.count('"object_') == 2


@pytest.mark.scenario("Pre-assignment gating prevents wrong matches and triggers FN append")
def test_pair_below_the_gate_is_not_a_candidate():
    """Without the gate the cheapest assignment crosses over: p0 with g1, p1 with g0. If the gate were applied
    afterwards, it would drop p1 and leave p0 with its second best."""
    config = MatchingConfig(maskiou_gate=0.5)
    ground_truth = [GTObject("a", "bbox_2d", (100, 0, 200, 400)), GTObject("b", "bbox_2d", (158, 0, 258, 400))]
    predicted = [GTObject("a", "bbox_2d", (125, 0, 225, 400)), GTObject("a", "bbox_2d", (62, 0, 162, 400))]
    ious = [[mask_iou(p, g) for g in ground_truth] for p in predicted]
    assert ious[0][0] > ious[0][1] >= config.maskiou_gate > ious[1][0] > ious[1][1] > 0
    lax = match_objects(predicted, ground_truth, MatchingConfig(maskiou_gate=0.3))
    assert [(pair.pred_idx, pair.gt_idx) for pair in lax.pairs] == [(0, 1), (1, 0)]

    result = match_objects(predicted, ground_truth, config)

    assert [(pair.pred_idx, pair.gt_idx) for pair in result.pairs] == [(0, 0)]
    assert (result.fp_pred_idx, result.fn_gt_idx, result.num_gate_rejections) == ((1,), (1,), 2)
