"""Hungarian assignment of predictions to ground truth, with a mask IoU gate and dummies for misses on either side; and
which pairs are worth an expensive mask IoU; and which predictions repeat an earlier one. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coordexp.config.rollout import MatchingConfig
from coordexp.geometry import Shape, aabbs, box_iou, box_iou_pairs, mask_iou_pairs, overlapping_boxes
from coordexp.records import Match, MatchResult


def top_k_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``min(k, G)`` best GT boxes (x1, y1, x2, y2) of each predicted one: indices (P, K) int64, and box IoU (P, K)
    float64.

    Overlapping boxes are first, by IoU and then by index. If fewer than k >= 1 overlap, those with the nearest centres
    follow, by squared distance and then by index.
    """
    iou_PG = box_iou(pred_P4, gt_G4)
    # Twice the centre, so that squared distances stay integers and ties are exact.
    offset_PG2 = (pred_P4[:, None, :2] + pred_P4[:, None, 2:]) - (gt_G4[None, :, :2] + gt_G4[None, :, 2:])
    distance_PG = np.where(iou_PG > 0, 0, (offset_PG2**2).sum(axis=-1))
    order_PG = np.lexsort((distance_PG, -iou_PG), axis=-1)  # stable: equal keys keep index order
    chosen_PK = order_PG[:, :k]
    return chosen_PK, np.take_along_axis(iou_PG, chosen_PK, axis=1)


