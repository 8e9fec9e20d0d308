"""Arguments of vLLM's engines, and the environment variables by which a launcher enables a server's repeat guard.
Imports neither torch nor vLLM."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from coordexp.config.base import dotted, problems_from
from coordexp.config.rollout import PushSeconds, RepeatTerminateConfig, VLLMConfig
from coordexp.coords import TURN_END
from coordexp.errors import CheckpointError, ConfigError, RolloutError

logger = logging.getLogger("coordexp")

# Names of classes, because importing them would import vLLM.
EXTENSION = "coordexp.engine.worker.extension.WeightSyncExtension"
KNOWN_TOKENS_PROCESSOR = "coordexp.engine.worker.logits_processors:KnownTokensProcessor"
CLASS_NAMES_PROCESSOR = "coordexp.engine.worker.logits_processors:RequestClassNamesProcessor"
GUARD_PROCESSOR = "coordexp.engine.worker.logits_processors:RepeatTerminateProcessor"

DRAFTER = "coordexp.engine.worker.drafting.AnswerDrafter"
_DRAFTED = 32  # most tokens of a draft: from the last coordinate of a box to the first of the next, with a short name

# Keys of a request's SamplingParams.extra_args: its class names, and its id.
CLASS_NAMES_KEY = "coordexp_names"
REQUEST_KEY = "coordexp_request_id"

FINGERPRINT = "model_fingerprint"  # key of a server's status, where it takes adapters: of the model that it loaded
ADAPTER_ID = 1
NAME_CHARACTERS = 400  # most of the name by which a trainer shows itself to servers
CALL = "coordexp_call"  # the method through which our server calls all others
RESULT, FAILURE = "result", "failure"

CLASS_NAMES_ENABLE = "COORDEXP_ENABLE_VLLM_CLOSED_NAMES"  # 1: engines of swift rollout accept class names
CLASS_NAMES_STATUS = "closed_names"  # key of a worker's status: whether it applies them
ENGINE = "engine"  # key of a worker's status: the keys of rollout_matching.vllm that change its answers
SETTINGS = "settings"  # key of a worker's status: settings_of its checkpoint
# Keys of config.json and of the image processor that change a model's answers, but no weight's shape.
_SETTINGS = {
    "text_config": ("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_parameters"),
    "vision_config": ("num_heads", "hidden_act", "deepstack_visual_indexes"),
    "image_processor": (
        *("do_rescale", "do_normalize", "rescale_factor"),
        *("image_mean", "image_std", "temporal_patch_size"),
    ),
}

# The whole section rollout_matching.repeat_terminate as JSON, in one variable or in a file that a variable names.
ENABLE = "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"
CONFIG_JSON = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
CONFIG_JSON_PATH = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
ACTIVATION_PATH = (
    f"'swift rollout --external_plugins coordexp_rollout_plugin.py' or 'coordexp serve', started with {ENABLE}=1 and "
    f"{CONFIG_JSON} (or {CONFIG_JSON_PATH}); 'coordexp launch' does all of this"
)
_OPTIONAL = {"max_object_keys"}
TOKENS_PER_STEP_ON_GPU = 16_384
# vLLM's defaults for an engine that is started as ours are, and no API server of its own.
_TOKENS_PER_STEP, _SEQUENCES = 2048, 128


class JoinRequest(BaseModel):
    """Asks a server (either kind) to join a weight group. ``token``: every member that connects must send it.
    ``trainer``: who asks, as messages name it. Requests of ms-swift lack the last three fields. ``coordexp serve``
    ignores ``host`` and ``first_rank``."""

    host: str = ""
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    first_rank: int | None = None
    timeout_s: PushSeconds = 120.0
    token: str = Field(default="", max_length=128, repr=False)
    trainer: str = Field(default="", max_length=NAME_CHARACTERS)


class LeaveRequest(BaseModel):
    """Asks a server to leave its weight group. ms-swift's clients send no body."""

    trainer: str = Field(default="", max_length=NAME_CHARACTERS)


class CommitRequest(BaseModel):
    """Ends a push, on either kind of server. ms-swift's clients send no body; the server then counts versions
    itself."""

    weight_version: int | None = None
    trainer_id: str | None = Field(default=None, max_length=64)
    wants_checksum: bool = False


