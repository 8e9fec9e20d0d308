"""Cross-entropy on text: what was written from ground truth, and in Channel-B what a match vouches for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors
from coordexp.objective.query import Wants
from coordexp.records import TokenRole


@dataclass(frozen=True, slots=True)
class TokenCE:
    """``Σ w·s·CE / N`` with w by role and context, s the softness of the token's object (1 but for soft ones), and N
    the number of tokens with w > 0 in the whole optimizer step.

    The terms share N, so they add up to one mean. ``desc_ce_weight`` weighs descriptions in ground-truth context,
    ``rollout_fn_desc_weight`` those appended behind a rollout. ``with_coords`` counts coordinate tokens in too, as
    ordinary tokens of the vocabulary: stage 1 without a coordinate loss, never a declared pipeline.
    ``with_matched_prefix``: ``struct_ce_weight`` also weighs matched objects' own structure in the rollout's prefix
    (Channel-B of two-channel training); without it a prefix's text is never taught. In a rewritten answer, where
    matched objects' text is the annotations', ``struct_ce_weight`` and ``desc_ce_weight`` weigh it always.
    """

    struct_ce_weight: float
    desc_ce_weight: float
    rollout_fn_desc_weight: float
    with_coords: bool = False
    with_matched_prefix: bool = False

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        """One for all terms: every position that some term with weight teaches, so that their weights compare."""
        struct = (
            counts.struct + counts.closure + counts.rewritten_struct + counts.prefix_struct * self.with_matched_prefix
        )
        total = struct * (self.struct_ce_weight > 0)
        desc = counts.desc_gt + counts.rewritten_desc
        total += desc * (self.desc_ce_weight > 0) + counts.desc_rollout * (self.rollout_fn_desc_weight > 0)
        total += counts.coords * self.with_coords
        return {"struct_ce": total, "desc_ce": total, "coord_ce": total}

    def wants(self, supervision: SupervisionTensors) -> Wants:
        """The normaliser over the vocabulary where a text or coordinate label has weight."""
        vocab_N = torch.zeros_like(supervision.from_gt_N)
        for parts in self._parts(supervision.role_N, supervision.from_gt_N).values():
            for mask_N, weight in parts:
                vocab_N |= mask_N & (weight > 0)
        return Wants(vocab_N=vocab_N, temperatures=frozenset({1.0}))

    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        """Cross-entropy by term, times weights and the objects' softness, summed over the row's positions."""
        scored_U = ctx.query.vocab_in_N_U
        parts = self._parts(ctx.supervision.role_N[scored_U], ctx.supervision.from_gt_N[scored_U])
        ce_U = ctx.label_ce_U() * ctx.supervision.text_weight_N[scored_U]
        # Positions that only other modules asked for drop out by their mask: every number here is finite.
        return {
            term: sum((weight * (mask_U * ce_U).sum() for mask_U, weight in masks), ce_U.new_zeros(()))
            for term, masks in parts.items()
        }

    def _parts(self, role: torch.Tensor, from_gt: torch.Tensor) -> dict[str, list[tuple[torch.Tensor, float]]]:
        """Each term's positions, as masks with a weight."""
        struct = (role == TokenRole.TAIL_STRUCT) | (role == TokenRole.CLOSE) | (role == TokenRole.EOS)
        struct = struct | (role == TokenRole.REWRITTEN_STRUCT)
        if self.with_matched_prefix:
            struct = struct | (role == TokenRole.PREFIX_STRUCT)
        desc = role == TokenRole.TAIL_DESC
        annotated = (desc & from_gt) | (role == TokenRole.REWRITTEN_DESC)
        parts = {
            "struct_ce": [(struct, self.struct_ce_weight)],
            "desc_ce": [(annotated, self.desc_ce_weight), (desc & ~from_gt, self.rollout_fn_desc_weight)],
        }
        if self.with_coords:
            parts["coord_ce"] = [(role == TokenRole.TAIL_COORD, 1.0)]
        return parts
