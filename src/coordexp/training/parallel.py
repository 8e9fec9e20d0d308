"""The learner over several processes: FSDP2 and DeepSpeed, both through accelerate; without either, plain DDP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

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
        assert config.deepspeed.config is not None, "the schema requires deepspeed.config"
        return {"deepspeed": config.deepspeed.config}
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


def build_accelerator(args: TrainingArguments) -> Accelerator:
    """What wraps the model for several processes and mixed precision, as ``args`` ask.

    The step scales its losses itself, so accelerate must not divide by accumulation steps.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    fsdp: Any = args.fsdp_plugin_args
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp)
    ddp: dict[str, Any] = {
        "find_unused_parameters": False,  # every row reaches every weight: each segment has an image and a target
        "broadcast_buffers": False,  # they are constants; and no rank shall wait for another before its forward
    }
    if args.ddp_bucket_cap_mb is not None:
        ddp["bucket_cap_mb"] = args.ddp_bucket_cap_mb
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=1,
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp)],
    )
    if plugin is None:
        return accelerator
    if accelerator.state.distributed_type == DistributedType.MULTI_CPU:
        # torch's FSDP2 works on CPUs with gloo, and accelerate's code for it too; only its choice of a distributed type
        # considers GPUs alone. The second assignment is where accelerate stores its choice for states made later.
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if args.mixed_precision == "bf16":
        # One policy on every device. accelerate's own, on GPUs, also reduces gradients in bfloat16 and casts what a
        # forward returns to it: the objective would get scores in bfloat16, in which bins above 256 are not distinct.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return accelerator


def prepare(
    accelerator: Accelerator,
    model: Any,
    optimizer: Callable[[], Any],
    scheduler: Callable[[Any], Any],
    args: TrainingArguments,
    max_steps: int,
) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule, wrapped for training. ``optimizer()`` and ``scheduler(optimizer)`` build ours,
    which a DeepSpeed configuration may replace by its own."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        model, prepared = accelerator.prepare(model, optimizer())
        if getattr(accelerator.state, "fsdp_plugin", None) is not None:
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(model, "generate")  # it gathers weights as a forward does
        return model, prepared, scheduler(prepared)
    from accelerate.utils import DummyOptim, DummyScheduler

    plugin.hf_ds_config.trainer_config_finalize(args, model, max_steps)
    theirs = plugin.hf_ds_config.config
    if "optimizer" in theirs:
        ours: Any = DummyOptim(params=[one for one in model.parameters() if one.requires_grad])
    else:
        theirs["zero_allow_untested_optimizer"] = True
        ours = optimizer()
    if "scheduler" in theirs:
        return accelerator.prepare(model, ours, DummyScheduler(ours))
    if isinstance(ours, DummyOptim):
        return accelerator.prepare(model, ours, DummyScheduler(ours, lr_scheduler_callable=scheduler))
    model, prepared = accelerator.prepare(model, ours)
    return model, prepared, scheduler(prepared)
