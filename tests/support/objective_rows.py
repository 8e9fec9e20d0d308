"""Packed rows with supervision and a small differentiable stand-in for a model, in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from coordexp.config.objective import PipelineConfig
from coordexp.objective import HeadQuery, HeadScores, ObjectivePipeline, ObjectiveResult, SupervisionTensors, score_head
from coordexp.objective.coord_math import LOGIT_LIMIT, limit_logits
from coordexp.packing import build_row
from coordexp.records import GTObject, Segment, TrainingTarget
from coordexp.targets import SupervisionWeights, TargetPolicy, build_gt_target, count_terms
from support.answers import CAT, DOG, LEAF, NEAR_CAT, answer, entry, outcome_of, tiny_vocab
from support.config_samples import pipeline

NEAR_LEAF = GTObject("leaf", "poly", (305, 22, 480, 25, 488, 200))
COORD_IDS = torch.tensor(tiny_vocab().coord_token_ids)
COORDS = tiny_vocab().coord_token_ids
DEFAULT = SupervisionWeights()


@lru_cache
def segments(weights: SupervisionWeights = DEFAULT) -> tuple[Segment, ...]:
    """Rollout context with boxes and polygons found, missed and invented; ground-truth context; an empty image."""
    vocab = tiny_vocab()
    found = partial(outcome_of, vocab=vocab, weights=weights)
    written = partial(build_gt_target, vocab=vocab, field_order="desc_first", weights=weights)
    targets: list[TrainingTarget] = [
        found(answer(entry(1, NEAR_CAT), entry(2, DOG)), [CAT, LEAF]).target,
        written([DOG, LEAF], sample_id="gt"),
        found(answer(entry(4, NEAR_LEAF)), [LEAF]).target,
        found("", [CAT, DOG], field_order="geometry_first").target,
        written([], sample_id="empty"),
    ]
    return tuple(Segment(f"s{i}", tuple(range(3, 6 + i)), target, {}) for i, target in enumerate(targets))


@lru_cache
def rewritten_and_soft_segments(weights: SupervisionWeights = DEFAULT) -> tuple[Segment, ...]:
    """Rewritten answers, and soft objects found, missed and in ground truth."""
    vocab, policy = tiny_vocab(), TargetPolicy("rewritten")
    found = partial(outcome_of, vocab=vocab, weights=weights)
    soft_cat, soft_leaf = replace(CAT, soft=0.3), replace(LEAF, soft=0.6)
    written = answer(entry(1, NEAR_CAT), entry(2, DOG), entry(3, NEAR_LEAF))
    targets = [
        found(written, [CAT, LEAF], policy=policy).target,
        found(written, [soft_cat, DOG], policy=policy).target,
        found(answer(entry(1, NEAR_CAT)), [soft_cat, soft_leaf, DOG]).target,
        build_gt_target([soft_leaf, DOG], vocab, sample_id="gt", field_order="desc_first", weights=weights),
    ]
    return tuple(Segment(f"r{i}", (3, 4, 5), target, {}) for i, target in enumerate(targets))


class Trigram:
    """Hidden states from the two tokens before: a segment has the same in every row."""

    def __init__(self, seed: int = 0, hidden: int = 6, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = len(tiny_vocab())
        self.embed = (scale * torch.randn(size, hidden, dtype=torch.float64, generator=generator)).requires_grad_()
        self.head = torch.randn(hidden, size, dtype=torch.float64, generator=generator).requires_grad_()

    def __call__(self, token_ids_L: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        return self.embed[token_ids_L[position_N - 1]] + 0.7 * self.embed[token_ids_L[position_N - 2]]

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.embed.grad is not None and self.head.grad is not None
        return self.embed.grad, self.head.grad


def scores_of(
    row_segments: Sequence[Segment], model: Trigram, pipeline: ObjectivePipeline
) -> tuple[SupervisionTensors, HeadScores]:
    """Supervision and scores of one packed row for ``pipeline``."""
    row = build_row(row_segments)
    supervision = SupervisionTensors.from_row(row)
    hidden = model(torch.from_numpy(row.token_ids_L), supervision.position_N)
    query = pipeline.query(supervision)
    return supervision, score_head(hidden, model.head.T, query, supervision.label_N, COORDS)


def scored(
    pipeline: ObjectivePipeline,
    row_segments: Sequence[Segment],
    model: Trigram,
    totals: Mapping[str, int] | None = None,
) -> ObjectiveResult:
    """The pipeline on one packed row; ``totals`` of the whole step, the row's own by default."""
    totals = totals or count_terms(segment.target for segment in row_segments)
    return pipeline(*scores_of(row_segments, model, pipeline), totals)


