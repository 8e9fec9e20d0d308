"""What the language head is asked about a row, and what it answers.

N supervised positions of a row, U of them scored against the whole vocabulary, K coordinate slots, G text positions of
the text gate; B = 1000 bins, T temperatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True, eq=False)
class HeadQuery:
    """Which numbers of the head the modules want of one row. Whatever nobody wants is not computed.

    ``vocab_in_N_U``: positions scored against the whole vocabulary, those with a gradient (``num_trained``) first;
    ``slot_in_U_K``: the coordinate slots among them, all or none; ``text_gate_in_U_G``: text positions among them
    whose mass on coordinate tokens is wanted; ``slot_in_N_K``: the slots whose 1000 coordinate logits are wanted, all
    or none; ``num_scored``: positions of which anything is computed.
    """

    vocab_in_N_U: torch.Tensor
    slot_in_U_K: torch.Tensor
    text_gate_in_U_G: torch.Tensor
    slot_in_N_K: torch.Tensor
    num_trained: int
    num_scored: int
    temperatures: tuple[float, ...]

    def to(self, device: torch.device) -> HeadQuery:
        """The same on ``device``."""
        return move(self, device)


def move(record: Any, device: torch.device) -> Any:
    """A copy of a dataclass with its tensors on ``device``; what is no tensor stays."""
    return map_tensors(record, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def map_tensors(record: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a dataclass with ``act`` of each of its tensors; what is no tensor stays."""
    mapped = {name: act(value) for name in record.__slots__ if isinstance(value := getattr(record, name), torch.Tensor)}
    return replace(record, **mapped)


@lru_cache(maxsize=8)
def coord_ids_on(coord_ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The coordinate tokens by bin, int64 (B,). Kept: to copy a Python list to a GPU is to wait for it."""
    with torch.inference_mode(False):  # whoever comes first may hold no gradient, and others do
        return torch.tensor(coord_ids, device=device)


class HeadScores(NamedTuple):
    """The head's answers, float32 or wider, finite. A tuple of tensors: DDP and FSDP look into what a forward returns.

    ``vocab_lse_TU`` logsumexp(z/τ) over the vocabulary; ``label_logit_U``; ``coord_lse_TG`` logsumexp(z/τ) over the
    coordinate columns; ``coord_logit_KB``. ``nonfinite_N`` positions with a NaN or infinite logit, ``clamped_N`` those
    whose finite logits passed the limit and were cut off.
    """

    vocab_lse_TU: torch.Tensor
    label_logit_U: torch.Tensor
    coord_lse_TG: torch.Tensor
    coord_logit_KB: torch.Tensor
    nonfinite_N: torch.Tensor
    clamped_N: torch.Tensor
