"""What :func:`coordexp.objective.score_head` must equal: all the logits, the fence, and plain autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coordexp.objective import (
    HeadQuery,
    HeadScores,
    ObjectiveContext,
    ObjectivePipeline,
    SupervisionCounts,
    SupervisionTensors,
)
from coordexp.objective.coord_math import LOGIT_LIMIT, limit_logits


def scores_from_logits(
    logits_NV: torch.Tensor, query: HeadQuery, label_N: torch.Tensor, coord_ids: Sequence[int]
) -> HeadScores:
    z_NV = limit_logits(logits_NV)
    z_NB = z_NV[:, torch.tensor(coord_ids)]
    at_U, temperatures = query.vocab_in_N_U, query.temperatures or (1.0,)
    asked_N = torch.zeros(len(logits_NV), dtype=torch.bool)
    asked_N[at_U] = True
    bad_NV = ~torch.isfinite(logits_NV.detach())
    nonfinite_N = bad_NV.any(dim=1) & asked_N
    clamped_N = (logits_NV.detach().abs() > LOGIT_LIMIT).any(dim=1) & asked_N & ~nonfinite_N
    return HeadScores(
        torch.stack([torch.logsumexp(z_NV[at_U] / tau, dim=1) for tau in temperatures]),
        z_NV[at_U, label_N[at_U]],
        torch.stack([torch.logsumexp(z_NB[at_U][query.text_gate_in_U_G] / tau, dim=1) for tau in temperatures]),
        z_NB[query.slot_in_N_K],
        nonfinite_N,
        clamped_N,
    )


def context_of_logits(
    pipeline: ObjectivePipeline,
    supervision: SupervisionTensors,
    logits_NV: torch.Tensor,
    coord_ids: Sequence[int],
    counts: SupervisionCounts,
) -> ObjectiveContext:
    """The context that a model with exactly these logits would have."""
    query = pipeline.query(supervision)
    scores = scores_from_logits(logits_NV, query, supervision.label_N, coord_ids)
    return ObjectiveContext(supervision, query, scores, counts)
