"""The modules that a pipeline may declare: losses on text, on the distribution over bins and on decoded boxes, and the
diagnostics.

A module multiplies per-position values by the target's weights (:mod:`coordexp.targets.weights`) and sums over the row;
the pipeline divides by the step's totals. N supervised positions of a row, K coordinate slots, M boxes, B = 1000 bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from coordexp.config.base import default_of
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.objective import coord_math
from coordexp.objective.head import HeadScores, LogitRequest
from coordexp.objective.supervision import SupervisionTensors
from coordexp.records import NUM_BINS

Sums = dict[str, torch.Tensor]
MeansOver = Mapping[str, tuple[str, ...]]  # by name of a loss: the terms whose positions it is a mean over


@dataclass(frozen=True, slots=True)
class TokenCE:
    """``Σ w·CE / N`` over text tokens, in stage 1 without a coordinate loss over coordinate tokens too.

    The three losses share N, so they add up to one mean over all tokens that have a weight.
    """

    means_over: ClassVar[MeansOver] = dict.fromkeys(
        ("struct_ce", "desc_ce", "coord_ce"), ("struct_ce", "desc_ce", "coord_token_ce")
    )

    def required_logits(self) -> LogitRequest:
        return LogitRequest(vocab=frozenset(("struct_ce", "desc_ce", "coord_token_ce")), temperatures=frozenset((1.0,)))

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        ce_N = scores.cross_entropy_N()
        sums = {term: (supervision.weight_N(term) * ce_N).sum() for term in ("struct_ce", "desc_ce")}
        if "coord_token_ce" in supervision.weights:
            sums["coord_ce"] = (supervision.weight_N("coord_token_ce") * ce_N).sum()
        return sums


@dataclass(frozen=True, slots=True)
class CoordReg:
    """Hard CE, soft CE, W1 and the coordinate gate per coordinate slot; the text gate per text slot."""

    coord_ce_weight: float
    soft_ce_weight: float
    w1_weight: float
    coord_gate_weight: float
    text_gate_weight: float
    temperature: float
    target_sigma: float
    target_truncate: float | None

    means_over: ClassVar[MeansOver] = {
        **dict.fromkeys(("coord_ce", "soft_ce", "w1", "coord_gate"), ("coord",)),
        "text_gate": ("text_gate",),
    }

    def required_logits(self) -> LogitRequest:
        gates = self.coord_gate_weight > 0, self.text_gate_weight > 0
        gated = frozenset(term for term, gate in zip(("coord", "text_gate"), gates, strict=True) if gate)
        on_bins = self.coord_ce_weight, self.soft_ce_weight, self.w1_weight, self.coord_gate_weight
        return LogitRequest(
            vocab=gated,
            coord_mass=gated - {"coord"},
            coord_logits=any(weight > 0 for weight in on_bins),
            temperatures=frozenset((self.temperature,)) if any(gates) else frozenset(),
        )

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        sums: Sums = {}
        if scores.coord_logit_KB is not None and len(supervision.coord_in_N_K):
            sums.update(self._coord_sums(supervision, scores, scores.coord_logit_KB))
        if self.text_gate_weight > 0:
            gate_N = coord_math.text_gate(scores.vocab_lse_N[self.temperature], scores.coord_lse_N[self.temperature])
            sums["text_gate"] = self.text_gate_weight * (supervision.weight_N("text_gate") * gate_N).sum()
        return sums

    def _coord_sums(self, supervision: SupervisionTensors, scores: HeadScores, logit_KB: torch.Tensor) -> Sums:
        weight_K = supervision.weight_N("coord")[supervision.coord_in_N_K]
        z_KB = logit_KB / self.temperature
        coord_lse_K = torch.logsumexp(z_KB, dim=-1)
        log_p_KB = z_KB - coord_lse_K[:, None]
        center_K = supervision.coord_bin_K.to(log_p_KB.dtype)
        sums: Sums = {}
        if self.soft_ce_weight > 0 or self.w1_weight > 0:
            q_KB = coord_math.gaussian_targets(center_K, NUM_BINS, self.target_sigma, self.target_truncate)
            if self.soft_ce_weight > 0:
                soft_K = coord_math.soft_cross_entropy(log_p_KB, q_KB)
                sums["soft_ce"] = self.soft_ce_weight * (weight_K * soft_K).sum()
            if self.w1_weight > 0:
                w1_K = coord_math.wasserstein1(log_p_KB.exp(), q_KB)
                sums["w1"] = self.w1_weight * (weight_K * w1_K).sum()
        if self.coord_ce_weight > 0:
            hard_K1 = center_K.round().long()[:, None]
            sums["coord_ce"] = -self.coord_ce_weight * (weight_K * log_p_KB.gather(1, hard_K1)[:, 0]).sum()
        if self.coord_gate_weight > 0:
            vocab_lse_K = scores.vocab_lse_N[self.temperature][supervision.coord_in_N_K]
            gate_K = coord_math.coord_gate(vocab_lse_K, coord_lse_K)
            sums["coord_gate"] = self.coord_gate_weight * (weight_K * gate_K).sum()
        return sums


DECODE: coord_math.DecodeMode = default_of(RolloutMatchingConfig, "coord_decode_mode")


@dataclass(frozen=True, slots=True)
class BBoxGeo:
    """SmoothL1 (β = 1, mean over the four sides) and CIoU on decoded boxes, means over the step's boxes.

    ``decode`` is the run's coordinate decoding, not a key of the module: see :func:`coord_math.decoded_position`.
    Predicted and true boxes are canonicalised the same way for both losses: an inverted box is not free for one.
    """

    smoothl1_weight: float
    ciou_weight: float
    decode: coord_math.DecodeMode = DECODE

    means_over: ClassVar[MeansOver] = {"smoothl1": ("box",), "ciou": ("box",)}

    def required_logits(self) -> LogitRequest:
        return LogitRequest(coord_logits=self.smoothl1_weight > 0 or self.ciou_weight > 0)

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        if scores.coord_logit_KB is None or not len(supervision.box_in_K_M4):
            return {}
        weight_M = supervision.weight_N("box")[supervision.coord_in_N_K[supervision.box_in_K_M4[:, 0]]]
        z_SB = scores.coord_logit_KB[supervision.box_in_K_M4.reshape(-1)]
        decoded_M4 = coord_math.decoded_position(z_SB, self.decode).reshape(-1, 4)
        predicted_M4 = coord_math.canonical_boxes(decoded_M4)
        true_M4 = coord_math.canonical_boxes(supervision.box_bin_M4.to(decoded_M4.dtype) / (NUM_BINS - 1))
        sums: Sums = {}
        if self.smoothl1_weight > 0:
            per_side_M4 = F.smooth_l1_loss(predicted_M4, true_M4, beta=1.0, reduction="none")
            sums["smoothl1"] = self.smoothl1_weight * (weight_M * per_side_M4.mean(dim=1)).sum()
        if self.ciou_weight > 0:
            sums["ciou"] = self.ciou_weight * (weight_M * coord_math.ciou_loss(predicted_M4, true_M4)).sum()
        return sums


@dataclass(frozen=True, slots=True)
class CoordDiag:
    """Means over the step's coordinate slots.

    ``acc_top5``: target bin among the five likeliest. ``p_target``: mass on the target bin. ``expected_bin_mae``:
    distance of the expectation decode to the target, in bins. ``coord_mass``: probability of any coordinate token.
    """

    means_over: ClassVar[MeansOver] = dict.fromkeys(
        ("acc_top5", "p_target", "expected_bin_mae", "coord_mass"), ("coord",)
    )

    def required_logits(self) -> LogitRequest:
        return LogitRequest(vocab=frozenset(("coord",)), coord_logits=True, temperatures=frozenset((1.0,)))

    @torch.no_grad()
    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        if scores.coord_logit_KB is None or not len(supervision.coord_in_N_K):
            return {}
        z_KB = scores.coord_logit_KB
        p_KB = z_KB.softmax(dim=-1)
        target_K1 = supervision.coord_bin_K.round().long()[:, None]
        expected_K = coord_math.expected_position(p_KB) * (NUM_BINS - 1)
        vocab_lse_K = scores.vocab_lse_N[1.0][supervision.coord_in_N_K]
        return {
            "acc_top5": (p_KB.topk(5, dim=-1).indices == target_K1).any(dim=-1).sum(),
            "p_target": p_KB.gather(1, target_K1).sum(),
            "expected_bin_mae": (expected_K - supervision.coord_bin_K.to(expected_K.dtype)).abs().sum(),
            "coord_mass": torch.exp(-coord_math.coord_gate(vocab_lse_K, z_KB.logsumexp(dim=-1))).sum(),
        }
