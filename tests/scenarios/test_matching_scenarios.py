"""The contract's scenarios on matching."""

import pytest

from coordexp.coords import serialize_append
from coordexp.geometry import mask_iou
from coordexp.matching import MatchingConfig, match_objects
from coordexp.records import GTObject


@pytest.mark.scenario("Pre-assignment gating prevents wrong matches and triggers FN append")
def test_a_shape_under_the_gate_with_everything_is_false_positive_and_all_gt_is_appended():
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
