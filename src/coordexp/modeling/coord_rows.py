"""Initial embedding rows for the 1000 coordinate tokens."""

from __future__ import annotations

import math

import torch

from coordexp.records import NUM_BINS


def smooth_coord_rows(hidden: int, std: float, generator: torch.Generator) -> torch.Tensor:
    """Rows in which neighbouring bins are neighbours: random cosines of the bin, half a cycle to 60 cycles long.

    An untrained softmax over such rows is already unimodal-friendly: raising one bin raises those beside it.
    Independent random rows make a model learn the number line token by token.

    Returns: (1000, hidden) float32 with standard deviation close to ``std``.
    """
    log_low, log_high = math.log(0.5), math.log(60.0)
    cycles_H = torch.exp(log_low + (log_high - log_low) * torch.rand(hidden, generator=generator))
    phase_H = 2 * math.pi * torch.rand(hidden, generator=generator)
    position_B1 = torch.arange(NUM_BINS, dtype=torch.float32)[:, None] / (NUM_BINS - 1)
    return std * math.sqrt(2) * torch.cos(2 * math.pi * cycles_H * position_B1 + phase_H)
