"""Parts of the training process that rollout backends use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.coords import CoordVocab
from coordexp.data.preparation import NO_RESIZE, ImagePreparation
from coordexp.rollouts.backend import WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class TrainerParts:
    """``model``: the bare model, no DDP wrapper. ``checkpoint``: a plain folder with the configuration, tokenizer and
    processor for an engine. ``open_image``: opens and prepares an image (``preparation`` is a part of that), for
    engines that open images themselves. ``offload``: inside its context, the trainer's state is off the device, which
    a colocated engine then uses.
    """

    model: Any
    vocab: CoordVocab
    image_token_id: int
    weights: WeightSource
    checkpoint: Path
    open_image: Callable[[Path], Any]
    offload: Callable[[], AbstractContextManager[None]] = nullcontext
    preparation: ImagePreparation = NO_RESIZE
