"""The modules that a pipeline may declare: losses on text, on the distribution over bins and on decoded boxes, and the
diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coordexp.config.base import default_of
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.objective import coord_math
from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors, Wants
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


DECODE: coord_math.DecodeMode = default_of(RolloutMatchingConfig, "coord_decode_mode")


@dataclass(frozen=True, slots=True)
class BBoxGeo:
    """SmoothL1 (β = 1, mean over the four sides) and CIoU on decoded boxes, means over the step's boxes.

    ``decode`` is the run's coordinate decoding, no key of the module: see :func:`coord_math.decoded_position`.
    Predicted and true boxes are canonicalised the same way for both losses: an inverted box is not free for one.
    """

    smoothl1_weight: float
    ciou_weight: float
    decode: coord_math.DecodeMode = DECODE

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        """The step's taught boxes, for both terms."""
        return {"smoothl1": counts.boxes, "ciou": counts.boxes}

    def wants(self, supervision: SupervisionTensors) -> Wants:
        """Coordinate logits, where the row has a box and a term has weight."""
        return Wants(
            coord_logits=(self.smoothl1_weight > 0 or self.ciou_weight > 0) and len(supervision.box_in_K_M4) > 0
        )

    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        """Smooth L1 and CIoU losses, each with its weight, summed over the row's boxes."""
        supervision = ctx.supervision
        if not self.wants(supervision).coord_logits:
            return {}
        z_SB = ctx.slot_logits_KB()[supervision.box_in_K_M4.reshape(-1)]
        decoded_M4 = coord_math.decoded_position(z_SB, self.decode).reshape(-1, 4)
        predicted_M4 = coord_math.canonical_boxes(decoded_M4)
        true_M4 = coord_math.canonical_boxes(supervision.box_bin_M4.to(decoded_M4.dtype) / (NUM_BINS - 1))
        sums: dict[str, torch.Tensor] = {}
        if self.smoothl1_weight > 0:
            per_side = F.smooth_l1_loss(predicted_M4, true_M4, beta=1.0, reduction="none")
            sums["smoothl1"] = self.smoothl1_weight * per_side.mean(dim=1).sum()
        if self.ciou_weight > 0:
            sums["ciou"] = self.ciou_weight * coord_math.ciou_loss(predicted_M4, true_M4).sum()
        return sums


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
