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
    """Per segment of ``row``. Positions that no module scored are left out."""
    in_N, losses = [], []
    with torch.no_grad():
        if 1.0 in scores.vocab_lse_N:
            in_N.append(query.vocab_in_N_U)
            losses.append(scores.cross_entropy_N()[query.vocab_in_N_U])
        # Coordinates that both score (stage 1 without a coordinate loss) keep the later value, that among the bins.
        if scores.coord_logit_KB is not None:
            bin_K1 = supervision.coord_bin_K.round().long().clamp(0, NUM_BINS - 1)[:, None]
            in_N.append(supervision.coord_in_N_K)
            losses.append(-scores.coord_logit_KB.log_softmax(dim=-1).gather(1, bin_K1)[:, 0])
        position_P = supervision.position_N[torch.cat(in_N)].tolist() if in_N else []
        loss_P = torch.cat([loss.double() for loss in losses]).tolist() if losses else []
    at = dict(zip(position_P, loss_P, strict=True))
    found = []
    for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
        first = start + len(segment.prompt_token_ids)
        inside = sorted(position for position in at if first <= position < end)
        found.append(TokenLosses(tuple(p - first for p in inside), tuple(round(at[p], 4) for p in inside)))
    return found
