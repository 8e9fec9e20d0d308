"""The arguments of vLLM's engines, built in one place, and how a colocated engine is started with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import RepeatTerminateConfig, VLLMConfig
from coordexp.engine.guard_activation import GUARD_PROCESSOR, activation_environment, check_guard
from coordexp.errors import RolloutError, require

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


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One colocated engine. ``config``: the resolved section; ``cap``: sequences that it decodes at once;
    ``holds_names``: requests may bring a closed list of class names."""

    config: VLLMConfig
    repeat_terminate: RepeatTerminateConfig
    model: Path
    cap: int
    holds_names: bool = False

    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's ``EngineArgs``."""
        return {
            **section_arguments(self.config),
            **own_arguments(self.model, self.repeat_terminate.enabled, self.holds_names),
            "max_num_seqs": self.cap,
            # Ranks are started by torchrun, and each takes the device that torchrun gave it.
            "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
            "enable_sleep_mode": self.config.sleep_level > 0,
            # Weights are replaced before the first answer, but 'dummy' would randomise buffers too, which none covers.
            "load_format": "auto",
            "skip_mm_profiling": False,
        }

    def start(self) -> Any:
        """The engine, guarding its answers exactly as the configuration says.

        Raises:
            MissingDependency, RolloutError.
        """
        from coordexp.engine.engine_process import environment_kept

        # Already vLLM's import sets variables, which the learner's children would inherit.
        with environment_kept(activation_environment(self.repeat_terminate)):
            require("vllm", "rollout_matching.rollout_backend: vllm")
            from coordexp.engine.in_process import InProcessEngine
            from coordexp.engine.logits_processors import check_known_tokens

            engine = InProcessEngine(self.arguments(), self.cap)
            try:
                status = engine.ask_worker(lambda worker: worker.coordexp_status())
                check_guard([status], self.repeat_terminate)
                check_known_tokens([status])
                if self.holds_names:
                    from coordexp.engine.logits_processors import check_names, holds_names

                    check_names([engine.ask_worker(holds_names)])
            except RolloutError:
                engine.close()
                raise
        return engine
