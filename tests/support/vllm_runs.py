"""Training runs of the tiny model whose answers come from real vLLM engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordexp.config import RunConfig, resolved_rollout
from coordexp.data.images import open_rgb
from coordexp.engine.colocated import ColocatedBackend
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.weights import LearnerWeights
from coordexp.rollouts import build_backend
from coordexp.rollouts.learner import LearnerParts
from support.rollout_servers import served_checkpoint
from support.tiny_run import run_config

COLOCATED: dict[str, Any] = {
    "rollout_matching__rollout_backend": "vllm",
    "rollout_matching__vllm__tensor_parallel_size": 1,
    "rollout_matching__vllm__gpu_memory_utilization": 0.02,
    "rollout_matching__vllm__enforce_eager": True,
}


def vllm_config(folder: Path, name: str = "run", /, **keys: Any) -> RunConfig:
    """As :func:`tiny_run.run_config` of stage 2, with a model that vLLM's CPU kernels can run."""
    return run_config(folder, 2, name, model__model=str(served_checkpoint()), **keys)


def colocated(learner: LoadedModel, folder: Path, open_image: Any = open_rgb, **keys: Any) -> ColocatedBackend:
    """A backend whose engine, not yet started, will live in this process."""
    config = vllm_config(folder, **COLOCATED | keys)
    parts = LearnerParts(
        model=learner.model, vocab=learner.vocab, image_token_id=learner.image_token_id,
        weights=LearnerWeights(learner.model), checkpoint=served_checkpoint(), open_image=open_image,
    )  # fmt: skip
    backend = build_backend(resolved_rollout(config), parts)
    assert isinstance(backend, ColocatedBackend)
    return backend


def server_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of :func:`rollout_servers.server_config` that a learner of those servers needs."""
    vllm = config["rollout_matching"]["vllm"]
    return {
        "rollout_matching__rollout_backend": "vllm",
        "rollout_matching__vllm__mode": "server",
        "rollout_matching__vllm__tensor_parallel_size": 1,
        "rollout_matching__vllm__server": vllm["server"],
        "rollout_matching__vllm__sync": vllm["sync"],
    }
