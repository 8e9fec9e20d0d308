"""Entropic optimal transport between the vertices of two shapes: which GT point each predicted point should move to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

TransportCost = Literal["l1", "l2"]

# exp(±200) is far inside a double's range, and so are sums and products of two such numbers. In units of epsilon: with
# the default of 10 bins no two shapes on the canvas spread further than 142.
_MAX_SPREAD = 200.0
_WELL_OVERLAPPING = 0.5  # centres within half the distance at which boxes touch: no plan collapses there
_POINTS_AT_ONCE = 128  # a block-diagonal kernel of more points costs more than the calls it saves


def barycentric_targets(
    pred_points: ArrayLike,
    gt_points: ArrayLike,
    cost: TransportCost = "l2",
    epsilon: float = 10.0,
    iters: int = 30,
) -> np.ndarray:
    """A target for every predicted point: the mean of the GT points under its row of the transport plan.

    The plan is that of Sinkhorn iterations in log space with uniform marginals; no kernel value is ever clamped. The
    distance between disjoint shapes is (nearly, for L1 exactly) a sum of a term per predicted point and a term per GT
    point. Then every plan costs the same, and the entropic one would send all points to the GT centroid. For the plan
    alone, shapes are therefore brought together by their centroids: wholly if their bounding boxes share no area, not
    at all if these overlap well, and in proportion between, so that the targets are continuous in both shapes.

    Args:
        pred_points: (N, 2) points in norm1000. gt_points: (M, 2).
        cost: distance between points, "l2" or "l1", in norm1000 units.
        epsilon: regularisation in norm1000 units, > 0. iters: number of Sinkhorn sweeps, >= 1. A run passes
            ``rollout_matching.ot_*``, with the same defaults.

    Returns: (N, 2) float64 in norm1000.

    Raises:
        ValueError: an argument outside these bounds.
    """
    return barycentric_targets_of([(pred_points, gt_points)], cost, epsilon, iters)[0]


def barycentric_targets_of(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], cost: TransportCost, epsilon: float, iters: int
) -> list[np.ndarray]:
    """:func:`barycentric_targets` of many (pred_points, gt_points), each on its own, in fewer and larger steps."""
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive number, got {epsilon}")
    if iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    shapes = [tuple(np.asarray(points, dtype=np.float64) for points in pair) for pair in pairs]
    for shape in shapes:
        for name, points_N2 in zip(("pred_points", "gt_points"), shape, strict=True):
            if points_N2.ndim != 2 or points_N2.shape[1] != 2 or not points_N2.size or not np.isfinite(points_N2).all():
                raise ValueError(f"{name}: expected finite numbers (N, 2), N >= 1; got shape {points_N2.shape}")
    plans = _log_sinkhorn_of([_plan_cost(pred_N2, gt_M2, cost) / epsilon for pred_N2, gt_M2 in shapes], iters)
    targets = []
    for (_, gt_M2), log_plan_NM in zip(shapes, plans, strict=True):
        weights_NM = np.exp(log_plan_NM - log_plan_NM.max(axis=1, keepdims=True))
        targets.append(weights_NM @ gt_M2 / weights_NM.sum(axis=1, keepdims=True))
    return targets


def _plan_cost(pred_N2: np.ndarray, gt_M2: np.ndarray, cost: TransportCost) -> np.ndarray:
    """Cost of moving each point to each, (N, M); shapes that are far apart are brought together first."""
    p_low, p_high, g_low, g_high = pred_N2.min(axis=0), pred_N2.max(axis=0), gt_M2.min(axis=0), gt_M2.max(axis=0)
    touching = ((p_high - p_low) + (g_high - g_low)) / 2  # distance of the centres at which the boxes touch
    distance = np.abs((p_low + p_high) - (g_low + g_high)) / 2
    # Along the worse axis: 0 concentric, 1 touching, more with a gap. Use an extent of at least one bin: less would
    # make the targets jump for shapes without extent along an axis.
    apartness = float((distance / np.maximum(touching, 1.0)).max())
    share = min(max((apartness - _WELL_OVERLAPPING) / (1 - _WELL_OVERLAPPING), 0.0), 1.0)
    if share > 0:
        pred_N2 = pred_N2 + share * (gt_M2.mean(axis=0) - pred_N2.mean(axis=0))
    offset_NM2 = pred_N2[:, None, :] - gt_M2[None, :, :]
    if cost == "l2":
        return np.sqrt((offset_NM2**2).sum(axis=-1))
    if cost == "l1":
        return np.abs(offset_NM2).sum(axis=-1)
    raise ValueError(f"cost must be 'l1' or 'l2', got {cost!r}")


def _log_sinkhorn_of(scaled_costs: Sequence[np.ndarray], iters: int) -> list[np.ndarray]:
    """Logarithm of each plan after ``iters`` alternating row and column scalings to uniform marginals.

    The potentials never spread further than the costs do. While no exponential of them can leave the range of a double,
    the same sweeps are cheaper in multiplicative form; otherwise they would vanish, and need logarithms.
    """
    plans: dict[int, np.ndarray] = {}
    batches: list[list[int]] = []  # of at most _POINTS_AT_ONCE points together, or of one problem
    num_points = _POINTS_AT_ONCE
    for k, scaled_cost_NM in enumerate(scaled_costs):
        if scaled_cost_NM.max() - scaled_cost_NM.min() > _MAX_SPREAD:
            n, m = scaled_cost_NM.shape
            u_N1, v_1M = np.zeros((n, 1)), np.zeros((1, m))
            for _ in range(iters):
                u_N1 = -np.log(n) - _logsumexp(v_1M - scaled_cost_NM, axis=1)
                v_1M = -np.log(m) - _logsumexp(u_N1 - scaled_cost_NM, axis=0)
            plans[k] = u_N1 + v_1M - scaled_cost_NM
            continue
        if num_points + max(scaled_cost_NM.shape) > _POINTS_AT_ONCE:
            batches.append([])
            num_points = 0
        batches[-1].append(k)
        num_points += max(scaled_cost_NM.shape)
    for batch in batches:
        found = _multiplicative_plans([scaled_costs[k] - scaled_costs[k].min() for k in batch], iters)
        plans.update(zip(batch, found, strict=True))
    return [plans[k] for k in range(len(scaled_costs))]


def _multiplicative_plans(costs: Sequence[np.ndarray], iters: int) -> list[np.ndarray]:
    """Log plans of independent problems, solved as one with a block-diagonal kernel: nothing flows between blocks."""
    ends_n, ends_m = np.cumsum([cost_NM.shape for cost_NM in costs], axis=0).T.tolist()
    blocks = [(slice(end_n - cost_NM.shape[0], end_n), slice(end_m - cost_NM.shape[1], end_m))
              for cost_NM, end_n, end_m in zip(costs, ends_n, ends_m, strict=True)]  # fmt: skip
    kernel_NM, a_N, b_M = np.zeros((ends_n[-1], ends_m[-1])), np.empty(ends_n[-1]), np.empty(ends_m[-1])
    for cost_NM, (rows, columns) in zip(costs, blocks, strict=True):
        kernel_NM[rows, columns] = np.exp(-cost_NM)
        a_N[rows], b_M[columns] = 1 / cost_NM.shape[0], 1 / cost_NM.shape[1]
    kernel_MN = np.ascontiguousarray(kernel_NM.T)
    u_N, v_M = np.ones(ends_n[-1]), np.ones(ends_m[-1])
    for _ in range(iters):
        u_N = a_N / (kernel_NM @ v_M)
        v_M = b_M / (kernel_MN @ u_N)
    log_u_N, log_v_M = np.log(u_N), np.log(v_M)
    return [log_u_N[rows, None] + log_v_M[columns] - cost_NM
            for cost_NM, (rows, columns) in zip(costs, blocks, strict=True)]  # fmt: skip


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    peak = x.max(axis=axis, keepdims=True)
    return peak + np.log(np.exp(x - peak).sum(axis=axis, keepdims=True))
