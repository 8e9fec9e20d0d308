"""Diagnostics of coordinate slots: what the distribution over bins looks like. Never part of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordexp.objective import coord_math
from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors
from coordexp.objective.query import Wants
from coordexp.records import NUM_BINS


@dataclass(frozen=True, slots=True)
class CoordDiag:
    """Sums over coordinate slots; divided by their number they are means.

    ``acc_top5``: target bin among the five likeliest. ``p_target``: mass on the target bin. ``expected_bin_mae``:
    distance of the expectation decode to the target, in bins. ``coord_mass``: probability of any coordinate token.
    """

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        """The step's taught coordinates, for every figure."""
        return dict.fromkeys(("acc_top5", "p_target", "expected_bin_mae", "coord_mass"), counts.coords)

    def wants(self, supervision: SupervisionTensors) -> Wants:
        """Coordinate logits, and the normaliser over the whole vocabulary at each coordinate."""
        slots_N = torch.zeros_like(supervision.from_gt_N)
        slots_N[supervision.coord_in_N_K] = True
        return Wants(vocab_N=slots_N, coord_logits=True, temperatures=frozenset({1.0}))

    @torch.no_grad()
    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        """Sums over the row's coordinates, without gradient."""
        if not len(ctx.supervision.coord_in_N_K):
            return {}
        z_KB = ctx.slot_logits_KB()
        p_KB = z_KB.softmax(dim=-1)
        target_K1 = ctx.supervision.coord_bin_K.round().long()[:, None]
        expected_K = coord_math.expected_position(p_KB) * (NUM_BINS - 1)
        return {
            "acc_top5": (p_KB.topk(5, dim=-1).indices == target_K1).any(dim=-1).sum(),
            "p_target": p_KB.gather(1, target_K1).sum(),
            "expected_bin_mae": (expected_K - ctx.supervision.coord_bin_K.to(expected_K.dtype)).abs().sum(),
            "coord_mass": torch.exp(-coord_math.coord_gate(ctx.slot_vocab_lse_K(), z_KB.logsumexp(dim=-1))).sum(),
        }
