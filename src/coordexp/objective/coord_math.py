"""The arithmetic on coordinate logits, in one place for training and metrics, and which columns of the language head
they are. Everything runs in float32 or wider.

K coordinate slots, B = 1000 bins, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch

LOGIT_LIMIT = 1e4
MAX_COORD_MASS = 1.0 - 1e-6  # caps the text gate at −log(1e-6)


def limit_logits(logits: torch.Tensor) -> torch.Tensor:
    """Widen to float32, replace NaN by 0 and clamp to ±1e4, so that one broken logit cannot erase a step's gradient.

    Training and metrics share this limit.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    finite = torch.nan_to_num(wide, nan=0.0, posinf=LOGIT_LIMIT, neginf=-LOGIT_LIMIT)
    return torch.clamp(finite, -LOGIT_LIMIT, LOGIT_LIMIT)


def coord_gate(logits_full: torch.Tensor, logits_coord: torch.Tensor, temperature: float) -> torch.Tensor:
    """``−log`` of the probability mass on the coordinate tokens, per slot, from the logits of the vocabulary (…, V)
    and of the coordinate tokens (…, B), which are limited first: (…,), finite and at least 0."""
    lse_full, lse_coord = (torch.logsumexp(limit_logits(z) / temperature, dim=-1) for z in (logits_full, logits_coord))
    return coord_gate_of_lse(lse_full, lse_coord)


def coord_gate_of_lse(vocab_lse: torch.Tensor, coord_lse: torch.Tensor) -> torch.Tensor:
    """:func:`coord_gate` from the logsumexps of its limited logits at one temperature; floored at 0 against
    rounding: ``logsumexp(z/τ) − logsumexp(z_coord/τ)``."""
    return (vocab_lse - coord_lse).clamp_min(0.0)


def text_gate_of_lse(vocab_lse: torch.Tensor, coord_lse: torch.Tensor) -> torch.Tensor:
    """``−log(1 − p)`` with p the mass on coordinate tokens at a text slot; p is capped at 1 − 1e-6.

    Arguments as in :func:`coord_gate_of_lse`.
    """
    mass = torch.exp(coord_lse - vocab_lse).clamp_max(MAX_COORD_MASS)
    return -torch.log1p(-mass)


def gaussian_targets(center_K: torch.Tensor, num_bins: int, sigma: float, truncate: float | None) -> torch.Tensor:
    """Unimodal targets over the bins, one Gaussian per slot: ``q_k ∝ exp(−½ ((k − t)/σ)²)``, zero beyond ``truncate``.

    Rows at the edges renormalise over the bins that exist. Centers may be fractional (transport targets); the nearest
    bin always stays, so that a small radius cannot empty a row. (K,) → (K, num_bins), in the dtype of ``center_K``.
    """
    bins_B = torch.arange(num_bins, device=center_K.device, dtype=center_K.dtype)
    distance_KB = (bins_B[None, :] - center_K[:, None]).abs()
    log_q_KB = -0.5 * (distance_KB / sigma) ** 2
    if truncate is not None:
        radius_K1 = distance_KB.min(dim=1, keepdim=True).values.clamp_min(truncate)
        log_q_KB = log_q_KB.masked_fill(distance_KB > radius_K1, -torch.inf)
    # Normalised in log space: a narrow Gaussian between two bins underflows in all of them.
    return log_q_KB.softmax(dim=1)


def soft_cross_entropy(log_p_KB: torch.Tensor, q_KB: torch.Tensor) -> torch.Tensor:
    """``−Σ q log p`` per slot: (K,)."""
    return -(q_KB * log_p_KB).sum(dim=-1)


def wasserstein1(p_KB: torch.Tensor, q_KB: torch.Tensor) -> torch.Tensor:
    """First Wasserstein distance between distributions on bins 0..B−1, in [0, 1]: ``Σ |CDF_p − CDF_q| / (B−1)``."""
    difference_KB = (p_KB - q_KB).cumsum(dim=-1)
    return difference_KB.abs().sum(dim=-1) / (p_KB.shape[-1] - 1)


