"""The one forward: logits only where something is supervised."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def supervised_logits(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], position_N: torch.Tensor
) -> torch.Tensor:
    """Logits (N, V) that predict the tokens at ``position_N`` of one packed row.

    The token at p is predicted from position p − 1; the language head runs on those N hidden states only. The cache is
    off: with it on, transformers no longer sees the packed segments apart and attention leaks between them.
    """
    return model(**inputs, logits_to_keep=position_N - 1, use_cache=False).logits[0]
