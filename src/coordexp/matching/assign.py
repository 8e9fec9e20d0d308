"""Hungarian assignment of predictions to ground truth, with a mask IoU gate and dummies for misses on either side;
which pairs are worth an expensive mask IoU; and objects that an answer names twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coordexp.geometry import Shape, aabbs, box_iou, box_iou_pairs, mask_iou_pairs, overlapping_boxes
from coordexp.records import Match, MatchResult
from coordexp.settings import MatchingConfig


def top_k_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``min(k, G)`` best GT boxes of each predicted box.

    Overlapping boxes come first, by IoU and then by index. Where fewer than k overlap (or none), those with the nearest
    centres fill up, by squared distance and then by index.

    Args:
        pred_P4, gt_G4: boxes as (x1, y1, x2, y2). k: at least 1.

    Returns: candidate indices (P, K) int64, and their box IoU (P, K) float64.
    """
    iou_PG = box_iou(pred_P4, gt_G4)
    # Twice the centre, so that squared distances stay integers and ties are exact.
    offset_PG2 = (pred_P4[:, None, :2] + pred_P4[:, None, 2:]) - (gt_G4[None, :, :2] + gt_G4[None, :, 2:])
    distance_PG = np.where(iou_PG > 0, 0, (offset_PG2**2).sum(axis=-1))
    order_PG = np.lexsort((distance_PG, -iou_PG), axis=-1)  # stable: equal keys keep index order
    chosen_PK = order_PG[:, :k]
    return chosen_PK, np.take_along_axis(iou_PG, chosen_PK, axis=1)


def overlapping_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of :func:`top_k_candidates` whose boxes overlap: (N,) prediction and (N,) GT indices, by prediction.

    Shapes whose boxes do not overlap have mask IoU 0, so above a gate of 0 the others could never match. Their number
    grows with the crowd, that of overlaps hardly does.
    """
    pred_N, gt_N = overlapping_boxes(pred_P4, gt_G4)
    if pred_N.size == 0 or np.bincount(pred_N).max() <= k:
        return pred_N, gt_N
    order = np.lexsort((gt_N, -box_iou_pairs(pred_P4[pred_N], gt_G4[gt_N]), pred_N))
    starts_P = np.searchsorted(pred_N, np.arange(len(pred_P4)))  # the order within a prediction is all that changed
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

    Of equally good assignments the one with lower indices wins, the earlier prediction first: no move of a prediction
    and no exchange between two of them would lower an index at the same cost.

    Args:
        predicted, ground_truth: anything with ``.kind`` and ``.bins``.

    Returns: pairs in order of prediction; every index of either side stands in exactly one of the result's fields.
    """
    num_pred, num_gt = len(predicted), len(ground_truth)
    if num_pred == 0 or num_gt == 0:
        return MatchResult((), tuple(range(num_gt)), tuple(range(num_pred)), 0)
    pred_P4, gt_G4 = aabbs(predicted), aabbs(ground_truth)
    pred_of_N, gt_of_N = _candidates(pred_P4, gt_G4, config)
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
    feasible = np.flatnonzero(iou_N >= config.maskiou_gate)
    return feasible[_best_edges(pred_of_N[feasible], gt_of_N[feasible], 1.0 - iou_N[feasible], config)]


def _candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, config: MatchingConfig) -> tuple[np.ndarray, np.ndarray]:
    """Pairs worth a mask IoU: (N,) prediction and (N,) GT indices.

    Only a gate of 0 admits shapes that do not touch; elsewhere those are no candidates, and no near misses either.
    """
    if config.maskiou_gate > 0:
        return overlapping_candidates(pred_P4, gt_G4, config.candidate_top_k)
    chosen_PK, _ = top_k_candidates(pred_P4, gt_G4, config.candidate_top_k)
    pred_of_N = np.repeat(np.arange(len(pred_P4)), chosen_PK.shape[1])
    return pred_of_N, chosen_PK.ravel()


