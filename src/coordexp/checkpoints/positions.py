"""How many positions a checkpoint knows, and the lengths that a configuration asks of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coordexp.checkpoints.folder import base_checkpoint
from coordexp.config import RunConfig
from coordexp.errors import CheckpointError, ConfigError

_RM = "rollout_matching"


def num_positions(checkpoint: str | Path) -> int | None:
    """Longest text of a checkpoint, in tokens, stretched rotary embeddings counted in as vLLM counts them: no engine
    starts with more. None where its configuration does not say; loading reports what is wrong with the file.
    """
    try:
        folder = base_checkpoint(checkpoint)
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text: Mapping[str, Any] = content.get("text_config") or content
        positions = int(text["max_position_embeddings"])
        rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if rope.get("rope_type") == "yarn":  # its factor is of the length before it was stretched
            positions = int(rope.get("original_max_position_embeddings") or positions)
        return int(positions * float(rope.get("factor") or 1.0))
    except (CheckpointError, OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def check_lengths(config: RunConfig, checkpoint: str | Path | None = None) -> None:
    """Refuse lengths that ``checkpoint`` cannot have, which an engine would say minutes later, and in other words. None
    stands for ``model.model``.

    Raises:
        ConfigError: with every such key, its value and the limit.
    """
    checkpoint = checkpoint or config.model.model
    limit = num_positions(checkpoint)
    if limit is not None and (problems := list(_beyond(config, limit))):
        of = f"{checkpoint} knows {limit} positions (max_position_embeddings in its config.json)"
        raise ConfigError("\n".join(f"{problem}: {of}" for problem in problems))


def length_advice(config: RunConfig) -> Iterator[str]:
    """A row may be longer than the positions, which start anew with each sample in it; a sample may not."""
    limit = num_positions(config.model.model)
    if limit is not None and config.global_max_length > limit:
        yield (
            f"global_max_length: {config.global_max_length} is more than the {limit} positions of {config.model.model} "
            "(max_position_embeddings); a sample that is longer than these is trained at positions that the model does "
            f"not know. Write {limit} or less"
        )


def _beyond(config: RunConfig, limit: int) -> Iterator[str]:
    rollout = config.rollout_matching
    if rollout is None:
        return
    if rollout.max_new_tokens >= limit:
        yield f"{_RM}.max_new_tokens: {rollout.max_new_tokens} leaves no room for a prompt; write less than {limit}"
    if rollout.rollout_backend != "vllm":
        return
    if rollout.vllm.max_model_len is not None and rollout.vllm.max_model_len > limit:
        yield (
            f"{_RM}.vllm.max_model_len: {rollout.vllm.max_model_len} is more than an engine can have; write {limit} or "
            "less"
        )
    elif rollout.vllm.max_model_len is None and config.global_max_length > limit:
        yield (
            f"global_max_length: {config.global_max_length} is more than an engine can have, and "
            f"{_RM}.vllm.max_model_len is null, which takes it; write {limit} or less"
        )
