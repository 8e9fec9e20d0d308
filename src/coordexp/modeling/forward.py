"""The forward pass of training: hidden states at supervised positions, inside one call of the wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import transformers

ForwardFunction = Callable[[Any], Any]


class Qwen3VLForConditionalGeneration(transformers.Qwen3VLForConditionalGeneration):
    """Qwen3-VL that can run any function as its forward: ``model(forward_fn=f)`` returns ``f(model)``.

    The chunked loss applies the language head itself. That must happen inside the wrapper's call, in which DDP prepares
    its gradient reducer, FSDP gathers parameters, and autocast and DeepSpeed are active; so it is passed in.

    The class keeps the name of its base, because ``save_pretrained`` writes it as the checkpoint's architecture.
    """

    @wraps(transformers.Qwen3VLForConditionalGeneration.forward)  # generate() reads the signature
    def forward(self, *args: Any, forward_fn: ForwardFunction | None = None, **kwargs: Any) -> Any:
        if forward_fn is not None:
            return forward_fn(self)
        return super().forward(*args, **kwargs)


def supervised_hidden(model: Any, inputs: Mapping[str, Any], position_N: torch.Tensor) -> torch.Tensor:
    """Last hidden states (N, H) that predict the tokens at ``position_N`` of one packed row, of the bare model.

    The token at p is predicted from position p − 1. The cache is off: with it on, transformers no longer sees the
    packed segments apart and attention leaks between them.
    """
    return model.model(**inputs, use_cache=False)[0][0, position_N - 1]
