"""The arguments of vLLM's engines, built in one place. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordexp.config.rollout import VLLMConfig
from coordexp.engine.guard_activation import GUARD_PROCESSOR

# By name: importing them would import vLLM.
EXTENSION = "coordexp.engine.worker.WeightSyncExtension"
NAMES_PROCESSOR = "coordexp.engine.logits_processors:AllowedLabelsProcessor"
NAMES_KEY = "coordexp_names"  # of a request's SamplingParams.extra_args: its closed list of class names
NAMES_ENABLE = "COORDEXP_ENABLE_VLLM_CLOSED_NAMES"  # 1: engines of swift rollout take such lists
NAMES_STATUS = "closed_names"  # of each worker in a server's /status/: whether it really does
KNOWN_TOKENS_PROCESSOR = "coordexp.engine.logits_processors:KnownTokensProcessor"


def section_arguments(vllm: VLLMConfig) -> dict[str, Any]:
    """The resolved section ``rollout_matching.vllm`` as vLLM's ``EngineArgs``.

    Without the keys that the section leaves to vLLM. All kinds of engines start with these values.
    """
    assert vllm.dtype is not None and vllm.max_model_len is not None, "resolved_rollout() settles every null"
    arguments: dict[str, Any] = {
        "dtype": vllm.dtype,
        "max_model_len": vllm.max_model_len,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enforce_eager": vllm.enforce_eager,
        "disable_custom_all_reduce": vllm.disable_custom_all_reduce,
        "max_num_seqs": vllm.max_num_seqs,
        "max_num_batched_tokens": vllm.max_num_batched_tokens,
        "kv_cache_dtype": vllm.kv_cache_dtype,
        "cpu_offload_gb": vllm.cpu_offload_gb,
        "mm_encoder_tp_mode": vllm.mm_encoder_tp_mode,
        "limit_mm_per_prompt": vllm.limit_mm_per_prompt.model_dump(),
    }
    if vllm.enable_lora:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm.max_lora_rank}
    return {name: value for name, value in arguments.items() if value is not None}


def own_arguments(model: Path, guarded: bool, holds_names: bool = False) -> dict[str, Any]:
    """Arguments of every engine that this project starts itself: its worker extension and logits processors, and no
    sampling defaults of the checkpoint's."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "worker_extension_cls": EXTENSION,
        "logits_processors": [KNOWN_TOKENS_PROCESSOR],
        "generation_config": "vllm",  # the YAML decides, not the checkpoint's generation_config.json
        "seed": 0,
        "disable_log_stats": True,
    }
    if holds_names:
        arguments = with_processor(arguments, NAMES_PROCESSOR)
    return with_guard(arguments) if guarded else arguments


def executor_on_cpu(tensor_parallel_size: int) -> str:
    """``distributed_executor_backend`` of an engine on CPUs, by the name that its core process imports."""
    name = "CoreExecutor" if tensor_parallel_size == 1 else "WorkersExecutor"
    return f"coordexp.engine.cpu_patches.{name}"


def with_guard(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments with the repeat guard, after every other processor: its end of the turn is final."""
    return with_processor(arguments, GUARD_PROCESSOR)


def with_processor(arguments: Mapping[str, Any], processor: str) -> dict[str, Any]:
    """An engine's arguments with a logits processor that needs the newest token before the next one is sampled. vLLM's
    asynchronous scheduling, on by default on GPUs, would call it too early."""
    processors = [*(arguments.get("logits_processors") or []), processor]
    return {**arguments, "logits_processors": processors, "async_scheduling": False}
