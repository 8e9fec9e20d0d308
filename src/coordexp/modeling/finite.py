"""Whether a model's weights are finite. A model with a NaN computes, answers nothing, and says nothing of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from coordexp.errors import CheckpointError


@torch.no_grad()
def broken_weight(model: torch.nn.Module) -> str | None:
    """The name of the first weight that is NaN or infinite, None without one; if sharded, in this rank's part.

    One pass over memory: a tensor's sum shows both. A sum that overflows is looked at again.
    """
    named: list[tuple[str, torch.Tensor]] = []
    for name, weight in model.named_parameters():
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.numel() and local.is_floating_point() and not local.is_meta:
            named.append((name, local))
    # On a GPU the host waits once, for all of them.
    sums = torch.stack([tensor.sum().float() for _, tensor in named]).tolist() if named else []
    for (name, tensor), total in zip(named, sums, strict=True):
        if not math.isfinite(total):
            least, most = torch.aminmax(tensor)  # NaN in either, if there is one
            if not (torch.isfinite(least) and torch.isfinite(most)):
                return name
    return None


def check_finite(model: torch.nn.Module, folder: Path) -> None:
    """Raise CheckpointError if a weight of ``model``, loaded from ``folder``, is NaN or infinite."""
    name = broken_weight(model)
    if name is not None:
        raise not_finite(folder, name)


def not_finite(folder: Path, name: str) -> CheckpointError:
    """The error for the weight ``name`` of the checkpoint in ``folder``."""
    return CheckpointError(
        f"{folder}: its weight {name} is NaN or infinite, so it computes nothing. Training diverged before it was "
        "saved, or the file was changed: use an earlier checkpoint. Was it loaded as float16, use bfloat16"
    )
