"""Entropic optimal transport between the vertices of two shapes: which GT point each predicted point should move to."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

TransportCost = Literal["l1", "l2"]

# exp(±200) is far inside a double's range, and so are sums and products of two such numbers. In units of epsilon: with
# the default of 10 bins no two shapes on the canvas spread further than 142.
_MAX_SPREAD = 200.0


def barycentric_targets(
    pred_points: ArrayLike,
    gt_points: ArrayLike,
    cost: TransportCost = "l2",
    epsilon: float = 10.0,
    iters: int = 30,
) -> np.ndarray:
    """A target for every predicted point: the mean of the GT points under its row of the transport plan.

    The plan comes from Sinkhorn iterations in log space with uniform marginals; no kernel value is ever clamped.
    Shapes whose bounding boxes share no area are first brought together by their centroids, for the plan alone: the
    distance between disjoint shapes is (nearly, for L1 exactly) a sum of a term per predicted point and a term per GT
    point. Then every plan costs the same, and the entropic one would send all points to the GT centroid.

    Args:
        pred_points: (N, 2) points in norm1000. gt_points: (M, 2).
        cost: distance between points, "l2" or "l1", in norm1000 units.
        epsilon: regularisation in norm1000 units, > 0. iters: number of Sinkhorn sweeps, >= 1.

    Returns: (N, 2) float64 in norm1000.

    Raises:
        ValueError: an argument outside these bounds.
    """
    pred_N2, gt_M2 = _as_points(pred_points, "pred_points"), _as_points(gt_points, "gt_points")
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive number, got {epsilon}")
    if iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    from_N2, to_M2 = pred_N2, gt_M2
    if (pred_N2.max(axis=0) <= gt_M2.min(axis=0)).any() or (gt_M2.max(axis=0) <= pred_N2.min(axis=0)).any():
        from_N2, to_M2 = pred_N2 - pred_N2.mean(axis=0), gt_M2 - gt_M2.mean(axis=0)
    log_plan_NM = _log_sinkhorn(_distances(from_N2, to_M2, cost) / epsilon, iters)
    weights_NM = np.exp(log_plan_NM - _logsumexp(log_plan_NM, axis=1))
    return weights_NM @ gt_M2


def _as_points(points: ArrayLike, name: str) -> np.ndarray:
    points_N2 = np.asarray(points, dtype=np.float64)
    if points_N2.ndim != 2 or points_N2.shape[1] != 2 or len(points_N2) == 0 or not np.isfinite(points_N2).all():
        raise ValueError(f"{name} must be a non-empty (N, 2) array of finite numbers, got shape {points_N2.shape}")
    return points_N2


def _distances(a_N2: np.ndarray, b_M2: np.ndarray, cost: TransportCost) -> np.ndarray:
    offset_NM2 = a_N2[:, None, :] - b_M2[None, :, :]
    if cost == "l2":
        return np.sqrt((offset_NM2**2).sum(axis=-1))
    if cost == "l1":
        return np.abs(offset_NM2).sum(axis=-1)
    raise ValueError(f"cost must be 'l1' or 'l2', got {cost!r}")


def _log_sinkhorn(scaled_cost_NM: np.ndarray, iters: int) -> np.ndarray:
    """Logarithm of the plan after ``iters`` alternating row and column scalings to uniform marginals."""
    n, m = scaled_cost_NM.shape
    # The potentials never spread further than the costs do. Where no exponential of them can leave the range of a
    # double, the same sweeps are cheaper in multiplicative form; elsewhere they would vanish, and need logarithms.
    if np.ptp(scaled_cost_NM) <= _MAX_SPREAD:
        kernel_NM = np.exp(scaled_cost_NM.min() - scaled_cost_NM)
        kernel_MN, v_M = np.ascontiguousarray(kernel_NM.T), np.ones(m)
        for _ in range(iters):
            u_N = (1 / n) / (kernel_NM @ v_M)
            v_M = (1 / m) / (kernel_MN @ u_N)
        return np.log(u_N)[:, None] + np.log(v_M) + scaled_cost_NM.min() - scaled_cost_NM
    u_N1, v_1M = np.zeros((n, 1)), np.zeros((1, m))
    for _ in range(iters):
        u_N1 = -np.log(n) - _logsumexp(v_1M - scaled_cost_NM, axis=1)
        v_1M = -np.log(m) - _logsumexp(u_N1 - scaled_cost_NM, axis=0)
    return u_N1 + v_1M - scaled_cost_NM


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    peak = x.max(axis=axis, keepdims=True)
    return peak + np.log(np.exp(x - peak).sum(axis=axis, keepdims=True))
