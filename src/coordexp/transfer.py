"""Tensors on their way from main memory to a device."""

from __future__ import annotations

import torch


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, from which a GPU copies without blocking the host."""
    # Page-locked memory of zero bytes is a null pointer, which torch does not count as pinned.
    return tensor.pin_memory() if tensor.numel() else tensor


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; to a GPU by way of page-locked memory, without blocking."""
    return pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
