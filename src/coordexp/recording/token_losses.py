"""What each token of a packed row cost, for the records of single samples: read off what the loss needs anyway."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors
from coordexp.records import NUM_BINS, PackedRow


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """One segment: loss in nats at positions of its target, ascending.

    A text token's is its cross-entropy over the vocabulary. A coordinate's is −log of the probability of its target's
    nearest bin among the 1000 bins, whatever distance the objective measures, so that tokens can be compared.
    """

    position_P: tuple[int, ...]
    loss_P: tuple[float, ...]


def token_losses(
    row: PackedRow, supervision: SupervisionTensors, query: HeadQuery, scores: HeadScores
) -> list[TokenLosses]:
    """Per segment of ``row``. Positions that nobody scored are not there."""
    with torch.no_grad():
        parts = [_text_losses(supervision, query, scores), _coord_losses(supervision, query, scores)]
        position_P = torch.cat([position for position, _ in parts]).tolist()
        loss_P = torch.cat([loss.double() for _, loss in parts]).tolist()
    # Of a coordinate that both score (stage 1 without a coordinate loss), the distance among bins stands last and wins.
    at = dict(zip(position_P, loss_P, strict=True))
    losses = []
    for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
        first = start + len(segment.prompt_token_ids)
        inside = sorted(position for position in at if first <= position < end)
        losses.append(TokenLosses(tuple(p - first for p in inside), tuple(round(at[p], 4) for p in inside)))
    return losses


def _text_losses(
    supervision: SupervisionTensors, query: HeadQuery, scores: HeadScores
) -> tuple[torch.Tensor, torch.Tensor]:
    if 1.0 not in query.temperatures:
        return supervision.position_N[:0], scores.label_logit_U[:0]
    lse_U = scores.vocab_lse_TU[query.temperatures.index(1.0)]
    return supervision.position_N[query.vocab_in_N_U], lse_U - scores.label_logit_U


def _coord_losses(
    supervision: SupervisionTensors, query: HeadQuery, scores: HeadScores
) -> tuple[torch.Tensor, torch.Tensor]:
    if not len(query.slot_in_N_K):
        return supervision.position_N[:0], scores.label_logit_U[:0]
    bin_K1 = supervision.coord_bin_K.round().long().clamp(0, NUM_BINS - 1)[:, None]
    log_p_KB = scores.coord_logit_KB.log_softmax(dim=-1)
    return supervision.position_N[query.slot_in_N_K], -log_p_KB.gather(1, bin_K1)[:, 0]
