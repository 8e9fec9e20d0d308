"""The calls that other projects make from Python, each with its documented arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from coordexp.config import load_config
from coordexp.coords import CoordVocab, serialize_append
from coordexp.geometry import barycentric_targets, mask_iou
from coordexp.matching import MatchingConfig, match_objects
from coordexp.metrics import reduce_metrics
from coordexp.objective import build_pipeline, coord_gate
from coordexp.packing import select_segments
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject
from coordexp.rollouts import chunk_size, request_seed, split_requests
from coordexp.targets import build_target

ROOT = Path(__file__).parents[2]
CIRCLE = GTObject("red circle", "bbox_2d", (112, 40, 388, 310))
SQUARE = GTObject("blue square", "bbox_2d", (500, 500, 600, 600))


def test_an_answer_becomes_a_target() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "demo-stage1")
    vocab = CoordVocab.from_tokenizer(tokenizer)
    assert (len(vocab.coord_token_ids), vocab.bin_of(vocab.coord_token_ids[7])) == (1000, 7)
    written = "{" + serialize_append([CIRCLE], "{", 1, "desc_first")
    parsed = parse_rollout(tokenizer(written, add_special_tokens=False).input_ids, vocab)
    (found,) = parsed.objects
    assert (found.index, found.desc, found.kind, found.bins) == (1, "red circle", "bbox_2d", (112, 40, 388, 310))
    assert (parsed.dropped, parsed.max_object_index) == ({}, 1)
    match = match_objects(parsed.objects, [SQUARE, CIRCLE], MatchingConfig(maskiou_gate=0.3))
    assert [(pair.pred_idx, pair.gt_idx) for pair in match.pairs] == [(0, 1)]
    assert (match.fn_gt_idx, match.fp_pred_idx, match.num_gate_rejections) == ((0,), (), 0)
    target = build_target(parsed, match, [SQUARE, CIRCLE], vocab)
    assert target.token_ids[: len(parsed.prefix_token_ids)] == parsed.prefix_token_ids
    appended = serialize_append([SQUARE], parsed.prefix_text, 2, "desc_first")
    assert tokenizer.decode(target.token_ids).startswith(parsed.prefix_text + appended)


def test_shapes_are_compared() -> None:
    assert mask_iou(CIRCLE, CIRCLE, resolution=256) == 1.0
    assert mask_iou(CIRCLE, SQUARE) == 0.0
    points = np.array([[0.0, 0.0], [100.0, 0.0]])
    np.testing.assert_allclose(barycentric_targets(points, points, cost="l2", epsilon=1e-3, iters=30), points)


def test_requests_are_divided_and_seeded() -> None:
    assert select_segments([5, 3, 4], 8) == [0, 1]
    assert split_requests(5, [1, 2]) == [range(0, 2), range(2, 5)]
    assert chunk_size(4, [1, 2], 2) == 6
    assert request_seed(17, 3, 0, 0, 1) == 782541641


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_the_gate_is_computed_from_logits(broken: float) -> None:
    """The mass on ten of twenty tokens: a half. A logit that is NaN counts as 0."""
    logits = torch.zeros(3, 20)
    logits[1, 0] = broken
    gate = coord_gate(logits, logits[:, 10:], 0.7)
    assert gate.shape == (3,) and torch.isfinite(gate).all() and (gate >= 0).all()
    torch.testing.assert_close(gate[[0, 2]], torch.full((2,), np.log(2.0), dtype=torch.float32))


def test_a_pipeline_is_built_and_metrics_are_reduced() -> None:
    section = load_config(ROOT / "configs" / "demo" / "stage2.yaml").rollout_matching
    assert section is not None and section.pipeline is not None
    pipeline = build_pipeline(section.pipeline)
    assert [entry.name for entry in pipeline.objective] == ["token_ce", "coord_reg"]
    assert reduce_metrics({"time/optimizer_s": 2.0}) == {"time/optimizer_s": 2.0}
