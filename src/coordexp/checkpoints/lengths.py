"""Lengths in a configuration against the positions of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coordexp.checkpoints.folder import Checkpoint
from coordexp.config.schema import AnswerConfig, RunConfig
from coordexp.errors import CheckpointError, ConfigError

_RM = "rollout_matching"


def num_positions(checkpoint: str | Path | Checkpoint) -> int | None:
    """As :attr:`Checkpoint.num_positions`; None also for a checkpoint that cannot be read, which loading reports."""
    try:
        return Checkpoint.open(checkpoint).num_positions
    except CheckpointError:
        return None


def check_lengths(config: RunConfig | AnswerConfig, checkpoint: str | Path | Checkpoint | None = None) -> None:
    """Refuse lengths that ``checkpoint`` (None for ``model.model``) does not support, before an engine starts.

    Raises:
        ConfigError: with every such key, its value and the limit.
    """
    checkpoint = checkpoint or config.model.model
    limit = num_positions(checkpoint)
    if limit is not None and (problems := list(_beyond(config, limit))):
        name = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
        of = f"{name} knows {limit} positions (max_position_embeddings in its config.json)"
        raise ConfigError("\n".join(f"{problem}: {of}" for problem in problems))


def length_advice(config: RunConfig) -> Iterator[str]:
    """A row may be longer than the positions, which restart with each sample in it; a sample may not."""
    limit = num_positions(config.model.model)
    if limit is not None and config.global_max_length > limit:
        yield (
            f"global_max_length: {config.global_max_length} is more than the {limit} positions of {config.model.model} "
            "(max_position_embeddings); a longer sample is trained at positions that the model has never seen. Write "
            f"{limit} or less"
        )


def _beyond(config: RunConfig | AnswerConfig, limit: int) -> Iterator[str]:
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
