"""An estimate of the GPU memory that one trainer process needs, from shapes and configuration alone.

Weights, gradients and the states of AdamW are counted. Other optimizers count as if they had no state, and DeepSpeed as
ZeRO-2, so that a run that fits is not refused. Activations are a formula in the row's length L, the
hidden size H, the intermediate size I and the number of layers, with constants fitted to traced optimizer steps of
Qwen3-VL-2B, 4B and 8B, full and LoRA, which it reproduces within 10 %. Add about 1 GB for CUDA and 5 to 15 % for
fragmentation. With a colocated engine, a GPU needs the larger of two sums: the trainer's estimate and a sleeping
engine, or the part that the trainer keeps during rollouts and ``gpu_memory_utilization`` of the GPU.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.checkpoints.describe import TABLES, weight_shapes
from coordexp.checkpoints.folder import Checkpoint, is_named, part_of
from coordexp.config import RunConfig
from coordexp.config.checks import cross_checks
from coordexp.config.resolved import AnswerConfig
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.errors import ConfigError
from coordexp.out_of_memory import Kind, note_cure
from coordexp.records import NUM_BINS

# bfloat16 numbers per token while one layer's backward pass runs, as factors of H and I.
_RUNNING = (8, 14)
# bfloat16 numbers per token that a layer without checkpointing keeps for its backward pass, as factors of H, I and the
# widths of queries and keys, by tuner.train_type and whether kernels are fused. Frozen products keep no input.
_KEPT = {
    ("full", False): (9, 4, 5, 5),
    ("lora", False): (7, 4, 4, 4),
    ("full", True): (4, 3, 3, 3),
    ("lora", True): (4, 3, 3, 3),
}
_KEPT_TOWER = {False: (14, 2, 0, 0), True: (11, 2, 0, 0)}  # of the vision tower, by fused
_KEPT_DROPOUT = ((5.5, 0.5, 1.5, 0), (1.5, 0.5, 0, 0))  # of the adapters' dropout in both
ADAMW = ("adamw_torch", "adamw_torch_fused")
ASLEEP = 3e9  # of a sleeping engine, CUDA graphs for the most part: assumed, as no GPU was at hand
_COMFORTABLE = 0.9  # share of a GPU that an estimate may take without a warning
ROOMY = 0.85  # the same, where more would only save time: the rest is CUDA's, fragmentation and the estimate's error
_PATCHES_PER_TOKEN = 2  # half of a row's tokens are image tokens, each of four patches


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one trainer process. ``exchange``: DDP's buffers, or layers that FSDP gathers. ``while_answering``: the
    part that stays on the GPU during rollouts: weights and optimizer state without what ``offload`` moves away.

    A colocated engine takes ``engine_share`` of the GPU on top: during rollouts and, unless it ``sleeps``, always.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    exchange: float
    while_answering: float
    engine_share: float = 0.0
    sleeps: bool = False

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.exchange

    def peak(self, gpu_bytes: float, factor: float = 1.0) -> float:
        """Most memory in use on a GPU of ``gpu_bytes``, engine included, if the trainer needs ``factor`` times this."""
        engine = self.engine_share * gpu_bytes
        asleep = min(ASLEEP, engine) if self.sleeps else engine
        return max(factor * self.total + asleep, factor * self.while_answering + engine)

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "exchange")
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name in names if (size := getattr(self, name)) >= 5e7)
        text = f"{self.total / 1e9:.1f} GB for each trainer process" + (f" ({listed})" if listed else "")
        if self.engine_share:
            text += f", and {self.engine_share:.0%} of the GPU for its engine"
            text += f" while the trainer keeps {self.while_answering / 1e9:.1f} GB" if self.sleeps else " at all times"
        return text


def estimate_memory(
    config: RunConfig, model: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], world_size: int = 1
) -> MemoryEstimate:
    """Peak memory of one of ``world_size`` trainer processes.

    ``model``: the checkpoint's ``config.json``; ``shapes``: of its tensors, by name.
    """
    training, tuner = config.training, config.tuner
    if model.get("tie_word_embeddings"):
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    text, vision = model["text_config"], model["vision_config"]
    hidden = int(text["hidden_size"])

    trained = trained_numbers(config, model, shapes)
    lora = tuner.train_type == "lora"
    stored = 4 if config.model.dtype == "float32" else 2
    masters = training.master_weights is not None
    moments = 2 if training.optim in ADAMW else 0
    if lora:
        weights, per_gradient, per_state = total * stored + trained * 4, 4, 4 * moments
    else:
        weights = total * stored
        # Master weights sum gradients in float32 in a single process; DDP exchanges them in the weights' own type.
        per_gradient = 4 if stored == 4 or (masters and world_size == 1) else 2
        per_state = 4 + 4 * moments if masters else stored * moments
    autocast_copy = 2.0 * total if training.bf16 and stored == 4 else 0.0  # in bfloat16, during forward and backward
    weights += autocast_copy

    # Activations of one packed row: the language model, the vision tower, and a chunk of the language head.
    row = 0.0
    fused = config.model.fuses_on_gpu
    length, intermediate = config.global_max_length, int(text["intermediate_size"])
    head = int(text.get("head_dim") or hidden // int(text["num_attention_heads"]))
    queries, keys = head * int(text["num_attention_heads"]), head * int(text["num_key_value_heads"])
    tower = int(vision["hidden_size"]), int(vision["intermediate_size"]), 0, 0
    every = 1 if training.gradient_checkpointing_every == "auto" else training.gradient_checkpointing_every
    recomputed = 1 / every if training.gradient_checkpointing else 0.0  # share of the layers
    for tokens, sizes_of_layer, attention, kept, dropout, layers in (
        (length, (hidden, intermediate, queries, keys), queries * (every > 1), _KEPT[tuner.train_type, fused],
         _KEPT_DROPOUT[0], int(text["num_hidden_layers"])),
        (length * _PATCHES_PER_TOKEN, tower, tower[0], _KEPT_TOWER[fused], _KEPT_DROPOUT[1],
         0 if tuner.freeze_vit else int(vision["depth"])),
    ):  # fmt: skip
        numbers = sum(map(operator.mul, kept, sizes_of_layer))
        if lora and tuner.lora_dropout:
            numbers += sum(map(operator.mul, dropout, sizes_of_layer))
        # A recomputed layer keeps its input and maybe, on a GPU, the output of its attention.
        own = sizes_of_layer[0] + attention * training.gradient_checkpointing
        row += 2 * tokens * layers * (recomputed * own + (1 - recomputed) * numbers)
    row += 2 * length * (_RUNNING[0] * hidden + _RUNNING[1] * intermediate)
    if not lora and not tuner.freeze_llm:
        row += 2 * int(text["vocab_size"]) * hidden  # gradient of the head, before it is added to the table's

    gradients, optimizer, exchange = trained * per_gradient, trained * per_state, 0.0
    if config.fsdp.enabled:
        # Float32 shards; the layers in use are gathered in bfloat16, the tables as units of their own.
        weights, gradients, autocast_copy = total * 4 / world_size, trained * 4 / world_size, 0.0
        optimizer = trained * 4 * moments / world_size
        layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
        tables = sum(size for name, size in sizes.items() if part_of(name) == "llm" and ".layers." not in name)
        exchange = 2 * (2 * layer + tables)
    elif config.deepspeed.enabled:
        gradients, optimizer = gradients / world_size, optimizer / world_size
    elif world_size > 1:
        exchange = float(gradients)
    rollout = config.rollout_matching
    kept = weights - autocast_copy + optimizer
    if rollout is None or not rollout.is_colocated:
        return MemoryEstimate(weights, gradients, optimizer, row, exchange, kept)
    if (offload := rollout.offload).enabled:
        kept -= (weights - autocast_copy) * offload.offload_model + optimizer * offload.offload_optimizer
    share, sleeps = rollout.vllm.gpu_memory_utilization, rollout.vllm.sleep_level > 0
    return MemoryEstimate(weights, gradients, optimizer, row, exchange, kept, share, sleeps)


def trained_numbers(config: RunConfig, model: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> int:
    """How many numbers the run trains: weights, or those of adapters, modules trained whole and coordinate rows."""
    tuner, trained = config.tuner, 0
    frozen = {part for part in ("vit", "aligner", "llm") if getattr(tuner, f"freeze_{part}")}
    tied = bool(model.get("tie_word_embeddings"))
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    if tuner.train_type != "lora":
        return sum(size for name, size in sizes.items() if part_of(name) not in frozen)
    if tuner.train_coord_rows:
        trained = NUM_BINS * int(model["text_config"]["hidden_size"]) * (1 if tied else 2)
    for name, size in sizes.items():
        if part_of(name) in frozen:
            continue
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        if any(is_named(".".join(parts[: k + 1]), tuner.modules_to_save) for k in range(len(parts))):
            trained += size
            continue
        is_linear = kind == "weight" and len(shapes[name]) == 2 and parts[-1] not in TABLES
        if is_linear and ("all-linear" in tuner.target_modules or is_named(module, tuner.target_modules)):
            trained += tuner.lora_rank * sum(shapes[name]) + (shapes[name][0] if tuner.use_dora else 0)
    return trained


def check_memory(
    config: RunConfig, world_size: int = 1, gpu_bytes: int | None = None, checkpoint: Checkpoint | None = None
) -> MemoryEstimate:
    """The estimate for ``config.model.model``. ``gpu_bytes``: memory of each GPU; None compares with nothing. Warns,
    with what would fit, if the estimate's error or fragmentation may exceed it. ``checkpoint``: ``model.model``, if it
    is open.

    Raises:
        ConfigError: it exceeds the GPU by more than the estimate's own error of 10 %; says what would fit.
        CheckpointError: ``model.model`` is not a readable checkpoint.
    """
    checkpoint = Checkpoint.open(checkpoint or config.model.model)
    model, shapes = checkpoint.config, weight_shapes(checkpoint)
    estimate = estimate_memory(config, model, shapes, world_size)
    if gpu_bytes is None or estimate.peak(gpu_bytes) <= _COMFORTABLE * gpu_bytes:
        return estimate
    fitting = "; or ".join(_what_fits(config, model, shapes, world_size, gpu_bytes)) or "a smaller model"
    needs = f"model.model: {Path(config.model.model)} needs about {estimate}, and this GPU has {gpu_bytes / 1e9:.0f} GB"
    if estimate.peak(gpu_bytes, 0.9) > gpu_bytes:
        raise ConfigError(f"{needs}. It fits with {fitting}")
    distributed.warn(
        f"{needs}: tight, because the estimate may be 10 % wrong and fragmentation takes 5 to 15 %. If memory runs "
        f"out, it fits with {fitting}"
    )
    return estimate


def recomputed_every(
    config: RunConfig,
    model: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    world_size: int,
    gpu_bytes: float | None,
) -> int:
    """If activations are recomputed, in which layers on a GPU of ``gpu_bytes``: in every N-th, 0: in none. For ``auto``
    the fewest whose estimate fits comfortably; in all on a CPU (None), and in two-channel training, whose rows have
    several forwards that the estimate does not count."""
    every = config.training.gradient_checkpointing_every
    if every != "auto":
        return every
    if gpu_bytes is None or config.custom.trainer_variant == "stage2_two_channel":
        return 1
    for candidate in (0, 4, 3, 2):
        changed = _with(config, "training.gradient_checkpointing", candidate > 0)
        changed = _with(changed, "training.gradient_checkpointing_every", max(1, candidate))
        if estimate_memory(changed, model, shapes, world_size).peak(gpu_bytes) <= ROOMY * gpu_bytes:
            return candidate
    return 1


def _what_fits(
    config: RunConfig,
    model: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    world_size: int,
    gpu_bytes: int,
) -> Iterator[str]:
    """Keys with which the run fits a GPU, with the memory that it then needs."""
    recomputes_all = config.training.gradient_checkpointing_every in (1, "auto")  # the estimate counts auto as 1
    every = {} if recomputes_all else {"training.gradient_checkpointing_every": 1}
    no_masters = {"training.master_weights": None} if config.training.master_weights is not None else {}
    choices: list[dict[str, Any]] = [
        {"training.gradient_checkpointing": True, **every},
        {"global_max_length": config.global_max_length // 2},
        {"fsdp.enabled": True, **no_masters},
        {"tuner.train_type": "lora", "model.dtype": "bfloat16", "training.gradient_checkpointing": True, **no_masters},
    ]
    engine_share = estimate_memory(config, model, shapes, world_size).engine_share
    if engine_share:
        choices = [
            {"rollout_matching.vllm.sleep_level": 1},
            {"rollout_matching.offload.enabled": True, "rollout_matching.offload.offload_optimizer": True},
            {"rollout_matching.vllm.gpu_memory_utilization": round(engine_share / 2, 2)},
            *choices,
        ]
    for choice in choices:
        changed = config
        for path, value in choice.items():
            changed = _with(changed, path, value)
        if any(cross_checks(changed)):
            continue  # another key excludes it
        processes = max(8, world_size) if "fsdp.enabled" in choice else world_size
        need = estimate_memory(changed, model, shapes, processes).peak(gpu_bytes)
        if need <= _COMFORTABLE * gpu_bytes:
            keys = ", ".join(f"{path}: {json.dumps(value)}" for path, value in choice.items())
            yield f"{keys} ({need / 1e9:.0f} GB{f' on each of {processes} GPUs' if processes > world_size else ''})"


@contextmanager
def advising(config: RunConfig | AnswerConfig, saved: Callable[[], str] = lambda: "") -> Iterator[None]:
    """If memory runs out within it, the error gets the keys of ``config`` that help, and what is ``saved``."""
    try:
        yield
    except Exception as error:
        note_cure(error, partial(keys_that_help, config), saved())
        raise


def keys_that_help(config: RunConfig | AnswerConfig, kind: Kind) -> list[str]:
    """Keys that a user can change after memory ran out during ``kind``, best first; without values that ``config`` has
    already."""
    if kind in ("engine", "rollouts", "evaluation") and config.rollout_matching is not None:
        trains = isinstance(config, RunConfig) and not (config.fsdp.enabled or config.deepspeed.enabled)
        keys = _answering_keys(config.rollout_matching, can_offload=trains)
    elif isinstance(config, RunConfig):
        keys = _training_keys(config).get(kind, {})
    else:
        keys = {"model.dtype: bfloat16": config.model.dtype != "float32"}
    return [*(key for key, is_so in keys.items() if not is_so), "end other programs that use this memory"]


def _answering_keys(rollout: RolloutMatchingConfig, can_offload: bool) -> dict[str, bool]:
    if rollout.rollout_backend == "hf":
        size = rollout.decode_batch_size
        return {
            f"lower rollout_matching.decode_batch_size (now {size})": size == 1,
            f"lower rollout_matching.max_new_tokens (now {rollout.max_new_tokens})": False,
        }
    vllm, elsewhere = rollout.vllm, not rollout.is_colocated
    sequences = vllm.given_args.get("max_num_seqs", "as vLLM chooses")
    moved = "rollout_matching.offload.enabled and offload_optimizer: true"
    return {
        f"lower rollout_matching.vllm.gpu_memory_utilization (now {vllm.gpu_memory_utilization:g})": False,
        f"lower rollout_matching.vllm.engine_args.max_num_seqs (now {sequences})": False,
        "rollout_matching.vllm.sleep_level: 1": elsewhere or vllm.sleep_level > 0,
        moved: elsewhere or rollout.offload.enabled or not can_offload,
        "rollouts on a device of their own: coordexp launch": elsewhere,
    }


def _training_keys(config: RunConfig) -> dict[Kind, dict[str, bool]]:
    training, lora = config.training, {"tuner.train_type: lora": config.tuner.train_type == "lora"}
    sharded = {"fsdp.enabled: true, with several GPUs": config.fsdp.enabled or config.deepspeed.enabled}
    dtype = {"model.dtype: bfloat16": config.model.dtype != "float32"}
    size = training.per_device_train_batch_size
    batch = {f"lower training.per_device_train_batch_size (now {size})": size == 1}
    recomputing = {
        "training.gradient_checkpointing: true": training.gradient_checkpointing,
        "training.gradient_checkpointing_every: 1": training.gradient_checkpointing_every == 1,
    }
    row = {f"lower global_max_length (now {config.global_max_length})": False} if training.packing else batch
    gathers = config.fsdp.enabled and config.fsdp.state_dict_type == "FULL_STATE_DICT"
    workers = config.data.num_workers
    return {
        "start": dtype | lora | sharded,
        "reading": {f"lower data.num_workers (now {workers})": workers == 0} | batch,
        "training": recomputing | row | lora | sharded,
        "optimizer": sharded | lora,
        "saving": {"fsdp.state_dict_type: SHARDED_STATE_DICT": not gathers} | lora,
    }


def _with(section: Any, path: str, value: object) -> Any:
    key, _, rest = path.partition(".")
    return section.model_copy(update={key: _with(getattr(section, key), rest, value) if rest else value})
