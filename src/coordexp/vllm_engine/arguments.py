"""What a colocated engine is started with, and proof that it guards its answers where it was told to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.config.vllm import VLLMConfig
from coordexp.errors import RolloutError
from coordexp.extras import require
from coordexp.vllm_engine.guard_activation import GUARD_PROCESSOR, activation_environment, check_guard

EXTENSION = "coordexp.vllm_engine.worker.WeightSyncExtension"  # by name: importing it would import vLLM


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, as the configuration and the learner determine it. ``cap``: sequences that it decodes at once;
    ``max_lora_rank``: the rank that it makes room for where ``config.enable_lora`` says so."""

    config: VLLMConfig
    repeat_terminate: RepeatTerminateConfig
    model: Path
    dtype: str
    max_model_len: int
    max_lora_rank: int
    cap: int

    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's ``EngineArgs``; what the configuration leaves to vLLM is left out."""
        config = self.config
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.cap,
            "tensor_parallel_size": config.tensor_parallel_size,
            # Ranks are started by torchrun, and each takes the device that torchrun gave it.
            "distributed_executor_backend": "external_launcher" if distributed.world_size() > 1 else "uni",
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_prefix_caching": config.enable_prefix_caching,
            "enforce_eager": config.enforce_eager,
            "disable_custom_all_reduce": config.disable_custom_all_reduce,
            "enable_sleep_mode": config.sleep_level > 0,
            "limit_mm_per_prompt": config.limit_mm_per_prompt.model_dump(),
            "worker_extension_cls": EXTENSION,
            # Weights are replaced before the first answer, but 'dummy' would randomise buffers too, which none covers.
            "load_format": "auto",
            "generation_config": "vllm",  # the YAML decides, not the checkpoint's generation_config.json
            "skip_mm_profiling": False,
            "seed": 0,
            "disable_log_stats": True,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "kv_cache_dtype": config.kv_cache_dtype,
            "cpu_offload_gb": config.cpu_offload_gb,
            "mm_encoder_tp_mode": config.mm_encoder_tp_mode,
        }
        if config.enable_lora:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": self.max_lora_rank}
        if self.repeat_terminate.enabled:
            arguments |= {"logits_processors": [GUARD_PROCESSOR], "async_scheduling": False}
        return {name: value for name, value in arguments.items() if value is not None}

    def start(self) -> Any:
        """The engine, guarding its answers exactly as the configuration says.

        Raises:
            MissingDependency, UpstreamChanged, RolloutError.
        """
        from coordexp.vllm_engine.process_state import environment_kept

        # Already vLLM's import sets variables, which the learner's children would inherit.
        with environment_kept(activation_environment(self.repeat_terminate)):
            require("vllm", "rollout_matching.rollout_backend: vllm")
            from coordexp.vllm_engine.in_process import InProcessEngine

            engine = InProcessEngine(self.arguments(), self.cap)
            try:
                check_guard([engine.ask_worker(lambda worker: worker.coordexp_status())], self.repeat_terminate)
            except RolloutError:
                engine.close()
                raise
        return engine
