"""LoRA runs and a real vLLM engine: merged checkpoints load, merged pushes arrive, the learner makes room meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import coordexp.training.offload as offload_module
from coordexp.config import resolved_rollout
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.data.images import open_rgb
from coordexp.engine.colocated import ColocatedBackend
from coordexp.modeling.adapter import save_adapter
from coordexp.modeling.load import LoadedModel, merge_checkpoint
from coordexp.modeling.weights import LearnerWeights
from coordexp.rollouts import SeedContext, build_backend, rollout_session
from coordexp.rollouts.learner import LearnerParts
from coordexp.training.offload import LearnerOffload
from support.rollout_servers import greedy_tokens, load_served, requests_of, served_checkpoint
from support.tiny_run import same_weights, step_lines, train, weights
from support.tuned_models import lora, tuned
from support.vllm_runs import COLOCATED, vllm_config

SEEDS = SeedContext(1, 0, 0, 0)
TOKENS = 12
LORA = {"tuner__train_type": "lora", "tuner__lora_rank": 4, "tuner__use_dora": True, "tuner__lora_dropout": 0.0}
OFFLOAD = {"enabled": True, "offload_model": True, "offload_optimizer": True}


@pytest.fixture(scope="module")
def learner() -> LoadedModel:
    return tuned(lora(use_dora=True), checkpoint=served_checkpoint())


@pytest.fixture(scope="module")
def merged(learner: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    save_adapter(learner.model, folder / "run")
    return merge_checkpoint(folder / "run", folder / "plain")


@pytest.fixture(scope="module")
def backend(learner: LoadedModel, merged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedBackend]:
    """An engine that starts from the merged folder and has had no push yet."""
    config = vllm_config(tmp_path_factory.mktemp("run"), rollout_matching__max_new_tokens=TOKENS, **COLOCATED)
    parts = LearnerParts(
        model=learner.model, vocab=learner.vocab, image_token_id=learner.image_token_id,
        weights=LearnerWeights(learner.model), checkpoint=merged, open_image=open_rgb,
    )  # fmt: skip
    backend = build_backend(resolved_rollout(config), parts)
    assert isinstance(backend, ColocatedBackend)
    backend._wake()
    yield backend
    backend.close()


def answers(backend: ColocatedBackend, learner: LoadedModel) -> list[list[int]]:
    return [list(r.response_token_ids) for r in backend.generate(requests_of(learner, 4), SEEDS)]


def expected(loaded: LoadedModel) -> list[list[int]]:
    eos = loaded.vocab.eos_id
    found = greedy_tokens(loaded, requests_of(loaded, 4), TOKENS)
    return [ids[: ids.index(eos)] if eos in ids else ids for ids in found]


def test_vllm_loads_a_merged_checkpoint_and_answers_as_the_run_does(
    backend: ColocatedBackend, learner: LoadedModel
) -> None:
    assert answers(backend, learner) == expected(learner)
    assert expected(learner) != expected(load_served()), "the adapters must matter"


def test_merged_weights_arrive_from_a_running_learner(backend: ColocatedBackend, learner: LoadedModel) -> None:
    before = answers(backend, learner)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    with rollout_session(backend, 1):
        assert answers(backend, learner) == expected(learner) != before


@pytest.mark.scenario("Offload context does not break the training step")
def test_a_learner_that_makes_room_for_the_engine_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU everything is in main memory already: here it moves as if that were a device."""
    built: list[LearnerOffload] = []
    away: list[bool] = []

    def build(model: Any, rollout: RolloutMatchingConfig) -> LearnerOffload:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # those read from a file are views of it
        built.append(LearnerOffload(model, rollout.offload, stays=lambda tensor: False))
        return built[0]

    run = ColocatedBackend.generate_window

    def watched(self: ColocatedBackend, rounds: Any) -> Any:
        away.append(built[0].is_away)
        return run(self, rounds)

    keys = LORA | {"training__optim": "adamw_torch", "training__max_steps": 2}
    own = train(vllm_config(tmp_path, "own", **keys))
    monkeypatch.setattr(offload_module, "build_offload", build)
    monkeypatch.setattr(ColocatedBackend, "generate_window", watched)
    by_vllm = train(vllm_config(tmp_path, "colocated", rollout_matching__offload=OFFLOAD, **COLOCATED, **keys))
    try:
        assert away == [True, True] and not built[0].is_away
        assert [line["loss"] for line in step_lines(by_vllm)] == [line["loss"] for line in step_lines(own)]
        assert same_weights(weights(by_vllm.model), weights(own.model))
    finally:
        by_vllm.close()
