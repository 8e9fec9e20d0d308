"""Box losses on decoded coordinates. The only module that decodes: a pipeline without it has no decoded-box loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.strict import default_of
from coordexp.objective import coord_math
from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors
from coordexp.objective.query import Wants
from coordexp.records import NUM_BINS

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
