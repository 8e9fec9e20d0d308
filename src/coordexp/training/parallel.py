"""The learner over several processes: FSDP2 and DeepSpeed, both through accelerate; without either, plain DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordexp.config import RunConfig
from coordexp.config.training import DeepSpeedConfig, FSDPConfig
from coordexp.errors import ConfigError, require


def check_parallel(config: RunConfig, world_size: int) -> None:
    """What can be known before anything is loaded.

    Raises:
        ConfigError: sharding over one process; DeepSpeed on a CPU, with a file that is none, or by ZeRO-3.
        MissingDependency: DeepSpeed is not installed.
    """
    if config.fsdp.enabled and world_size == 1:
        raise ConfigError(
            "fsdp.enabled: shards the learner over the processes of torchrun, and there is only this one; start "
            "torchrun --nproc_per_node=N, or set fsdp.enabled: false"
        )
    if config.deepspeed.enabled:
        if config.training.use_cpu:
            raise ConfigError(
                "deepspeed.enabled: DeepSpeed trains on GPUs, and training.use_cpu is true; set deepspeed.enabled: "
                "false, or use fsdp, which works on CPUs too"
            )
        if isinstance(config.deepspeed.config, str) and not Path(config.deepspeed.config).is_file():
            raise ConfigError(
                f"deepspeed.config: {config.deepspeed.config}: no such file; name a JSON file of DeepSpeed"
            )
        if _zero_stage(config.deepspeed) == 3:
            raise ConfigError(
                "deepspeed.config: zero_optimization.stage 3 leaves each process an empty shell of every weight that "
                "no layer is using, and rollout engines and the chunked head would be given the shells; write stage 2, "
                "or use fsdp.enabled: true, which shards weights too"
            )
        require("deepspeed", "deepspeed.enabled: true")


def _zero_stage(deepspeed: DeepSpeedConfig) -> object:
    """The stage that DeepSpeed's own configuration names; None where it names none."""
    content: Any = deepspeed.config
    if isinstance(content, str):
        try:
            content = json.loads(Path(content).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"deepspeed.config: {content}: no JSON ({error}); name a JSON file of DeepSpeed"
            ) from error
    zero = content.get("zero_optimization") if isinstance(content, dict) else None
    return zero.get("stage") if isinstance(zero, dict) else None


def parallel_arguments(config: RunConfig) -> dict[str, Any]:
    """Keyword arguments of ``TrainingArguments``; empty for DDP."""
    if config.fsdp.enabled:
        return {"fsdp": True, "fsdp_config": _fsdp_options(config.fsdp)}
    if config.deepspeed.enabled:
        return {"deepspeed": _deepspeed_options(config.deepspeed)}
    return {}


def _fsdp_options(fsdp: FSDPConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": fsdp.reshard_after_forward,
        "cpu_offload": fsdp.cpu_offload,
        "activation_checkpointing": fsdp.activation_checkpointing,
        "state_dict_type": fsdp.state_dict_type,
    }
    if fsdp.transformer_layer_cls_to_wrap is not None:
        options["transformer_layer_cls_to_wrap"] = list(fsdp.transformer_layer_cls_to_wrap)
    return options


def _deepspeed_options(deepspeed: DeepSpeedConfig) -> str | dict[str, Any]:
    assert deepspeed.config is not None, "the schema requires deepspeed.config"
    return deepspeed.config


def shard_on_cpus(trainer: Any) -> None:
    """Turn FSDP on where accelerate would pass over it: on CPUs.

    torch's FSDP2 works there with gloo, and accelerate's own code for it too; only its choice of a distributed type
    knows GPUs alone, and falls back to plain DDP without a word. Call it once the trainer has made its accelerator.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    if trainer.args.fsdp_plugin_args is None or state.distributed_type != DistributedType.MULTI_CPU:
        return
    state.distributed_type = DistributedType.FSDP
    # Where accelerate itself notes its choice, and reads it again for every state that is made later.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True
