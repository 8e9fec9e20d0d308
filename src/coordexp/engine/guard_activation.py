"""How the repeat guard is switched on in a server: environment variables of the server process, set by its launcher.

The whole ``rollout_matching.repeat_terminate`` section travels as JSON, in one variable or in a file that a variable
names. Torch-free: the launcher writes what engine processes read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordexp.config.base import dotted, problems_from
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.errors import RolloutError

ENABLE = "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION"
CONFIG_JSON = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON"
CONFIG_JSON_PATH = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
ACTIVATION_PATH = (
    f"'swift rollout --external_plugins coordexp_rollout_plugin.py' or 'coordexp serve', started with {ENABLE}=1 and "
    f"{CONFIG_JSON} (or {CONFIG_JSON_PATH}); 'coordexp launch' does all of this"
)

# For vLLM's engine: the processor's class, and the key of a request's id in SamplingParams.extra_args.
GUARD_PROCESSOR = "coordexp.engine.logits_processors:RepeatTerminateProcessor"
REQUEST_KEY = "coordexp_request_id"

_OPTIONAL = {"max_object_keys"}


def activation_environment(config: RepeatTerminateConfig) -> dict[str, str]:
    """The variables that make a server guard its answers exactly as ``config`` says; none when it is disabled."""
    if not config.enabled:
        return {}
    return {ENABLE: "1", CONFIG_JSON: config.model_dump_json()}


def activated_config(environment: Mapping[str, str]) -> RepeatTerminateConfig | None:
    """The guard's configuration in a server's environment; None if the guard is off.

    Raises:
        RolloutError: the configuration is missing or incomplete. No defaults are filled in: thresholds other than the
            trainer's would give other answers.
    """
    switch = environment.get(ENABLE, "0")
    if switch not in ("0", "1"):
        raise RolloutError(f"{ENABLE}={switch!r}: write 1 to guard answers against repetition, or 0")
    if switch == "0":
        return None
    source, text = _configuration_text(environment)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RolloutError(f"{source} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RolloutError(f"{source} must hold the mapping rollout_matching.repeat_terminate, not {text[:60]!r}")
    missing = [key for key in RepeatTerminateConfig.model_fields if key not in data and key not in _OPTIONAL]
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


def check_guard(workers: Sequence[Mapping[str, Any]], wanted: RepeatTerminateConfig | None) -> None:
    """Compare the guard that a server's workers really apply with the configuration's (None or disabled: none).

    Args:
        workers: the ``workers`` of a server's ``/status/``.

    Raises:
        RolloutError: naming the missing activation path. Nothing may be trained on such a server's answers.
    """
    expected = wanted.model_dump() if wanted is not None and wanted.enabled else None
    if not workers:
        raise RolloutError("the server's status names no worker, so it is unknown whether repeat_terminate is active")
    for number, status in enumerate(workers):
        guard = status.get("repeat_terminate") or {"active": False, "config": None}
        if guard["active"] != (expected is not None) or guard["config"] != expected:
            raise RolloutError(
                f"rollout_matching.repeat_terminate is not active as configured: wanted {expected}, but worker "
                f"{number} has {guard}. It is activated at the server's start, by {ACTIVATION_PATH}"
            )


def _configuration_text(environment: Mapping[str, str]) -> tuple[str, str]:
    """The source of the configuration, and its text."""
    text, path = environment.get(CONFIG_JSON), environment.get(CONFIG_JSON_PATH)
    if text is not None and path is not None:
        raise RolloutError(f"{CONFIG_JSON} and {CONFIG_JSON_PATH} are both set; set one of them")
    if text is not None:
        return CONFIG_JSON, text
    if path is None:
        raise RolloutError(f"{ENABLE}=1, but neither {CONFIG_JSON} nor {CONFIG_JSON_PATH} is set")
    try:
        return f"{CONFIG_JSON_PATH} ({path})", Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutError(f"{CONFIG_JSON_PATH} ({path}) cannot be read: {error}") from error
