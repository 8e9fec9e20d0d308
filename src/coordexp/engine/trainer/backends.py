"""Which backend writes the answers: transformers in the trainer, a vLLM engine in its process, or vLLM servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordexp import distributed
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.wire.engine_process import has_gpu
from coordexp.errors import WITH_VLLM, MissingDependency, RolloutError
from coordexp.rollouts.backend import RolloutBackend, decoding_options

if TYPE_CHECKING:
    from coordexp.rollouts.backend import TrainerParts


def check_backend(config: RolloutMatchingConfig, with_class_names: bool = False) -> None:
    """Refuse a backend that cannot run here, before anything is loaded. ``with_class_names``: answers are limited to
    a list of class names.

    Raises:
        MissingDependency: vLLM is not installed. RolloutError, ConfigError: servers do not answer, or are too few; a
            colocated engine would wait for processes that do not exist.
    """
    if config.rollout_backend != "vllm":
        return
    if config.vllm.mode == "colocate":
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependency(
                "rollout_matching.rollout_backend: vllm needs the package 'vllm', which is not installed; "
                f"{WITH_VLLM}, or write rollout_backend: hf"
            )
        size, processes = config.vllm.tensor_parallel_size, distributed.world_size()
        if processes % size:
            raise RolloutError(
                f"rollout_matching.vllm.tensor_parallel_size is {size}: a colocated engine spans that many processes, "
                f"and there are {processes}; write 1, or start a multiple of {size} with torchrun"
            )
        return
    from coordexp.engine.trainer.server_backend import check_servers

    check_servers(config, distributed.world_size(), with_class_names)


def build_backend(
    config: RolloutMatchingConfig, trainer: TrainerParts, class_names: Sequence[str] = ()
) -> RolloutBackend:
    """Build the backend of the resolved ``config``. Engines start with the first weight push. ``class_names``: those
    that answers may use; empty for any. Raises RolloutError for an adapter that engines would not apply, if
    ``sync.fallback_to_full`` is off."""
    options = decoding_options(config)
    if config.rollout_backend == "hf":
        from coordexp.rollouts.hf import HFBackend

        return HFBackend(
            trainer.model,
            trainer.vocab,
            options,
            config.decode_batch_size,
            trainer.image_token_id,
            config.repeat_terminate,
            class_names,
            skip_forced_tokens=config.skips_forced_tokens(has_gpu()),
        )
    sync = config.vllm.sync
    if sync.settled_mode == "adapter" and not sync.fallback_to_full:  # else the first push becomes a full one
        from coordexp.engine.trainer.push import pushable

        with distributed.raise_on_all_ranks("rollout_matching.vllm.sync.mode"):
            pushable(trainer.weights)
    if config.vllm.mode == "server":
        from coordexp.engine.trainer.server_backend import ServerBackend

        return ServerBackend(config, trainer, options, class_names)
    from coordexp.engine.trainer.colocated import ColocatedBackend

    return ColocatedBackend(config, trainer, options, class_names)