def overlapping_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The overlapping boxes of :func:`top_k_candidates`: (N,) prediction and (N,) GT indices, by prediction.

    Without overlap the mask IoU is 0, so above a gate of 0 the others could never match. Their number grows with the
    crowd, that of overlaps hardly does.
    """
    pred_N, gt_N = overlapping_boxes(pred_P4, gt_G4)
    if pred_N.size == 0 or np.bincount(pred_N).max() <= k:
        return pred_N, gt_N
    order = np.lexsort((gt_N, -box_iou_pairs(pred_P4[pred_N], gt_G4[gt_N]), pred_N))
    starts_P = np.searchsorted(pred_N, np.arange(len(pred_P4)))  # only the order within a prediction changed
    rank_N = np.arange(len(pred_N)) - starts_P[pred_N]
    chosen = np.sort(order[rank_N < k])
    return pred_N[chosen], gt_N[chosen]


# Totals closer than this are the same total: the costs are fractions of pixel counts, this is only their rounding.
_TIE = 1e-12
_DEFAULT = MatchingConfig()


def match_objects(
    predicted: Sequence[Shape], ground_truth: Sequence[Shape], config: MatchingConfig = _DEFAULT
) -> MatchResult:
    """Match predictions to GT objects one to one, by geometry alone.

    Both sides are anything with ``.kind`` and ``.bins``. Among equally good assignments the one with lower indices
    wins, the earlier prediction first: no move of a prediction and no exchange between two of them would lower an
    index at the same cost.

    Returns: pairs in order of prediction; every index of either side is in exactly one of the result's fields.
    """
    num_pred, num_gt = len(predicted), len(ground_truth)
    if num_pred == 0 or num_gt == 0:
        return MatchResult((), tuple(range(num_gt)), tuple(range(num_pred)), 0)
    pred_P4, gt_G4 = aabbs(predicted), aabbs(ground_truth)
    # Only a gate of 0 admits shapes that do not touch; otherwise those are not candidates, and not gate rejections.
    if config.maskiou_gate > 0:
        pred_of_N, gt_of_N = overlapping_candidates(pred_P4, gt_G4, config.candidate_top_k)
    else:
        chosen_PK, _ = top_k_candidates(pred_P4, gt_G4, config.candidate_top_k)
        pred_of_N, gt_of_N = np.repeat(np.arange(num_pred), chosen_PK.shape[1]), chosen_PK.ravel()
    pairs_N2 = np.stack([pred_of_N, gt_of_N], axis=1)
    iou_N = mask_iou_pairs(predicted, ground_truth, pairs_N2, config.maskiou_resolution, aabbs_of=(pred_P4, gt_G4))
    chosen = assign_pairs(pred_of_N, gt_of_N, iou_N, config)
    chosen_pairs = zip(pred_of_N[chosen].tolist(), gt_of_N[chosen].tolist(), iou_N[chosen].tolist(), strict=True)
    pairs = tuple([Match(pred_idx=i, gt_idx=j, iou=iou) for i, j, iou in sorted(chosen_pairs)])
    free_P, free_G = np.ones(num_pred, dtype=bool), np.ones(num_gt, dtype=bool)
    free_P[pred_of_N[chosen]] = False
    free_G[gt_of_N[chosen]] = False
    return MatchResult(
        pairs=pairs,
        fn_gt_idx=tuple(np.flatnonzero(free_G).tolist()),
        fp_pred_idx=tuple(np.flatnonzero(free_P).tolist()),
        num_gate_rejections=int(np.count_nonzero(iou_N < config.maskiou_gate)),
    )


def assign_pairs(pred_of_N: np.ndarray, gt_of_N: np.ndarray, iou_N: np.ndarray, config: MatchingConfig) -> np.ndarray:
    """The one-to-one assignment among given pairs of known mask IoU: which of them it takes, as indices into them."""
    # A pair's share of the total, compared with leaving both of its objects alone.
    price_N = 1.0 - iou_N - config.fp_cost - config.fn_cost
    usable = np.flatnonzero((iou_N >= config.maskiou_gate) & (price_N <= _TIE))
    pred_F, gt_F = pred_of_N[usable], gt_of_N[usable]
    contested_F = (np.bincount(pred_F)[pred_F] > 1) | (np.bincount(gt_F)[gt_F] > 1)
    contested = usable[contested_F]
    if not contested.size:  # nearly every answer outside of crowds needs no solver
        return usable
    from scipy.optimize import linear_sum_assignment

    pred_E, gt_E, price_E = pred_of_N[contested], gt_of_N[contested], price_N[contested]
    preds, row_E = np.unique(pred_E, return_inverse=True)
    gts, column_E = np.unique(gt_E, return_inverse=True)
    price_PG = np.zeros((len(preds), len(gts)))  # other pairs mean "both alone"
    price_PG[row_E, column_E] = price_E
    rows, columns = linear_sum_assignment(price_PG)
    edges = dict(zip(zip(row_E.tolist(), column_E.tolist(), strict=True), price_E.tolist(), strict=True))
    solved = {i: j for i, j in zip(rows.tolist(), columns.tolist(), strict=True) if (i, j) in edges}
    partner_of = _settle_ties(solved, edges)
    is_chosen_E = np.array([partner_of.get(i) == j for i, j in edges], dtype=bool)
    return np.concatenate([usable[~contested_F], contested[is_chosen_E]])


def _settle_ties(partner_of: dict[int, int], price: dict[tuple[int, int], float]) -> dict[int, int]:
    """Choose lower indices where they cost nothing: the solver's choice among equal totals is arbitrary.

    A prediction takes a lower object that is free, or swaps with a later prediction that has it, if the total stays the
    same. Each change lowers the partner of one prediction and touches no earlier one, so this ends.
    """
    partner_of = dict(partner_of)
    holder_of = {j: i for i, j in partner_of.items()}
    edges = sorted(price)
    restart = True
    while restart:
        restart = False
        for i, j in edges:
            own, other = partner_of.get(i), holder_of.get(j)
            if (own is not None and own <= j) or (other is not None and other < i):
                continue
            change = price[i, j] - (0.0 if own is None else price[i, own])
            if other is not None:
                change += (0.0 if own is None else price.get((other, own), np.inf)) - price[other, j]
            if change > _TIE:
                continue
            for prediction, partner in ((i, j), (other, own)):
                if prediction is not None and partner is not None:
                    partner_of[prediction], holder_of[partner] = partner, prediction
                elif prediction is not None:
                    del partner_of[prediction]
                elif partner is not None:
                    del holder_of[partner]
            restart = True
            break
    return partner_of


DUPLICATE_IOU = 0.5
SAME_TRY_IOU = 0.3  # from which rewriting takes two boxes for attempts at one object
MAX_OVERLAP_OF_OTHERS = 0.2  # mask IoU up to which two predictions count as two objects
_CANVAS = 256  # pixels, independent of a run's matching resolution, so that figures of runs are comparable


class DescribedShape(Shape, Protocol):
    """Anything with ``.desc``, ``.kind`` and ``.bins``."""

    @property
    def desc(self) -> str: ...


def alike_pairs(a: Sequence[DescribedShape], b: Sequence[DescribedShape], least: float) -> np.ndarray:
    """``(K, 2)`` indices into ``a`` and ``b`` of objects with equal description and a mask IoU of at least ``least``,
    in ascending order; if both are the same list, each pair once, the earlier object first."""
    if not a or not b:
        return np.zeros((0, 2), dtype=np.int64)
    a_N4, b_M4 = aabbs(a), aabbs(b)
    pairs_K2 = np.stack(overlapping_boxes(a_N4, b_M4), axis=1)
    if a is b:
        pairs_K2 = pairs_K2[pairs_K2[:, 0] < pairs_K2[:, 1]]
    same_K = np.array([a[i].desc == b[j].desc for i, j in pairs_K2.tolist()], dtype=bool)
    pairs_K2 = pairs_K2[same_K]
    if len(pairs_K2):
        pairs_K2 = pairs_K2[mask_iou_pairs(a, b, pairs_K2, _CANVAS, aabbs_of=(a_N4, b_M4)) >= least]
    return pairs_K2[np.lexsort(pairs_K2.T[::-1])]


def duplicate_indices(objects: Sequence[DescribedShape]) -> list[int]:
    """Indices of the objects that repeat an earlier one: equal description, and mask IoU of at least 0.5."""
    return np.unique(alike_pairs(objects, objects, DUPLICATE_IOU)[:, 1]).tolist()
