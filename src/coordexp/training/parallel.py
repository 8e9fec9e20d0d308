"""Training over several processes: rendezvous, DDP, FSDP2, DeepSpeed through accelerate."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from transformers import TrainingArguments

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.schema import DeepSpeedConfig
from coordexp.errors import ConfigError, DataError, require
from coordexp.reading import read_json
from coordexp.training.optimizer import LearningRates

logger = logging.getLogger("coordexp")


def check_parallel(config: RunConfig, world_size: int) -> None:
    """Check ``fsdp`` and ``deepspeed`` before anything is loaded. Raises ConfigError, MissingDependency."""
    if config.fsdp.enabled and world_size == 1:
        raise ConfigError(
            "fsdp.enabled: FSDP shards the model over the processes of torchrun, and there is only one; start "
            "torchrun --nproc_per_node=N, or set fsdp.enabled: false"
        )
    if config.deepspeed.enabled:
        if config.training.use_cpu:
            raise ConfigError(
                "deepspeed.enabled: DeepSpeed trains on GPUs, and training.use_cpu is true; set deepspeed.enabled: "
                "false, or use fsdp, which works on CPUs too"
            )
        content = _content_of(config.deepspeed)
        zero = content.get("zero_optimization")
        if isinstance(zero, dict) and zero.get("stage") == 3:
            raise ConfigError(
                "deepspeed.config: zero_optimization.stage 3 gathers a weight only while its layer computes, so "
                "rollout engines and the chunked head would read empty tensors; write stage 2, or use fsdp.enabled: "
                "true, which shards weights too"
            )
        if "scheduler" in content and LearningRates.of(config.training).differ:
            raise ConfigError(
                "deepspeed.config: its scheduler gives all weights one learning rate, so training.vit_lr, aligner_lr "
                "and coord_lr would do nothing; remove scheduler and use training.lr_scheduler_type, or remove them"
            )
        require("deepspeed", "deepspeed.enabled: true")


def _content_of(deepspeed: DeepSpeedConfig) -> dict[str, Any]:
    content: Any = deepspeed.config
    if isinstance(content, str):
        try:
            content = read_json(Path(content))
        except DataError as error:
            raise ConfigError(f"deepspeed.config: {error}; name a JSON file of DeepSpeed") from error
    return content if isinstance(content, dict) else {}


def parallel_arguments(config: RunConfig) -> dict[str, Any]:
    """Keyword arguments of ``TrainingArguments``; empty for DDP."""
    if config.fsdp.enabled:
        kind = config.fsdp.state_dict_type
        options = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": kind}
        # accelerate's renames weights, and recomputes with other random numbers (dropout)
        return {"fsdp": True, "fsdp_config": {**options, "activation_checkpointing": False}}
    if config.deepspeed.enabled:
        assert config.deepspeed.config is not None, "the schema requires deepspeed.config"
        return {"deepspeed": config.deepspeed.config}
    return {}


def set_allocator(rollout: RolloutMatchingConfig) -> None:
    """Let CUDA's allocator grow its segments, because packed rows of changing lengths fragment fixed ones. A value that
    the user set is kept. Not used next to a colocated engine, whose sleep mode has its own allocator.

    Call it before the first tensor on a GPU.
    """
    if not rollout.is_colocated and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@dataclass
class _DDPOptions(DistributedDataParallelKwargs):
    # accelerate 1.15 has only the old name, broadcast_buffers, of which torch warns each user.
    forward_sync_buffers: bool = True


def build_accelerator(args: TrainingArguments) -> Accelerator:
    """Build the Accelerator that wraps the model for several processes and mixed precision, as in ``args``.

    The step scales its losses itself, so accelerate must not divide by accumulation steps.
    """
    if args.n_gpu > 1:
        # With several visible GPUs transformers would split a packed row's tensors along their first axis
        # (torch.nn.DataParallel), which has no meaning here.
        logger.warning(
            f"{args.n_gpu} GPUs are visible and this one process uses the first; start torchrun "
            f"--nproc_per_node={args.n_gpu} to use all"
        )
        args._n_gpu = 1
    fsdp: Any = args.fsdp_plugin_args
    plugin = None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=1,
    )
    # An assignment, because Accelerator's arguments accept no other class than its own.
    accelerator.ddp_handler = _DDPOptions(  # pyright: ignore[reportAttributeAccessIssue]
        find_unused_parameters=False,  # every row reaches every weight: each segment has an image and a target
        forward_sync_buffers=False,  # they are constants, and ranks need not wait for each other before a forward
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
        sharded = getattr(accelerator.state, "fsdp_plugin", None) is not None
        if not sharded:
            model.to(accelerator.device)  # before the optimizer, whose master weights are copies on the same device
        if not sharded and distributed.world_size() == 1:
            # As without torchrun. accelerate would wrap it in DDP on CPUs, which refuses to sum gradients of bfloat16
            # weights in float32; in this mode it adds autocast and nothing else.
            model, prepared = accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare(optimizer())
            return model, prepared, scheduler(prepared)
        model, prepared = accelerator.prepare(model, optimizer())
        if sharded:
            register_fsdp_forward_method(model, "generate")  # it gathers weights as a forward does
        return model, prepared, scheduler(prepared)
    from accelerate.utils import DummyOptim, DummyScheduler  # it has them only where DeepSpeed is installed

    plugin.hf_ds_config.trainer_config_finalize(args, model, max_steps)
    theirs, ours = plugin.hf_ds_config.config, optimizer()
    theirs.setdefault("gradient_clipping", args.max_grad_norm)  # accelerate would clip at 1
    if "optimizer" in theirs:  # its class, over our groups: their learning rates, and no decay of biases and norms
        groups = [{key: one[key] for key in ("params", "lr", "weight_decay")} for one in ours.param_groups]
        ours = DummyOptim(params=groups)
    else:
        theirs["zero_allow_untested_optimizer"] = True
    if "scheduler" in theirs:
        return accelerator.prepare(model, ours, DummyScheduler(ours))
    model, prepared = accelerator.prepare(model, ours)
    return model, prepared, scheduler(prepared)


def join_processes(config: RunConfig) -> None:
    """Join the process group as the section ``training`` says; see :func:`coordexp.distributed.join`."""
    distributed.join(use_cpu=config.training.use_cpu, timeout_s=config.training.ddp_timeout)


_LOST = re.compile(
    r"gloo|nccl|ProcessGroup|Connection (closed|reset|refused)|Timed out waiting|Socket Timeout|recvValue|sendBytes"
    r"|Broken pipe|TCPStore|DistStore|pair closure|unbound_buffer|EnforceNotMet",
    re.IGNORECASE,
)


def lost_each_other(error: BaseException) -> bool:
    """Whether ``error`` is torch's error for a process that ended or does not answer in time."""
    if distributed.world_size() == 1:
        return False
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None