def section_arguments(vllm: VLLMConfig, *, gpu: bool) -> dict[str, Any]:
    """The resolved section ``rollout_matching.vllm`` as vLLM's ``EngineArgs``. Raises
    ConfigError for adapters in a number type that vLLM's kernels for them do not have."""
    assert vllm.dtype is not None and vllm.max_model_len is not None, "resolved_rollout() replaces every null"
    if gpu and vllm.enable_lora and vllm.dtype == "float32":  # an assertion of vLLM's, without a message
        raise ConfigError(
            "rollout_matching.vllm.dtype: float32 (null means model.dtype), in which vLLM does not compute adapters on "
            "GPUs; write bfloat16, float16, or enable_lora: false"
        )
    ours: dict[str, Any] = {
        "disable_custom_all_reduce": True,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    named = {"tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "dtype", "enforce_eager"}
    arguments = ours | vllm.model_dump(include=named) | vllm.given_args
    if gpu:  # with vLLM's default of 2,048, 64 prompts of 850 tokens take 27 steps
        arguments.setdefault("max_num_batched_tokens", TOKENS_PER_STEP_ON_GPU)
    if vllm.enable_lora:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm.max_lora_rank}
    return arguments


def own_arguments(model: Path, guarded: bool, takes_class_names: bool = False, drafts: bool = False) -> dict[str, Any]:
    """Arguments of every engine that this project starts itself. ``drafts``: skip forced tokens."""
    arguments = {
        "model": str(model),
        "generation_config": "vllm",  # the YAML decides, not the checkpoint's generation_config.json
        "seed": 0,
        "disable_log_stats": True,
        # Disabled, because every push empties this cache of processed images, and it limits processing to one thread.
        "mm_processor_cache_gb": 0,
    }
    if not drafts:
        return with_processors(arguments, guarded, takes_class_names)
    # vLLM refuses logits processors together with drafts; the drafter's module applies ours.
    speculative = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": _DRAFTED}
    return {
        **arguments,
        "worker_extension_cls": EXTENSION,
        "speculative_config": speculative,
        "async_scheduling": False,
    }


def end_at_turn_end(engine: Any) -> None:
    """Let an engine end answers at <|im_end|>, as transformers' answers end here, and not at the other end tokens of
    the checkpoint's generation_config.json (<|endoftext|> in Qwen3-VL's), which vLLM takes whatever its
    ``generation_config`` is."""
    inputs = engine.input_processor
    inputs.generation_config_fields["eos_token_id"] = inputs.tokenizer.convert_tokens_to_ids(TURN_END)


def pushed_adapter(**options: Any) -> Any:
    """vLLM's ``LoRARequest`` for the adapter that was pushed."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("coordexp", ADAPTER_ID, "adapter-in-memory", **options)  # the path is never read


def extra_args(request_id: str, class_names: Sequence[str]) -> dict[str, Any]:
    """``SamplingParams.extra_args`` of a request; ``class_names``: those that its answer may use, empty for any."""
    return {REQUEST_KEY: request_id, **({CLASS_NAMES_KEY: list(class_names)} if class_names else {})}


def cache_kept_by(engine: Any) -> str | None:
    """Empty the caches of vLLM's synchronous engine, which has new weights. Returns one that it kept, as vLLM does
    while a request runs; its answers would begin with what the old weights computed."""
    emptied = {cache: getattr(engine, f"reset_{cache}_cache")() for cache in ("prefix", "encoder", "mm")}
    return next((cache for cache, done in emptied.items() if done is False), None)


def with_processors(arguments: Mapping[str, Any], guarded: bool, takes_class_names: bool = False) -> dict[str, Any]:
    """An engine's arguments with our worker extension and logits processors."""
    ours = [KNOWN_TOKENS_PROCESSOR]
    ours += [CLASS_NAMES_PROCESSOR] if takes_class_names else []
    ours += [GUARD_PROCESSOR] if guarded else []  # last, because nothing may change the end of turn that it forces
    processors = [*(arguments.get("logits_processors") or []), *ours]
    return {**arguments, "worker_extension_cls": EXTENSION, "logits_processors": processors}


def with_image_size(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments with the size of the image that vLLM profiles its memory with: the largest square that fits
    into ``max_model_len`` tokens, into the resize rule of the checkpoint's training images, and into what its processor
    makes of an image.

    By default vLLM takes the processor's largest size, 4096 x 4096 for Qwen3-VL. Profiling with it takes over an hour
    on a CPU, and reserves memory on a GPU that no image uses. Larger images still work.
    """
    from coordexp.checkpoints.card import read_card
    from coordexp.checkpoints.folder import processor_rule

    model, limits = Path(arguments["model"]), arguments["limit_mm_per_prompt"]
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if not config.get("architectures"):  # vLLM would take it for a pooling model, and fail a minute later
        raise CheckpointError(
            f'{model / "config.json"} has no "architectures", by which vLLM knows a model; write '
            '"architectures": ["Qwen3VLForConditionalGeneration"]'
        )
    processor, trained = processor_rule(model), read_card(model).preparation.resize
    token_side = processor.factor
    area = min(arguments["max_model_len"] * token_side**2, processor.max_pixels)
    if trained is not None:
        area = min(area, trained.max_pixels)
    side = max(1, math.isqrt(area) // token_side) * token_side
    return {
        **arguments,
        "limit_mm_per_prompt": {**limits, "image": {"count": limits["image"], "width": side, "height": side}},
    }


def with_room_for_drafts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments with so few sequences at once that a step has room for a whole draft of each, if it takes
    adapters too: vLLM starts no other engine. Further requests wait in the engine."""
    if not (arguments.get("enable_lora") and "speculative_config" in arguments):
        return dict(arguments)
    most = arguments.get("max_num_batched_tokens", _TOKENS_PER_STEP) // (_DRAFTED + 1)
    asked = arguments.get("max_num_seqs", _SEQUENCES)
    if asked > most:
        logger.warning(
            "the engine answers %d requests at once, not %d: with adapters a step must have room for a draft of each "
            "(raise max_num_batched_tokens in rollout_matching.vllm.engine_args, or set decoding.skip_forced_tokens: "
            "false)",
            most, asked,
        )  # fmt: skip
    return {**arguments, "max_num_seqs": min(asked, most)}


@cache  # each push asks for a status
def settings_of(checkpoint: str | Path) -> dict[str, Any]:
    """The settings of a plain checkpoint that decide how its weights are applied and which numbers an image becomes, by
    file and key."""
    from transformers import AutoConfig
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    config = AutoConfig.from_pretrained(checkpoint).to_dict()
    parts = {**config, "image_processor": AutoImageProcessor.from_pretrained(checkpoint).to_dict()}
    found = {f"{part}.{key}": parts[part].get(key) for part, keys in _SETTINGS.items() for key in keys}
    return json.loads(json.dumps(found))  # as it arrives


def executor_on_cpu(tensor_parallel_size: int) -> str:
    """``distributed_executor_backend`` of an engine on CPUs, as a class path that the core process imports."""
    name = "CoreExecutor" if tensor_parallel_size == 1 else "WorkersExecutor"
    return f"coordexp.engine.worker.cpu_patches.{name}"


def activation_environment(config: RepeatTerminateConfig) -> dict[str, str]:
    """The variables that configure a server's repeat guard as in ``config``; empty if it is disabled."""
    return {ENABLE: "1", CONFIG_JSON: config.model_dump_json()} if config.enabled else {}


def activated_config(environment: Mapping[str, str]) -> RepeatTerminateConfig | None:
    """The guard's configuration in a server's environment; None if the guard is off. Raises RolloutError for a missing
    or incomplete one: no defaults are filled in, because other thresholds than the trainer's would give other
    answers."""
    switch = environment.get(ENABLE, "0")
    if switch not in ("0", "1"):
        raise RolloutError(f"{ENABLE}={switch!r}: write 1 to guard answers against repetition, or 0")
    if switch == "0":
        return None
    given = [(name, environment[name]) for name in (CONFIG_JSON, CONFIG_JSON_PATH) if name in environment]
    if len(given) != 1:
        raise RolloutError(f"{ENABLE}=1 needs one of {CONFIG_JSON} and {CONFIG_JSON_PATH}; {len(given)} are set")
    ((source, text),) = given
    try:
        if source == CONFIG_JSON_PATH:
            source = f"{source} ({text})"
            text = Path(environment[CONFIG_JSON_PATH]).read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError) as error:  # of UTF-8 or JSON
        raise RolloutError(f"{source} cannot be read: {error}") from error
    keys = data if isinstance(data, dict) else {}
    missing = [key for key in RepeatTerminateConfig.model_fields if key not in keys and key not in _OPTIONAL]
    if missing:
        raise RolloutError(
            f"{source} lacks {', '.join(missing)}: the whole section rollout_matching.repeat_terminate must be given"
        )
    try:
        config = RepeatTerminateConfig.model_validate(data)
    except ValidationError as error:
        problems = [f"{dotted(p.path)}: {p.message}" for p in problems_from(error, RepeatTerminateConfig)]
        raise RolloutError(f"{source}: " + "; ".join(problems)) from error
    return config if config.enabled else None


def check_guard(
    workers: Sequence[Mapping[str, Any]] | None, wanted: RepeatTerminateConfig | None, where: str = "the server"
) -> None:
    """Raises RolloutError unless a server's workers, of its ``/status/``, guard their answers as configured (None or
    disabled: not at all). ``workers`` is None for a server without ``/status/``, which has no guard."""
    config = wanted.model_dump() if wanted is not None and wanted.enabled else None
    expected = {"active": config is not None, "config": config}
    if workers is None and config is None:
        return
    found = [status.get("repeat_terminate") or {"active": False, "config": None} for status in workers or ()]
    if not found or any(guard != expected for guard in found):
        raise RolloutError(
            f"{where}: rollout_matching.repeat_terminate is not active as configured: wanted {expected}, and its "
            f"workers report {found}. It is activated at the server's start, by {ACTIVATION_PATH}"
        )


def check_fits_guard(sampling_params: Any) -> None:
    """Raises ValueError if a request's ``SamplingParams`` may forbid the end token, which is all that the guard can
    force. With drafts no token would be left then, and vLLM would write the first one of the vocabulary."""
    for name in ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs"):
        if getattr(sampling_params, name):
            left_out = "response_format and structured_outputs" if name == "structured_outputs" else name
            raise ValueError(f"{name} and the repeat guard exclude each other; leave {left_out} out of the request")


def check_fits_drafts(sampling_params: Any) -> None:
    """Raises ValueError if a request's ``SamplingParams`` ask for what vLLM 0.32 does not compute for drafted tokens,
    beyond what it refuses itself: its answer would be an IndexError."""
    if sampling_params.logprob_token_ids is not None:
        raise ValueError("logprob_token_ids and skipped forced tokens exclude each other; leave logprob_token_ids out")


def refusal_of_owner(owners: Sequence[str | None], trainer: str) -> str | None:
    """Why ``trainer`` may not push: the owner of a worker's weight group is another one, which is connected. None if it
    may."""
    owner = next((one for one in owners if one is not None and one != trainer), None)
    if owner is None:
        return None
    return (
        f"this server belongs to {owner or 'a trainer without a name'}, which is connected, so {trainer or 'another'} "
        "cannot push its weights there. End that one, or wait for its end, or give each trainer its own servers"
    )


def check_processors(
    workers: Sequence[Mapping[str, Any]], guard: RepeatTerminateConfig | None, takes_class_names: bool
) -> None:
    """Raises RolloutError unless every worker (of a server's ``/status/``) applies the logits processors that it was
    started with; vLLM may drop them silently."""
    applied = {KNOWN_TOKENS_PROCESSOR: [one["num_known_tokens"] is not None for one in workers]}
    if takes_class_names:
        applied[CLASS_NAMES_PROCESSOR] = [one[CLASS_NAMES_STATUS] for one in workers]
    for processor, by_worker in applied.items():
        if not all(by_worker):
            raise RolloutError(
                f"worker {by_worker.index(False)} dropped the logits processor {processor}, so nothing would limit its "
                "answers; set VLLM_USE_V2_MODEL_RUNNER=0, and install tested versions of vLLM and ms-swift"
            )
    check_guard(workers, guard)
