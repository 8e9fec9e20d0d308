"""Which annotated point each predicted point should move to: entropic optimal transport between the vertices of two
shapes, and barycentric projection. Torch-free.

There are two plans. Without an epsilon (the default) the blur is relative to the annotated shape, so that a shape is
its own target at every size, and predicted points beyond the corners of the annotation go to its outline. With an
epsilon in bins the plan is that of upstream: the blur is the same for every shape, and shrinks those that are not much
larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

TransportCost = Literal["l1", "l2"]
Pair = tuple[np.ndarray, np.ndarray]  # predicted points (N, 2), annotated points (M, 2)
Point = tuple[float, float]

# Without an epsilon: the last blur, as a share of the smallest distance between two annotated vertices. Neighbours mix
# by exp(-10) then. Vertices nearer than a bin count as one bin apart: nothing on the canvas is finer.
_LAST_BLUR = 0.1
_NEEDED = 0.5  # bins; a vertex is a corner if the outline without it would be further away than whole bins can say
_LEVELS = 6  # of the blur, from the size of the shape to the last one, in equal ratios
_PAIRS_AT_ONCE = 16
_TINY = 1e-300  # instead of dividing by 0, which only padding and plans of very few sweeps do

# With an epsilon. exp(±200) is far inside a double's range, and so are sums and products of two such numbers. In units
# of epsilon: with 10 bins no two shapes on the canvas spread further than 142.
_MAX_SPREAD = 200.0
_WELL_OVERLAPPING = 0.5  # centres within half the distance at which boxes touch: no plan collapses there
_POINTS_AT_ONCE = 128  # a block-diagonal kernel of more points costs more than the calls it saves


def barycentric_targets(
    pred_points: ArrayLike,
    gt_points: ArrayLike,
    cost: TransportCost = "l2",
    epsilon: float | None = None,
    iters: int = 30,
) -> np.ndarray:
    """A target for every predicted point: the mean of the GT points under its row of the transport plan.

    ``epsilon: None``: the blur starts at the size of the GT shape and falls to a tenth of the distance of its nearest
    vertices; each predicted point gets a GT vertex of its own. A prediction with more points than the GT has corners
    needs no plan: each corner takes the point that :func:`_on_outline` gives it, and all other points go to the nearest
    place of the GT's outline, so that a right shape with further vertices on its edges stays as it is. If the predicted
    shape is nearer to the GT after it was stretched onto its bounding box, all this is done with the stretched shape: a
    moved or scaled copy gets exactly its original's vertices. The order and direction of vertices do not matter, and
    equal points have equal targets.

    A number is a blur in norm1000 units, the same for every shape, with uniform marginals. The distance between
    disjoint shapes is (nearly, for L1 exactly) a sum of a term per predicted point and a term per GT point. Then every
    plan costs the same, and the entropic one would send all points to the GT centroid. For the plan alone, shapes are
    therefore brought together by their centroids: wholly if their bounding boxes share no area, not at all if these
    overlap well, and in proportion between, so that the targets are continuous in both shapes.

    Args:
        pred_points: (N, 2) points in norm1000. gt_points: (M, 2).
        cost: distance between points, "l2" or "l1", in norm1000 units.
        epsilon: regularisation in norm1000 units, > 0, or None: relative to the GT shape.
        iters: number of Sinkhorn sweeps, >= 1. A run passes ``rollout_matching.ot_*``, with the same defaults.

    Returns: (N, 2) float64 in norm1000.

    Raises:
        ValueError: an argument outside these bounds.
    """
    return barycentric_targets_of([(pred_points, gt_points)], cost, epsilon, iters)[0]


def barycentric_targets_of(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], cost: TransportCost, epsilon: float | None, iters: int
) -> list[np.ndarray]:
    """:func:`barycentric_targets` of many (pred_points, gt_points), each on its own, in fewer and larger steps."""
    if epsilon is not None and not (np.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive number or None, got {epsilon}")
    if iters < 1:
        raise ValueError(f"iters must be at least 1, got {iters}")
    shapes: list[Pair] = []
    for pair in pairs:
        pred_N2, gt_M2 = (np.asarray(points, dtype=np.float64) for points in pair)
        for name, points_N2 in (("pred_points", pred_N2), ("gt_points", gt_M2)):
            if points_N2.ndim != 2 or points_N2.shape[1] != 2 or not points_N2.size or not np.isfinite(points_N2).all():
                raise ValueError(f"{name}: expected finite numbers (N, 2), N >= 1; got shape {points_N2.shape}")
        shapes.append((pred_N2, gt_M2))
    if epsilon is None:
        return _relative_targets(shapes, cost, iters)
    plans = _log_sinkhorn_of([_plan_cost(pred_N2, gt_M2, cost) / epsilon for pred_N2, gt_M2 in shapes], iters)
    targets = []
    for (_, gt_M2), log_plan_NM in zip(shapes, plans, strict=True):
        weights_NM = np.exp(log_plan_NM - log_plan_NM.max(axis=1, keepdims=True))
        targets.append(weights_NM @ gt_M2 / weights_NM.sum(axis=1, keepdims=True))
    return targets


def distances(a_N2: np.ndarray, b_M2: np.ndarray, cost: TransportCost) -> np.ndarray:
    """Distance of each point to each, (N, M). Raises ValueError for an unknown ``cost``."""
    offset_NM2 = a_N2[:, None, :] - b_M2[None, :, :]
    if cost == "l2":
        return np.sqrt((offset_NM2**2).sum(axis=-1))
    if cost == "l1":
        return np.abs(offset_NM2).sum(axis=-1)
    raise ValueError(f"cost must be 'l1' or 'l2', got {cost!r}")


def _relative_targets(shapes: Sequence[Pair], cost: TransportCost, iters: int) -> list[np.ndarray]:
    """Targets without an epsilon. Equal predicted points count once."""
    targets: list[np.ndarray] = [np.empty(0)] * len(shapes)
    index_of: list[list[int]] = []
    placed: list[Pair] = []  # where the plan takes the predicted points to be, and the GT
    planned: list[int] = []
    for k, (pred_N2, gt_M2) in enumerate(shapes):
        points: list[Point] = [(x, y) for x, y in _placed(pred_N2, gt_M2, cost).tolist()]
        once = sorted(set(points))
        at = {point: i for i, point in enumerate(once)}
        index_of.append([at[point] for point in points])
        placed.append((np.array(once), gt_M2))
        ring = _canonical_ring(gt_M2)
        corners = _corners(ring)
        if len(once) > len(corners):
            targets[k] = _on_outline(np.array(once), np.array(ring), np.array(corners), cost)
        else:
            planned.append(k)
    planned.sort(key=lambda k: len(placed[k][1]))
    for first in range(0, len(planned), _PAIRS_AT_ONCE):  # of similar size, because they are padded to the largest
        group = planned[first : first + _PAIRS_AT_ONCE]
        for k, target_U2 in zip(group, _annealed_targets([placed[k] for k in group], cost, iters), strict=True):
            targets[k] = target_U2
    return [target_U2[index] for target_U2, index in zip(targets, index_of, strict=True)]


def _on_outline(points_U2: np.ndarray, ring_M2: np.ndarray, corners_K2: np.ndarray, cost: TransportCost) -> np.ndarray:
    """Targets of more points than there are corners: for each corner a point of its own, by the least sum of distances;
    for every other point the nearest place of the outline."""
    from scipy.optimize import linear_sum_assignment  # takes as long to import as all of this package

    targets_U2 = _nearest_on_ring(points_U2, ring_M2)
    own_K, corner_K = linear_sum_assignment(distances(points_U2, corners_K2, cost))
    targets_U2[own_K] = corners_K2[corner_K]
    return targets_U2


def _canonical_ring(points_M2: np.ndarray) -> list[Point]:
    """The same ring from its smallest vertex on, in the direction of the smaller neighbour, without repetitions."""
    ring: list[Point] = [(x, y) for x, y in points_M2.tolist()]
    ring = [point for point, before in zip(ring, ring[-1:] + ring[:-1], strict=True) if point != before] or ring[:1]
    smallest = min(ring)
    turned = [ring[at:] + ring[:at] for at, point in enumerate(ring) if point == smallest]
    return min([*turned, *(one[:1] + one[:0:-1] for one in turned)])


def _corners(ring: Sequence[Point]) -> list[Point]:
    """The vertices without which the outline is not the same to half a bin (Ramer, Douglas and Peucker), sorted; all of
    them if none is so near the line between its neighbours."""
    closed, near = [*ring, ring[0]], _NEEDED**2
    if all(_away(point, ring[at - 1], closed[at + 1]) > near for at, point in enumerate(ring)):
        return sorted(set(ring))
    x, y = ring[0]
    farthest = max(range(len(ring)), key=lambda at: (ring[at][0] - x) ** 2 + (ring[at][1] - y) ** 2)
    kept, pending = {0, farthest}, [(0, farthest), (farthest, len(ring))]
    while pending:
        first, last = pending.pop()
        between = ((_away(closed[at], closed[first], closed[last]), at) for at in range(first + 1, last))
        away, at = max(between, default=(0.0, 0))
        if away > near:
            kept.add(at)
            pending += [(first, at), (at, last)]
    return sorted({ring[at] for at in kept})


def _away(point: Point, start: Point, end: Point) -> float:
    """Squared distance of ``point`` to the line from ``start`` to ``end``."""
    (ax, ay), (bx, by), (px, py) = start, end, point
    dx, dy, px, py = bx - ax, by - ay, px - ax, py - ay
    share = min(max((px * dx + py * dy) / max(dx * dx + dy * dy, _TINY), 0.0), 1.0)
    return (px - share * dx) ** 2 + (py - share * dy) ** 2


def _nearest_on_ring(points_N2: np.ndarray, ring_M2: np.ndarray) -> np.ndarray:
    """The nearest place of the ring for each point, (N, 2); of equally near ones that on the first edge."""
    edge_M2 = np.concatenate([ring_M2[1:], ring_M2[:1]]) - ring_M2
    length_M = np.maximum((edge_M2**2).sum(axis=1), _TINY)
    share_NM = ((points_N2[:, None] - ring_M2) * edge_M2).sum(axis=2) / length_M
    place_NM2 = ring_M2 + np.clip(share_NM, 0.0, 1.0)[:, :, None] * edge_M2
    away_NM = ((points_N2[:, None] - place_NM2) ** 2).sum(axis=2)
    return place_NM2[np.arange(len(points_N2)), away_NM.argmin(axis=1)]


def _annealed_targets(pairs: Sequence[Pair], cost: TransportCost, iters: int) -> list[np.ndarray]:
    """Targets of P pairs whose blur is relative to the GT shape, padded to N predicted and M GT points; n <= m.

    Every row of the plan has mass 1/n, so that one vertex can take one predicted point. A column's mass is 1/n if both
    shapes have as many vertices, at most that if the GT has more. (Uniform columns would share vertices out: four
    corners on a square of 60 vertices would each get the mean of 15.) A bound on a column's mass is a bound on its
    potential: at most 0.

    Each level starts from the potentials of the one before, in log space, and its few sweeps are multiplicative. The
    last update of a level settles the columns, so no vertex is lost to underflow when the blur falls.
    """
    n_P, m_P = (np.array([len(pair[side]) for pair in pairs])[:, None, None] for side in (0, 1))
    num_pred, num_gt = int(n_P.max()), int(m_P.max())
    cost_PNM, gt_PM2 = np.full((len(pairs), num_pred, num_gt), np.inf), np.zeros((len(pairs), num_gt, 2))
    cost_PNM[:, :, 0] = 0.0  # a padded row needs one finite entry
    first_blur_P, last_blur_P = np.empty((len(pairs), 1, 1)), np.empty((len(pairs), 1, 1))
    for k, (pred_N2, gt_M2) in enumerate(pairs):
        cost_NM = distances(pred_N2, gt_M2, cost)
        cost_PNM[k, : len(pred_N2), : len(gt_M2)] = cost_NM
        gt_PM2[k, : len(gt_M2)] = gt_M2
        last_blur_P[k] = _LAST_BLUR * _least_spacing(gt_M2, cost)
        first_blur_P[k] = max(cost_NM.max() / 4, last_blur_P[k, 0, 0])
    row_mass_PN1 = (np.arange(num_pred)[None, :, None] < n_P) / n_P
    column_mass_PM1 = (np.arange(num_gt)[None, :, None] < m_P) / n_P

    potential_P1M = np.zeros((len(pairs), 1, num_gt))
    kernel_PNM, v_PM1 = cost_PNM, np.ones((len(pairs), num_gt, 1))
    levels = min(_LEVELS, iters)
    for level in range(levels):
        share = level / (levels - 1) if levels > 1 else 1.0
        blur_P = first_blur_P * (last_blur_P / first_blur_P) ** share
        kernel_PNM = (potential_P1M - cost_PNM) / blur_P
        kernel_PNM -= kernel_PNM.max(axis=2, keepdims=True)
        np.exp(kernel_PNM, out=kernel_PNM)
        kernel_PNM *= row_mass_PN1 / kernel_PNM.sum(axis=2, keepdims=True)  # a first update of the rows
        kernel_PMN = kernel_PNM.transpose(0, 2, 1)
        with np.errstate(over="ignore"):
            zero_PM1 = np.exp(-potential_P1M / blur_P).transpose(0, 2, 1)  # the factor of a potential of 0
        upper_PM1 = np.where(m_P > n_P, zero_PM1, np.inf)
        u_PN1 = np.ones((len(pairs), num_pred, 1))
        for sweep in range(iters // levels + (level < iters % levels)):
            if sweep:
                u_PN1 = row_mass_PN1 / np.maximum(kernel_PNM @ v_PM1, _TINY)
            v_PM1 = column_mass_PM1 / np.maximum(kernel_PMN @ u_PN1, _TINY)
            v_PM1 = np.minimum(v_PM1, upper_PM1)
        with np.errstate(divide="ignore"):
            potential_P1M = potential_P1M + blur_P * np.log(v_PM1).transpose(0, 2, 1)
    plan_PNM = kernel_PNM * v_PM1.transpose(0, 2, 1)  # up to a factor for each row
    targets_PN2 = plan_PNM @ gt_PM2 / np.maximum(plan_PNM.sum(axis=2, keepdims=True), _TINY)
    return [targets_PN2[k, : len(pred_N2)] for k, (pred_N2, _) in enumerate(pairs)]


def _placed(pred_N2: np.ndarray, gt_M2: np.ndarray, cost: TransportCost) -> np.ndarray:
    """The predicted points (N, 2) as they are, or stretched onto the GT's bounding box: the shape whose points, and
    whose GT points, have the nearer neighbours. A spike in a good outline must not move the rest of it."""
    p_low, p_high, g_low, g_high = pred_N2.min(axis=0), pred_N2.max(axis=0), gt_M2.min(axis=0), gt_M2.max(axis=0)
    scale_2 = (g_high - g_low) / np.maximum(p_high - p_low, 1.0)
    stretched_N2 = (pred_N2 - (p_low + p_high) / 2) * scale_2 + (g_low + g_high) / 2
    as_it_is_NM, stretched_NM = distances(pred_N2, gt_M2, cost), distances(stretched_N2, gt_M2, cost)
    gaps = [d_NM.min(axis=1).mean() + d_NM.min(axis=0).mean() for d_NM in (as_it_is_NM, stretched_NM)]
    return stretched_N2 if gaps[1] < gaps[0] else pred_N2


def _least_spacing(gt_M2: np.ndarray, cost: TransportCost) -> float:
    """Least distance between two vertices that are at least a bin apart; 1 if there are none."""
    between_MM = distances(gt_M2, gt_M2, cost)
    apart = between_MM[between_MM >= 1]
    return float(apart.min()) if apart.size else 1.0


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
    return distances(pred_N2, gt_M2, cost)


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
