"""Coordinate supervision on the distribution over bins, at matched prefix slots and tail slots alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordexp.objective import coord_math
from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors
from coordexp.objective.query import Wants
from coordexp.records import NUM_BINS, TokenRole


@dataclass(frozen=True, slots=True)
class CoordReg:
    """Hard CE, soft CE, W1 and the coordinate gate per coordinate slot; the text gate per supervised text slot.

    Coordinate terms are means over the step's coordinate slots, the text gate over its text slots. Text slots are tail
    structure, the closing brace and EOS, and descriptions where their cross-entropy weight (``desc_in_gt`` /
    ``desc_in_rollout``) is positive; the rollout's own text never counts.
    """

    coord_ce_weight: float
    soft_ce_weight: float
    w1_weight: float
    coord_gate_weight: float
    text_gate_weight: float
    temperature: float
    target_sigma: float
    target_truncate: float | None
    desc_in_gt: bool = False
    desc_in_rollout: bool = False

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        """The step's taught coordinates; for ``text_gate`` the text positions that it covers."""
        text = (
            counts.struct
            + counts.closure
            + counts.rewritten_struct
            + (counts.desc_gt + counts.rewritten_desc) * self.desc_in_gt
            + counts.desc_rollout * self.desc_in_rollout
        )
        coords = dict.fromkeys(("coord_ce", "soft_ce", "w1", "coord_gate"), counts.coords)
        return {**coords, "text_gate": text}

    def wants(self, supervision: SupervisionTensors) -> Wants:
        """What the terms with weight need; nothing for the others."""
        gate_N = torch.zeros_like(supervision.from_gt_N)
        if self.coord_gate_weight > 0:
            gate_N[supervision.coord_in_N_K] = True
        text_N = self._text_mask(supervision) if self.text_gate_weight > 0 else torch.zeros_like(gate_N)
        any_gate = self.coord_gate_weight > 0 or self.text_gate_weight > 0
        return Wants(
            vocab_N=gate_N | text_N,
            text_gate_N=text_N,
            coord_logits=any(
                weight > 0
                for weight in (self.coord_ce_weight, self.soft_ce_weight, self.w1_weight, self.coord_gate_weight)
            ),
            temperatures=frozenset({self.temperature}) if any_gate else frozenset(),
        )

    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        """The terms with weight, each times its weight, summed over the row's positions."""
        sums: dict[str, torch.Tensor] = {}
        if len(ctx.supervision.coord_in_N_K) and len(ctx.query.slot_in_N_K):
            sums.update(self._coord_sums(ctx))
        if self.text_gate_weight > 0:
            sums["text_gate"] = (
                self.text_gate_weight * coord_math.text_gate(*ctx.text_gate_lse_G(self.temperature)).sum()
            )
        return sums

    def _coord_sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        z_KB = ctx.slot_logits_KB() / self.temperature
        coord_lse_K = torch.logsumexp(z_KB, dim=-1)
        log_p_KB = z_KB - coord_lse_K[:, None]
        center_K = ctx.supervision.coord_bin_K.to(log_p_KB.dtype)
        sums: dict[str, torch.Tensor] = {}
        if self.soft_ce_weight > 0 or self.w1_weight > 0:
            q_KB = coord_math.gaussian_targets(center_K, NUM_BINS, self.target_sigma, self.target_truncate)
            if self.soft_ce_weight > 0:
                sums["soft_ce"] = self.soft_ce_weight * coord_math.soft_cross_entropy(log_p_KB, q_KB).sum()
            if self.w1_weight > 0:
                sums["w1"] = self.w1_weight * coord_math.wasserstein1(log_p_KB.exp(), q_KB).sum()
        if self.coord_ce_weight > 0:
            hard_K1 = center_K.round().long()[:, None]
            sums["coord_ce"] = -self.coord_ce_weight * log_p_KB.gather(1, hard_K1).sum()
        if self.coord_gate_weight > 0:
            gate_K = coord_math.coord_gate(ctx.slot_vocab_lse_K(self.temperature), coord_lse_K)
            sums["coord_gate"] = self.coord_gate_weight * gate_K.sum()
        return sums

    def _text_mask(self, supervision: SupervisionTensors) -> torch.Tensor:
        role_N, from_gt_N = supervision.role_N, supervision.from_gt_N
        mask_N = (role_N == TokenRole.TAIL_STRUCT) | (role_N == TokenRole.CLOSE) | (role_N == TokenRole.EOS)
        mask_N = mask_N | (role_N == TokenRole.REWRITTEN_STRUCT)
        desc_N = role_N == TokenRole.TAIL_DESC
        if self.desc_in_gt:
            mask_N = mask_N | (desc_N & from_gt_N) | (role_N == TokenRole.REWRITTEN_DESC)
        if self.desc_in_rollout:
            mask_N = mask_N | (desc_N & ~from_gt_N)
        return mask_N
