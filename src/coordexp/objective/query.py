"""What modules want of the language head, joined into one query: each number is computed once, and only if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coordexp.objective.context import SupervisionTensors
from coordexp.objective.scores import HeadQuery


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """One module's needs, over a row's N supervised positions.

    ``vocab_N`` mask: logsumexp over the vocabulary, and the label's logit; ``text_gate_N`` mask, within ``vocab_N``:
    logsumexp over the coordinate columns too; ``coord_logits``: the 1000 logits at every coordinate slot;
    ``temperatures`` of the logsumexps.
    """

    vocab_N: torch.Tensor | None = None
    text_gate_N: torch.Tensor | None = None
    coord_logits: bool = False
    temperatures: frozenset[float] = frozenset()


def head_query(supervision: SupervisionTensors, trained: Sequence[Wants], measured: Sequence[Wants] = ()) -> HeadQuery:
    """Join the needs of modules with a loss (``trained``) and of those that only measure.

    Made where the supervision is, on the CPU before the row goes to the device: reading masks there costs a wait.
    """
    num = len(supervision.position_N)
    none_N = torch.zeros(num, dtype=torch.bool, device=supervision.position_N.device)
    trained_N, text_gate_N = _union(trained, "vocab_N", none_N), _union((*trained, *measured), "text_gate_N", none_N)
    measured_N = _union(measured, "vocab_N", none_N) & ~trained_N
    vocab_in_N_U = torch.cat([_positions(trained_N), _positions(measured_N)])
    in_U_N = torch.full((num,), -1, device=none_N.device)
    in_U_N[vocab_in_N_U] = torch.arange(len(vocab_in_N_U), device=none_N.device)
    slot_in_N_K = supervision.coord_in_N_K
    slot_in_U_K = in_U_N[slot_in_N_K]
    coord_logits = any(wants.coord_logits for wants in (*trained, *measured))
    scored_N = trained_N | measured_N
    if coord_logits:
        scored_N[slot_in_N_K] = True
    return HeadQuery(
        vocab_in_N_U=vocab_in_N_U,
        slot_in_U_K=slot_in_U_K if bool((slot_in_U_K >= 0).all()) else slot_in_U_K[:0],
        text_gate_in_U_G=in_U_N[_positions(text_gate_N)],
        slot_in_N_K=slot_in_N_K if coord_logits else slot_in_N_K[:0],
        num_trained=int(trained_N.sum()),
        num_scored=int(scored_N.sum()),
        temperatures=tuple(sorted(set().union(*(wants.temperatures for wants in (*trained, *measured))))),
    )


def _union(all_wants: Sequence[Wants], field: str, none_N: torch.Tensor) -> torch.Tensor:
    mask_N = none_N.clone()
    for wants in all_wants:
        wanted_N = getattr(wants, field)
        if wanted_N is not None:
            mask_N |= wanted_N
    return mask_N


def _positions(mask_N: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(mask_N)[:, 0]
