"""The tiny model with adapters and coordinate offsets that are not zero, as after some training."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from coordexp.config.schema import TunerConfig
from coordexp.modeling.adapter import tune
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.tiny import build_tiny_checkpoint
from coordexp.modeling.trainer_weights import TrainerWeights
from support.tiny_run import SPEC, _session_folder, load_tiny

# Keys of ``tuner``, by what they exercise.
TUNERS: dict[str, dict[str, Any]] = {
    "lora": {"train_coord_rows": False},
    "dora": {"train_coord_rows": False, "use_dora": True},
    "lora and coordinate rows": {},
    "dora, rows and a saved module": {"use_dora": True, "modules_to_save": ["visual.pos_embed"]},
    "coordinate rows alone": {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": True},
}


@lru_cache(maxsize=1)
def untied_checkpoint() -> Path:
    """As ``tiny_checkpoint``, with a language head of its own."""
    return build_tiny_checkpoint(_session_folder() / "untied", seed=4, spec=replace(SPEC, tied=False))


def lora(**keys: Any) -> TunerConfig:
    return TunerConfig(train_type="lora", lora_rank=4, lora_alpha=8, **keys)


def tuned(config: TunerConfig, *, dtype: str = "float32", checkpoint: Path | None = None, seed: int = 7) -> LoadedModel:
    """A model with random trainable weights: zero-initialised ones would hide every mistake."""
    loaded = load_tiny(dtype, checkpoint=checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tune(loaded.model, config, loaded.vocab.coord_token_ids)
    randomise(loaded.model, seed)
    return loaded.model.eval() and loaded


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" in name:
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
        elif parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights that are trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def pushed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole weights as an engine gets them: adapters and offsets merged."""
    with TrainerWeights(model).full() as tensors:
        return {name: tensor.clone() for name, tensor in tensors}
