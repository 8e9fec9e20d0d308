"""Tensors on their way from main memory to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def join(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``parts`` along their first axis, in ``dtype``: joined and converted in one pass over memory."""
    joined = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=dtype)
    return torch.cat(list(parts), out=joined)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, from which a GPU copies without blocking the host."""
    # Page-locked memory of zero bytes is a null pointer, which torch does not count as pinned.
    return tensor.pin_memory() if tensor.numel() else tensor


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``; to a GPU by way of page-locked memory, without blocking."""
    return pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