def config(drop: Sequence[str] = (), /, **changes: float | None) -> PipelineConfig:
    """The sample pipeline; ``changes`` set keys of whichever module has them."""
    declared = copy.deepcopy(pipeline())
    declared["objective"] = [spec for spec in declared["objective"] if spec["name"] not in drop]
    known = {key for spec in declared["objective"] for key in spec["config"]}
    assert set(changes) <= known, set(changes) - known
    for spec in declared["objective"]:
        spec["config"] |= {key: value for key, value in changes.items() if key in spec["config"]}
    return PipelineConfig.model_validate(declared)


EVERYTHING = {
    "struct_ce_weight": 1.3,
    "desc_ce_weight": 0.7,
    "rollout_fn_desc_weight": 0.2,
    "coord_ce_weight": 0.4,
    "soft_ce_weight": 1.1,
    "w1_weight": 3.0,
    "coord_gate_weight": 0.6,
    "text_gate_weight": 0.9,
    "temperature": 1.5,
    "target_sigma": 3.0,
    "target_truncate": 12.0,
    "smoothl1_weight": 2.0,
    "ciou_weight": 0.5,
}
EVERYTHING_WEIGHTS = SupervisionWeights(struct_ce=1.3, desc_ce=0.7, rollout_fn_desc_ce=0.2)


# -- the reference: all the logits, the limit, and plain autograd ------------------------------------------------------


def scores_from_logits(
    logits_NV: torch.Tensor, query: HeadQuery, label_N: torch.Tensor, coord_ids: Sequence[int]
) -> HeadScores:
    z_NV = limit_logits(logits_NV)
    z_NB = z_NV[:, torch.tensor(coord_ids)]
    num = len(logits_NV)
    vocab_N, mass_N, slot_N = (torch.zeros(num, dtype=torch.bool) for _ in range(3))
    vocab_N[query.vocab_in_N_U] = True
    mass_N[query.coord_mass_in_N_G] = True
    if query.slot_in_N_K is not None:
        slot_N[query.slot_in_N_K] = True
    asked_N = vocab_N | mass_N | slot_N
    looked_at = torch.zeros(logits_NV.shape, dtype=torch.bool)
    looked_at[vocab_N] = True
    looked_at[:, torch.tensor(coord_ids)] |= asked_N[:, None]
    raw = logits_NV.detach()
    nonfinite_N = (~torch.isfinite(raw) & looked_at).any(dim=1)
    clamped_N = ((raw.abs() > LOGIT_LIMIT) & looked_at).any(dim=1) & ~nonfinite_N
    label_N = z_NV.gather(1, label_N[:, None])[:, 0]
    return HeadScores(
        {tau: torch.where(vocab_N, torch.logsumexp(z_NV / tau, dim=1), 0.0) for tau in query.temperatures},
        torch.where(vocab_N, label_N, 0.0),
        {tau: torch.where(mass_N, torch.logsumexp(z_NB / tau, dim=1), -torch.inf) for tau in query.temperatures},
        None if query.slot_in_N_K is None else z_NB[query.slot_in_N_K],
        nonfinite_N,
        clamped_N,
    )


def result_from_logits(
    pipeline: ObjectivePipeline,
    supervision: SupervisionTensors,
    logits_NV: torch.Tensor,
    coord_ids: Sequence[int],
    totals: Mapping[str, int],
) -> ObjectiveResult:
    query = pipeline.query(supervision)
    return pipeline(supervision, scores_from_logits(logits_NV, query, supervision.label_N, coord_ids), totals)
