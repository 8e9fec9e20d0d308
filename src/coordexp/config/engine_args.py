"""Arguments of vLLM's engines that a run may set by their own names: ``rollout_matching.vllm.engine_args``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from coordexp.config.base import nearest

# Fields of vLLM's EngineArgs that decide how and where an engine computes, with their JSON types. Not among them: what
# has a key of its own, what CoordExp sets (the model, seeds, logits processors, drafts), and what would make pushes or
# answers wrong (quantization, settings of the image processor), or the estimate of memory (kv_cache_memory_bytes).
ENGINE_ARGS: dict[str, str] = {
    **dict.fromkeys(("attention_backend", "kv_cache_dtype", "linear_backend", "mm_encoder_attn_backend",
                     "mm_encoder_tp_mode", "performance_mode", "safetensors_load_strategy"), "string"),
    **dict.fromkeys(("async_scheduling", "disable_cascade_attn", "disable_chunked_mm_input",
                     "disable_custom_all_reduce", "enable_chunked_prefill", "enable_flashinfer_autotune",
                     "enable_prefix_caching", "fully_sharded_loras", "numa_bind"), "boolean"),
    **dict.fromkeys(("block_size", "long_prefill_token_threshold", "max_cudagraph_capture_size",
                     "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "optimization_level"),
                    "integer"),
    "cpu_offload_gb": "number",
    "cudagraph_capture_sizes": "array",
    **dict.fromkeys(("attention_config", "compilation_config", "kernel_config"), "object"),
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "array": (list,),
    "object": (dict,),
}  # fmt: skip
_FROM_1 = ("max_num_batched_tokens", "max_num_seqs")  # vLLM refuses less, after the model is loaded


def _known(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in ENGINE_ARGS:
            guess = nearest(name, list(ENGINE_ARGS))
            known = f"did you mean '{guess}'?" if guess else f"possible here: {', '.join(sorted(ENGINE_ARGS))}"
            raise ValueError(f"'{name}' is not an argument that a run may set; {known}")
        kind = ENGINE_ARGS[name]
        fits = isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
        if value is not None and not fits:
            raise ValueError(f"{name}: expected {kind}, got {value!r}")
        if name in _FROM_1 and value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    return given


_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        name: {"type": [kind, "null"], **({"minimum": 1} if name in _FROM_1 else {})}
        for name, kind in ENGINE_ARGS.items()
    },
}
EngineArgs = Annotated[dict[str, Any], AfterValidator(_known), WithJsonSchema(_SCHEMA)]
