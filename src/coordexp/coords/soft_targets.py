"""Unimodal target distributions over coordinate bins."""

from __future__ import annotations

import numpy as np

from coordexp.records import NUM_BINS


def gaussian_targets(centers_K: np.ndarray, sigma: float, truncate: float | None = None) -> np.ndarray:
    """Gaussians over the 1000 bins, one row per center.

    ``q_k ∝ exp(−½ ((k − t)/σ)²)``, zero where ``|k − t| > truncate`` if given, each row normalised, so that rows at
    the edges renormalise over the bins that exist. Centers may be fractional (transport targets).

    Args:
        centers_K: (K,) target bins. sigma: width in bins, > 0. truncate: radius in bins, ≥ 0.5 for fractional centers.

    Returns: (K, 1000) float64.
    """
    distance_KB = np.arange(NUM_BINS, dtype=np.float64)[None, :] - np.asarray(centers_K, dtype=np.float64)[:, None]
    q_KB = np.exp(-0.5 * (distance_KB / sigma) ** 2)
    if truncate is not None:
        # The nearest bin always stays: a fractional center must not lose its whole row to a small radius.
        nearest_K1 = np.abs(distance_KB).min(axis=1, keepdims=True)
        q_KB[np.abs(distance_KB) > np.maximum(truncate, nearest_K1)] = 0.0
    return q_KB / q_KB.sum(axis=1, keepdims=True)
