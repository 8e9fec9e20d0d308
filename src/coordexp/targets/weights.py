"""Which tokens each loss term is trained on, and with which weight. The only place that decides it.

A :class:`TrainingTarget` carries one float32 array per term of :data:`TERMS`. The positions of a term are those with a
non-zero weight; its denominator is their number in the whole optimizer step, over all ranks (:func:`count_terms`).
Objective modules only multiply their per-position values by these weights. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from coordexp.config.objective import Channel, ModuleSpec, PipelineConfig, TokenCEConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.records import SupervisionContext, TrainingTarget
from coordexp.records import TokenRole as R

TERMS = (
    "struct_ce",  # cross-entropy of structure: keys, quotes, brackets, separators, closing brace, EOS
    "desc_ce",  # cross-entropy of descriptions
    "coord_token_ce",  # cross-entropy of coordinate tokens as ordinary tokens: stage 1 without a coordinate loss
    "coord",  # coordinate slots: coord_reg and coord_diag
    "text_gate",  # text slots where mass on coordinate tokens is penalised
    "box",  # the first coordinate of each box: bbox_geo
)


@dataclass(frozen=True, slots=True)
class SupervisionWeights:
    """Token weights of one pipeline and channel. 0 leaves the tokens out of sums and denominators.

    ``struct_ce``: structure that the target writes. ``matched_struct_ce``: structure of matched objects in the model's
    own prefix. ``desc_ce``: descriptions in answers written from ground truth, and of matched objects in rewritten
    answers. ``rollout_fn_desc_ce``: descriptions of missed objects in targets of rollouts. ``coord_token_ce``:
    coordinate tokens as ordinary tokens.
    """

    struct_ce: float = 1.0
    desc_ce: float = 1.0
    rollout_fn_desc_ce: float = 0.0
    matched_struct_ce: float = 0.0
    coord_token_ce: float = 0.0

    @classmethod
    def from_pipeline(
        cls, config: PipelineConfig, channel: Channel = "B", *, with_matched_prefix: bool = False
    ) -> SupervisionWeights:
        """Weights of the modules that are active in ``channel``.

        ``with_matched_prefix``: ``struct_ce_weight`` also applies to matched objects in the model's own prefix
        (Channel-B of two-channel training).
        """
        for spec in config.objective:
            if is_active(spec, channel) and isinstance(spec.config, TokenCEConfig):
                keys = spec.config
                return cls(
                    struct_ce=keys.struct_ce_weight,
                    desc_ce=keys.desc_ce_weight,
                    rollout_fn_desc_ce=keys.rollout_fn_desc_weight,
                    matched_struct_ce=keys.struct_ce_weight if with_matched_prefix else 0.0,
                )
        return cls(struct_ce=0.0, desc_ce=0.0)

    @classmethod
    def for_sft(cls, coord_loss: CoordSoftCEW1Config | None) -> SupervisionWeights:
        """Stage 1: coordinates are ordinary tokens unless ``custom.coord_soft_ce_w1`` trains them."""
        return cls(coord_token_ce=0.0 if coord_loss is not None and coord_loss.enabled else 1.0)


def is_active(spec: ModuleSpec, channel: Channel) -> bool:
    """Whether a declared module runs in ``channel``."""
    return spec.enabled and spec.weight > 0 and channel in spec.channels


def weigh_tokens(
    roles_T: np.ndarray,
    box_pos_M4: np.ndarray,
    context: SupervisionContext,
    weights: SupervisionWeights,
    softness_T: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Weights of every term that has any: (T,) float32 each.

    ``softness_T`` in (0, 1] lowers the cross-entropy of soft objects' text; None is 1 everywhere.
    """
    weights_T: dict[str, np.ndarray] = {}
    for term, of_role in _weight_by_role(context, weights).items():
        weight_T = of_role[roles_T]
        if softness_T is not None and term.endswith("_ce"):
            weight_T *= softness_T.astype(np.float32)
        if weight_T.any():
            weights_T[term] = weight_T
    if len(box_pos_M4):
        weights_T["box"] = np.zeros(len(roles_T), dtype=np.float32)
        weights_T["box"][box_pos_M4[:, 0]] = 1.0
    return weights_T


@lru_cache
def _weight_by_role(context: SupervisionContext, weights: SupervisionWeights) -> dict[str, np.ndarray]:
    w = weights
    tail_desc = w.desc_ce if context == "gt" else w.rollout_fn_desc_ce
    table = {
        "struct_ce": {
            **dict.fromkeys((R.GT_STRUCT, R.CLOSE, R.EOS, R.REWRITTEN_STRUCT), w.struct_ce),
            R.MATCHED_STRUCT: w.matched_struct_ce,
        },
        "desc_ce": {R.GT_DESC: tail_desc, R.REWRITTEN_DESC: w.desc_ce},
        "coord_token_ce": {R.GT_COORD: w.coord_token_ce},
        "coord": {R.MATCHED_COORD: 1.0, R.GT_COORD: 1.0},
        "text_gate": {  # the model's own structure and descriptions count where they are trained
            **dict.fromkeys((R.GT_STRUCT, R.CLOSE, R.EOS, R.REWRITTEN_STRUCT), 1.0),
            R.MATCHED_STRUCT: float(w.matched_struct_ce > 0),
            R.GT_DESC: float(tail_desc > 0),
            R.REWRITTEN_DESC: float(w.desc_ce > 0),
        },
    }
    return {term: np.array([by_role.get(role, 0.0) for role in R], dtype=np.float32) for term, by_role in table.items()}


def count_terms(targets: Iterable[TrainingTarget]) -> dict[str, int]:
    """Positions of each term in these targets, in the order of :data:`TERMS`: the denominators, once summed over the
    step and over ranks."""
    totals: dict[str, int] = dict.fromkeys(TERMS, 0)
    for target in targets:
        for term, weight_T in target.weights.items():
            totals[term] += int(np.count_nonzero(weight_T))
    return totals
