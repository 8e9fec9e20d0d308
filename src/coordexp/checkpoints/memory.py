"""An estimate of the GPU memory that one trainer process needs, from shapes and configuration alone.

Weights, gradients and the states of AdamW are counted. Other optimizers count as if they had no state, and DeepSpeed as
ZeRO-2, so that a run that fits is not refused. Activations are a formula in the row's length L, the
hidden size H, the intermediate size I and the number of layers, with constants fitted to traced optimizer steps of
Qwen3-VL-2B, 4B and 8B, full and LoRA, which it reproduces within 10 %. Add about 1 GB for CUDA and 5 to 15 % for
fragmentation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.checkpoints.describe import TABLES, weight_shapes
from coordexp.checkpoints.folder import Checkpoint, part_of
from coordexp.config import RunConfig
from coordexp.errors import ConfigError
from coordexp.records import NUM_BINS

# Factors of H and I: bfloat16 numbers per token while one layer's backward pass runs; and, without checkpointing,
# numbers per token and layer kept for it, of which LoRA needs fewer because frozen products do not keep their input.
_RUNNING = (8, 14)
_SAVED = {"full": (10, 5), "lora": (7, 3)}
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_PATCHES_PER_TOKEN = 2  # half of a row's tokens are image tokens, each of four patches


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one trainer process, without a colocated engine. ``exchange``: DDP's buffers, or layers FSDP gathers."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    exchange: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.exchange

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in self.__slots__}
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)
        return f"{self.total / 1e9:.1f} GB for each trainer process" + (f" ({listed})" if listed else "")


def estimate_memory(
    config: RunConfig, model: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], world_size: int = 1
) -> MemoryEstimate:
    """Peak memory of one of ``world_size`` trainer processes.

    ``model``: the checkpoint's ``config.json``; ``shapes``: of its tensors, by name.
    """
    training, tuner = config.training, config.tuner
    if model.get("tie_word_embeddings"):
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    frozen = {part for part in ("vit", "aligner", "llm") if getattr(tuner, f"freeze_{part}")}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    text, vision = model["text_config"], model["vision_config"]
    hidden = int(text["hidden_size"])

    lora = tuner.train_type == "lora"
    stored = 4 if config.model.dtype == "float32" else 2
    masters = training.master_weights is not None
    moments = 2 if training.optim in _ADAMW else 0
    if lora:
        trained = NUM_BINS * hidden if tuner.train_coord_rows else 0
        for name, shape in shapes.items():
            module, _, kind = name.rpartition(".")
            is_linear = kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] not in TABLES
            is_target = "all-linear" in tuner.target_modules or module.endswith(tuple(tuner.target_modules))
            if is_linear and is_target and part_of(name) not in frozen:
                trained += tuner.lora_rank * sum(shape)
        weights, per_gradient, per_state = total * stored + trained * 4, 4, 4 * moments
    else:
        trained = sum(size for name, size in sizes.items() if part_of(name) not in frozen)
        weights = total * stored
        # Master weights sum gradients in float32 in a single process; DDP exchanges them in the weights' own type.
        per_gradient = 4 if stored == 4 or (masters and world_size == 1) else 2
        per_state = 4 + 4 * moments if masters else stored * moments
    if training.bf16 and stored == 4:
        weights += 2 * total  # autocast keeps a bfloat16 copy of each weight

    # Activations of one packed row: the language model, the vision tower, and a chunk of the language head.
    row = 0.0
    towers = (
        (config.global_max_length, hidden, int(text["intermediate_size"]), int(text["num_hidden_layers"])),
        (config.global_max_length * _PATCHES_PER_TOKEN, int(vision["hidden_size"]), int(vision["intermediate_size"]),
         int(vision["depth"])),
    )  # fmt: skip
    for length, h, i, layers in towers:
        if training.gradient_checkpointing or config.fsdp.activation_checkpointing:
            row += 2 * length * h * layers
        else:
            a, b = _SAVED[tuner.train_type]
            row += 2 * length * (a * h + b * i) * layers
    length, h, i, _ = towers[0]
    row += 2 * length * (_RUNNING[0] * h + _RUNNING[1] * i)
    if not lora and "llm" not in frozen:
        row += 2 * int(text["vocab_size"]) * hidden  # gradient of the head, before it is added to the table's

    gradients, optimizer, exchange = trained * per_gradient, trained * per_state, 0.0
    if config.fsdp.enabled:
        # Float32 shards; the layers in use are gathered in bfloat16, the tables as units of their own.
        weights, gradients = total * 4 / world_size, trained * 4 / world_size
        optimizer = trained * 4 * moments / world_size
        layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
        tables = sum(size for name, size in sizes.items() if part_of(name) == "llm" and ".layers." not in name)
        exchange = 2 * (2 * layer + tables)
        if config.fsdp.cpu_offload:
            weights = gradients = optimizer = 0.0
    elif config.deepspeed.enabled:
        gradients, optimizer = gradients / world_size, optimizer / world_size
    elif world_size > 1:
        exchange = float(gradients)
    return MemoryEstimate(weights, gradients, optimizer, row, exchange)


def check_memory(config: RunConfig, world_size: int = 1, gpu_bytes: int | None = None) -> MemoryEstimate:
    """The estimate for ``config.model.model``. ``gpu_bytes``: memory of each GPU; None compares with nothing.

    Raises:
        ConfigError: it exceeds the GPU by more than the estimate's own error of 10 %; says what would fit.
        CheckpointError: ``model.model`` is not a readable checkpoint.
    """
    checkpoint = Checkpoint.open(config.model.model)
    model, shapes = checkpoint.config, weight_shapes(checkpoint)
    estimate = estimate_memory(config, model, shapes, world_size)
    if gpu_bytes is None or 0.9 * estimate.total <= gpu_bytes:
        return estimate
    no_masters = {"training.master_weights": None} if config.training.master_weights is not None else {}
    choices: list[dict[str, Any]] = [
        {"training.gradient_checkpointing": True},
        {"global_max_length": config.global_max_length // 2},
        {"fsdp.enabled": True, **no_masters},
        {"tuner.train_type": "lora", "model.dtype": "bfloat16", "training.gradient_checkpointing": True, **no_masters},
    ]
    fitting = []
    for choice in choices:
        changed = config
        for path, value in choice.items():
            section, _, key = path.partition(".")
            new = getattr(changed, section).model_copy(update={key: value}) if key else value
            changed = changed.model_copy(update={section: new})
        processes = max(8, world_size) if "fsdp.enabled" in choice else world_size
        need = estimate_memory(changed, model, shapes, processes).total
        if need <= 0.9 * gpu_bytes:
            keys = ", ".join(f"{path}: {json.dumps(value)}" for path, value in choice.items())
            fitting.append(
                f"{keys} ({need / 1e9:.0f} GB{f' on each of {processes} GPUs' if processes > world_size else ''})"
            )
    raise ConfigError(
        f"model.model: {Path(config.model.model)} needs about {estimate}, and this GPU has {gpu_bytes / 1e9:.0f} GB. "
        f"It fits with {'; or '.join(fitting) if fitting else 'a smaller model'}"
    )