def expected_position(p_KB: torch.Tensor) -> torch.Tensor:
    """Expectation decode to [0, 1]: ``Σ p_k · k/(B−1)``; (K, B) → (K,)."""
    bins_B = torch.arange(p_KB.shape[-1], device=p_KB.device, dtype=p_KB.dtype)
    return (p_KB * bins_B).sum(dim=-1) / (p_KB.shape[-1] - 1)


def canonical_boxes(boxes_M4: torch.Tensor) -> torch.Tensor:
    """(x1, y1, x2, y2) with x1 ≤ x2, y1 ≤ y2, inside [0, 1]; the same for predictions and truth."""
    first_M2, second_M2 = boxes_M4[:, :2], boxes_M4[:, 2:]
    return torch.cat([torch.minimum(first_M2, second_M2), torch.maximum(first_M2, second_M2)], dim=1).clamp(0.0, 1.0)


def ciou_loss(predicted_M4: torch.Tensor, true_M4: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """1 − CIoU per canonical box (Zheng et al. 2020, complete IoU); the aspect term is differentiated through."""
    p_w, p_h = (predicted_M4[:, 2] - predicted_M4[:, 0]), (predicted_M4[:, 3] - predicted_M4[:, 1])
    t_w, t_h = (true_M4[:, 2] - true_M4[:, 0]), (true_M4[:, 3] - true_M4[:, 1])
    corner_low = torch.maximum(predicted_M4[:, :2], true_M4[:, :2])
    corner_high = torch.minimum(predicted_M4[:, 2:], true_M4[:, 2:])
    o_w, o_h = (corner_high - corner_low).clamp_min(0.0).unbind(dim=1)
    overlap = o_w * o_h  # the gradient of prod() would wait for the device, to look for zeros
    iou = overlap / (p_w * p_h + t_w * t_h - overlap + eps)
    hull = torch.maximum(predicted_M4[:, 2:], true_M4[:, 2:]) - torch.minimum(predicted_M4[:, :2], true_M4[:, :2])
    diagonal = (hull**2).sum(dim=1) + eps
    shift = (predicted_M4[:, :2] + predicted_M4[:, 2:] - true_M4[:, :2] - true_M4[:, 2:]) / 2
    # A point has no aspect: with both sides clamped it counts as square, and its gradient stays finite.
    t_angle = torch.atan(t_w.clamp_min(eps) / t_h.clamp_min(eps))
    p_angle = torch.atan(p_w.clamp_min(eps) / p_h.clamp_min(eps))
    aspect = (4 / torch.pi**2) * (t_angle - p_angle) ** 2
    alpha = aspect / (1 - iou + aspect + eps)
    return 1 - iou + (shift**2).sum(dim=1) / diagonal + alpha * aspect


@dataclass(frozen=True, slots=True, eq=False)
class CoordColumns:
    """The coordinate tokens, by bin, and sorted: a chunk's are then a slice, found without a read from a GPU."""

    ids_B: torch.Tensor
    sorted_ids: tuple[int, ...]
    sorted_ids_B: torch.Tensor
    bin_of_sorted_B: torch.Tensor

    @staticmethod
    @lru_cache(maxsize=8)
    def on(coord_ids: tuple[int, ...], device: torch.device) -> CoordColumns:
        """Cached, because a copy from the host to a GPU blocks."""
        with torch.inference_mode(False):  # the first caller may need no gradient, and later ones do
            order = sorted(range(len(coord_ids)), key=coord_ids.__getitem__)
            in_order = tuple(coord_ids[k] for k in order)
            ids_B, sorted_ids_B, order_B = (
                torch.tensor(values, device=device) for values in (coord_ids, in_order, order)
            )
            return CoordColumns(ids_B, in_order, sorted_ids_B, order_B)

    def within(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinate columns of a chunk, counted from its start, and their bins."""
        low, high = bisect_left(self.sorted_ids, start), bisect_left(self.sorted_ids, stop)
        return self.sorted_ids_B[low:high] - start, self.bin_of_sorted_B[low:high]
