"""Configuration → rollout backend."""

from __future__ import annotations

from typing import Any

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.errors import ConfigError
from coordexp.rollouts.backend import DecodingOptions, RolloutBackend


def decoding_options(config: RolloutMatchingConfig) -> DecodingOptions:
    """The decoding part of the section, as values."""
    return DecodingOptions(
        max_new_tokens=config.max_new_tokens,
        temperature=config.decoding.temperature,
        top_p=config.decoding.top_p,
        top_k=config.decoding.top_k,
        num_beams=config.num_beams,
        repetition_penalty=config.repetition_penalty,
    )


def check_backend(config: RolloutMatchingConfig) -> None:
    """Refuse a backend that this version cannot build, before anything is loaded.

    Raises:
        ConfigError: with the key and the alternative.
    """
    if config.rollout_backend != "hf":
        raise ConfigError(
            f"rollout_matching.rollout_backend: {config.rollout_backend} (mode {config.vllm.mode}) is not part of this "
            "version yet; write rollout_backend: hf"
        )


def build_backend(
    config: RolloutMatchingConfig, *, model: Any, vocab: CoordVocab, image_token_id: int
) -> RolloutBackend:
    """The backend that ``config`` names. ``model`` is the learner's bare model (no DDP wrapper)."""
    check_backend(config)
    from coordexp.rollouts.hf import HFBackend

    return HFBackend(
        model, vocab, decoding_options(config), config.decode_batch_size, image_token_id, config.repeat_terminate
    )