def _best_edges(pred_of_F: np.ndarray, gt_of_F: np.ndarray, cost_F: np.ndarray, config: MatchingConfig) -> np.ndarray:
    """Which of the feasible pairs form the assignment: indices into them.

    Objects that no chain of feasible pairs connects cannot compete, so each connected part is solved alone. Most parts
    are one pair, or pairs that all share one object: those need no solver. Ties are settled within a part, since no
    change could leave it.
    """
    if cost_F.size == 0:
        return np.zeros(0, dtype=np.int64)
    alone_F = (np.bincount(pred_of_F)[pred_of_F] == 1) & (np.bincount(gt_of_F)[gt_of_F] == 1)
    chosen = [np.flatnonzero(alone_F & (cost_F - config.fn_cost <= config.fp_cost + _TIE))]
    for part in _connected(pred_of_F, gt_of_F, np.flatnonzero(~alone_F)):
        if _is_star(pred_of_F[part]) or _is_star(gt_of_F[part]):
            cheapest = cost_F[part].min()
            if cheapest - config.fn_cost <= config.fp_cost + _TIE:
                tied = part[cost_F[part] <= cheapest + _TIE]
                chosen.append(tied[np.lexsort((gt_of_F[tied], pred_of_F[tied]))][:1])
            continue
        preds, row = np.unique(pred_of_F[part], return_inverse=True)
        gts, column = np.unique(gt_of_F[part], return_inverse=True)
        cost_PG = np.full((len(preds), len(gts)), np.inf)
        cost_PG[row, column] = cost_F[part]
        partner_P = _settle_ties(_assign(cost_PG, config), cost_PG, config)
        chosen.append(part[partner_P[row] == column])
    return np.concatenate(chosen)


def _is_star(objects: np.ndarray) -> bool:
    return bool((objects == objects[0]).all())


def _connected(pred_of_F: np.ndarray, gt_of_F: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """``edges`` (indices of pairs) parted into sets that share no prediction and no GT object."""
    part_of_pred: dict[int, list[int]] = {}
    part_of_gt: dict[int, list[int]] = {}
    for edge, i, j in zip(edges.tolist(), pred_of_F[edges].tolist(), gt_of_F[edges].tolist(), strict=True):
        part = part_of_pred.setdefault(i, [])
        other = part_of_gt.setdefault(j, part)
        if other is not part:  # the smaller joins the larger, so that no edge moves often
            part, other = (part, other) if len(part) >= len(other) else (other, part)
            for moved in other:
                part_of_pred[int(pred_of_F[moved])] = part_of_gt[int(gt_of_F[moved])] = part
            part_of_pred[i] = part_of_gt[j] = part
            part.extend(other)
        part.append(edge)
    return [np.array(sorted(part)) for part in {id(part): part for part in part_of_pred.values()}.values()]


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


DUPLICATE_IOU = 0.5
MAX_OVERLAP_OF_OTHERS = 0.2  # most mask IoU of two objects of which nothing else says that they are two
_CANVAS = 256  # pixels; whatever a run matches by, so that figures of runs compare


class DescribedShape(Shape, Protocol):
    """Anything with ``.desc``, ``.kind`` and ``.bins``."""

    @property
    def desc(self) -> str:
        """What the object is, in the words of the answer."""
        ...


def num_duplicates(objects: Sequence[DescribedShape]) -> int:
    """How many repeat an earlier one: see :func:`duplicate_indices`."""
    return len(duplicate_indices(objects))


def duplicate_indices(objects: Sequence[DescribedShape]) -> list[int]:
    """Which repeat an earlier one, ascending: equal description, and mask IoU of at least 0.5."""
    if len(objects) < 2:
        return []
    box_N4 = aabbs(objects)
    pairs_K2 = np.stack(overlapping_boxes(box_N4, box_N4), axis=1)
    pairs_K2 = pairs_K2[pairs_K2[:, 0] < pairs_K2[:, 1]]
    same_K = np.array([objects[i].desc == objects[j].desc for i, j in pairs_K2.tolist()], dtype=bool)
    pairs_K2 = pairs_K2[same_K]
    if not len(pairs_K2):
        return []
    iou_K = mask_iou_pairs(objects, objects, pairs_K2, _CANVAS, aabbs_of=(box_N4, box_N4))
    return np.unique(pairs_K2[iou_K >= DUPLICATE_IOU, 1]).tolist()
