"""Cross-entropy on text tokens that were written from ground truth: structure, descriptions, closing brace, EOS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coordexp.objective.context import ObjectiveContext, SupervisionCounts
from coordexp.objective.coord_math import fence
from coordexp.records import TokenRole


@dataclass(frozen=True, slots=True)
class TokenCE:
    """``Σ w·CE / N`` with w by role and context, and N the number of tokens with w > 0 in the whole optimizer step.

    The terms share N, so they add up to one mean. ``desc_ce_weight`` weighs descriptions in ground-truth context,
    ``rollout_fn_desc_weight`` those appended behind a rollout. ``with_coords`` counts coordinate tokens in too, as
    ordinary tokens of the vocabulary: stage 1 without a coordinate loss, never a declared pipeline.
    """

    struct_ce_weight: float
    desc_ce_weight: float
    rollout_fn_desc_weight: float
    with_coords: bool = False

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        total = (counts.struct + counts.closure) * (self.struct_ce_weight > 0)
        total += counts.desc_gt * (self.desc_ce_weight > 0) + counts.desc_rollout * (self.rollout_fn_desc_weight > 0)
        total += counts.coords * self.with_coords
        return {"struct_ce": total, "desc_ce": total, "coord_ce": total}

    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        role_N, from_gt_N = ctx.supervision.role_N, ctx.supervision.from_gt_N
        struct_N = (role_N == TokenRole.TAIL_STRUCT) | (role_N == TokenRole.CLOSE) | (role_N == TokenRole.EOS)
        desc_N = role_N == TokenRole.TAIL_DESC
        sums = {
            "struct_ce": self._weighted(ctx, struct_N, self.struct_ce_weight),
            "desc_ce": self._weighted(ctx, desc_N & from_gt_N, self.desc_ce_weight)
            + self._weighted(ctx, desc_N & ~from_gt_N, self.rollout_fn_desc_weight),
        }
        if self.with_coords:
            sums["coord_ce"] = self._weighted(ctx, role_N == TokenRole.TAIL_COORD, 1.0)
        return sums

    @staticmethod
    def _weighted(ctx: ObjectiveContext, mask_N: torch.Tensor, weight: float) -> torch.Tensor:
        if weight == 0.0 or not mask_N.any():
            return ctx.logits_NV.new_zeros((), dtype=torch.float32)
        logits = fence(ctx.logits_NV[mask_N])
        return weight * F.cross_entropy(logits, ctx.supervision.label_N[mask_N], reduction="sum")
