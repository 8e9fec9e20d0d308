"""Hungarian assignment of predictions to ground truth, with a mask IoU gate and dummies for misses on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.errors import ConfigError
from coordexp.geometry import Shape, aabbs, mask_iou_pairs
from coordexp.matching.candidates import top_k_candidates
from coordexp.records import Match, MatchResult

# Totals closer than this are the same total: the costs are fractions of pixel counts, this is only their rounding.
_TIE = 1e-12


@dataclass(frozen=True, slots=True)
class MatchingConfig:
    """How predictions find their GT objects.

    Attributes:
        candidate_top_k: GT candidates per prediction that get a mask IoU.
        maskiou_gate: pairs under this mask IoU can never match; a pair exactly at it can.
        maskiou_resolution: side of the virtual canvas in pixels.
        fp_cost, fn_cost: cost of leaving a prediction, or a GT object, alone; a pair costs 1 - IoU. With the defaults
            matching a feasible pair is always cheaper than leaving both alone; below a sum of 1 a pair can be too dear.
    """

    candidate_top_k: int = 10
    maskiou_gate: float = 0.3
    maskiou_resolution: int = 256
    fp_cost: float = 1.0
    fn_cost: float = 1.0

    def __post_init__(self) -> None:
        if self.candidate_top_k < 1:
            raise ConfigError(f"candidate_top_k must be at least 1, got {self.candidate_top_k}")
        if not 0.0 <= self.maskiou_gate <= 1.0:
            raise ConfigError(f"maskiou_gate must lie in 0..1, got {self.maskiou_gate}")
        if self.maskiou_resolution < 2:
            raise ConfigError(f"maskiou_resolution must be at least 2, got {self.maskiou_resolution}")
        for name, cost in (("fp_cost", self.fp_cost), ("fn_cost", self.fn_cost)):
            if not (np.isfinite(cost) and cost >= 0):
                raise ConfigError(f"{name} must be a finite number >= 0, got {cost}")


def match_objects(
    predicted: Sequence[Shape], ground_truth: Sequence[Shape], config: MatchingConfig | None = None
) -> MatchResult:
    """Match predictions to GT objects one to one, by geometry alone.

    Of equally good assignments the one with lower indices wins, the earlier prediction first: no move of a prediction
    and no exchange between two of them would lower an index at the same cost.

    Args:
        predicted, ground_truth: anything with ``.kind`` and ``.bins``. config: defaults to :class:`MatchingConfig`.

    Returns: pairs in order of prediction; every index of either side stands in exactly one of the result's fields.
    """
    config = config or MatchingConfig()
    num_pred, num_gt = len(predicted), len(ground_truth)
    if num_pred == 0 or num_gt == 0:
        return MatchResult((), tuple(range(num_gt)), tuple(range(num_pred)), 0)
    chosen_PK, box_iou_PK = top_k_candidates(aabbs(predicted), aabbs(ground_truth), config.candidate_top_k)
    pred_of_N, gt_of_N = np.repeat(np.arange(num_pred), chosen_PK.shape[1]), chosen_PK.ravel()
    iou_N = mask_iou_pairs(predicted, ground_truth, np.stack([pred_of_N, gt_of_N], axis=1), config.maskiou_resolution)
    feasible_N = iou_N >= config.maskiou_gate
    # Fillers whose boxes do not even touch are no near misses.
    rejections = int((~feasible_N & (box_iou_PK.ravel() > 0)).sum())

    iou_PG = np.full((num_pred, num_gt), -np.inf)
    iou_PG[pred_of_N[feasible_N], gt_of_N[feasible_N]] = iou_N[feasible_N]
    partner_P = _settle_ties(_assign(1.0 - iou_PG, config), 1.0 - iou_PG, config)
    pairs = tuple(
        Match(pred_idx=i, gt_idx=j, iou=float(iou_PG[i, j])) for i, j in enumerate(partner_P.tolist()) if j < num_gt
    )
    found = {pair.gt_idx for pair in pairs}
    return MatchResult(
        pairs=pairs,
        fn_gt_idx=tuple(j for j in range(num_gt) if j not in found),
        fp_pred_idx=tuple(np.flatnonzero(partner_P == num_gt).tolist()),
        num_gate_rejections=rejections,
    )


def _assign(cost_PG: np.ndarray, config: MatchingConfig) -> np.ndarray:
    """GT index of each prediction, or G for "none": (P,) int64, of least total cost. Infeasible pairs cost inf."""
    from scipy.optimize import linear_sum_assignment

    num_pred, num_gt = cost_PG.shape
    size = num_pred + num_gt
    square = np.zeros((size, size))  # dummy with dummy is free
    square[:num_pred, :num_gt] = cost_PG
    square[:num_pred, num_gt:] = config.fp_cost
    square[num_pred:, :num_gt] = config.fn_cost
    _, columns = linear_sum_assignment(square)
    return np.minimum(columns[:num_pred], num_gt)


def _settle_ties(partner_P: np.ndarray, cost_PG: np.ndarray, config: MatchingConfig) -> np.ndarray:
    """Lower indices where they cost nothing: the solver's choice among equal totals is an accident of its search.

    Each change lowers the partner of one prediction and touches no earlier one, so this ends.
    """
    num_pred, num_gt = cost_PG.shape
    partner_P = partner_P.copy()
    # Column G is "no partner". A taken GT object spares its own fn_cost, so moves and exchanges compare directly.
    price_PH = np.concatenate([cost_PG - config.fn_cost, np.full((num_pred, 1), config.fp_cost)], axis=1)
    rows_P, columns_G = np.arange(num_pred), np.arange(num_gt)
    while True:
        own_P = price_PH[rows_P, partner_P]
        free_G = ~np.isin(columns_G, partner_P)
        move_PG = free_G & (columns_G < partner_P[:, None]) & (price_PH[:, :num_gt] <= own_P[:, None] + _TIE)
        exchanged_PP = price_PH[:, partner_P]
        swap_PP = (rows_P[:, None] < rows_P) & (partner_P < partner_P[:, None])
        swap_PP &= exchanged_PP + exchanged_PP.T <= own_P[:, None] + own_P + _TIE
        changeable = np.flatnonzero(move_PG.any(axis=1) | swap_PP.any(axis=1))
        if changeable.size == 0:
            return partner_P
        i = int(changeable[0])
        others = np.flatnonzero(swap_PP[i])
        targets = np.concatenate([np.flatnonzero(move_PG[i]), partner_P[others]])
        target = int(targets.min())
        if target in partner_P:
            partner_P[others[partner_P[others] == target][0]] = partner_P[i]
        partner_P[i] = target
