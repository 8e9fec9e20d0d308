"""The reference for :func:`coordexp.objective.score_head`: all the logits, the limit, and plain autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from coordexp.objective import HeadQuery, HeadScores, ObjectivePipeline, ObjectiveResult, SupervisionTensors
from coordexp.objective.coord_math import LOGIT_LIMIT, limit_logits


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
