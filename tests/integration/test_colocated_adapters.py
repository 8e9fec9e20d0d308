"""Adapters and a real colocated engine: exact where vLLM supports them, merged weights where it does not."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import coordexp.training.run as run_module
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.modeling.adapter import save_adapter
from coordexp.modeling.load import LoadedModel, merge_checkpoint
from coordexp.modeling.tiny import build_tiny_checkpoint
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.rollouts import SeedContext, rollout_session
from coordexp.training.offload import TrainerOffload
from support.rollout_servers import (
    COLOCATED,
    SPEC,
    colocated,
    greedy_answers,
    load_served,
    requests_of,
    served_checkpoint,
    sharpen,
    vllm_config,
)
from support.tiny_run import same_weights, step_lines, train, weights
from support.tuned_models import lora, randomise, tuned

TOKENS = 12
ADAPTERS: dict[str, Any] = {
    "tuner__train_type": "lora",
    "tuner__train_coord_rows": False,
    "tuner__lora_rank": 4,
    "rollout_matching__vllm__enable_lora": True,
    "rollout_matching__vllm__sync__mode": "adapter",
}
LORA = {"tuner__train_type": "lora", "tuner__lora_rank": 4, "tuner__use_dora": True, "tuner__lora_dropout": 0.0}
OFFLOAD = {"enabled": True, "offload_model": True, "offload_optimizer": True}


def backend_of(trainer: LoadedModel, folder: Path, **keys: Any) -> Any:
    return closing(colocated(trainer, folder, rollout_matching__max_new_tokens=TOKENS, **keys))


def answers(backend: ColocatedBackend, trainer: LoadedModel, version: int) -> list[list[int]]:
    with rollout_session(backend, version):
        rollouts = backend.generate(requests_of(trainer, 3), SeedContext(1, 0, 0, 0))
    assert {rollout.weight_version for rollout in rollouts} == {version}
    return [list(rollout.response_token_ids) for rollout in rollouts]


def expected(trainer: LoadedModel) -> list[list[int]]:
    return greedy_answers(trainer, requests_of(trainer, 3), TOKENS)


def test_answers_after_an_adapter_push_are_the_trainers(tmp_path: Path) -> None:
    config = lora(train_coord_rows=False, freeze_vit=True, freeze_aligner=True)
    trainer = tuned(config, checkpoint=served_checkpoint())
    strict = {"rollout_matching__vllm__sync__fallback_to_full": False}
    frozen = {"tuner__freeze_vit": True, "tuner__freeze_aligner": True}
    with backend_of(trainer, tmp_path, **ADAPTERS, **strict, **frozen) as backend:
        own = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        before = answers(backend, trainer, 1)
        assert all(torch.equal(parameter, own[name]) for name, parameter in trainer.model.named_parameters())
        assert before == expected(trainer) != expected(load_served())
        randomise(trainer.model, 8)  # the same adapter after another step, for the same prompts
        assert answers(backend, trainer, 2) == expected(trainer) != before
        assert backend.last_report()["sync_mode"] == "adapter"


def test_an_untied_language_head_is_pushed_too(tmp_path: Path) -> None:
    """Large checkpoints are untied; with a tied head the embedding's push would hide that the head was not pushed."""
    checkpoint = build_tiny_checkpoint(tmp_path / "untied", seed=6, spec=replace(SPEC, tied=False))
    trainer = load_served(checkpoint)
    sharpen(trainer.model)
    assert "lm_head.weight" in TrainerWeights(trainer.model).names()
    with backend_of(trainer, tmp_path, checkpoint=checkpoint) as backend:
        before = answers(backend, trainer, 1)
        assert before == expected(trainer)
        with torch.no_grad():
            trainer.model.lm_head.weight.copy_(trainer.model.lm_head.weight.flip(0))  # nothing else changes
        assert answers(backend, trainer, 2) == expected(trainer) != before


def test_vllm_loads_a_merged_checkpoint(tmp_path: Path) -> None:
    """The engine starts from the merged folder and gets no push."""
    trainer = tuned(lora(use_dora=True), checkpoint=served_checkpoint())
    save_adapter(trainer.model, tmp_path / "run")
    merged = merge_checkpoint(tmp_path / "run", tmp_path / "plain")
    with backend_of(trainer, tmp_path, checkpoint=merged) as backend:
        backend.engine = backend.start_engine()
        rollouts = backend.generate(requests_of(trainer, 3), SeedContext(1, 0, 0, 0))
    assert [list(rollout.response_token_ids) for rollout in rollouts] == expected(trainer)
    assert expected(trainer) != expected(load_served()), "the adapters must change the answers"


@pytest.mark.scenario("Offload context does not break the training step")
def test_offloading_for_the_engine_does_not_change_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU everything is in main memory already: the trainer is moved as if that were a device."""
    built: list[TrainerOffload] = []
    away: list[bool] = []

    def build(model: Any, rollout: RolloutMatchingConfig) -> TrainerOffload:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # those read from a file are views of it
        built.append(TrainerOffload(model, rollout.offload, stays=lambda tensor: False))
        return built[0]

    run = ColocatedBackend.generate_rounds

    def watched(self: ColocatedBackend, rounds: Any) -> Any:
        away.append(built[0].is_away)
        return run(self, rounds)

    keys = LORA | {"training__optim": "adamw_torch", "training__max_steps": 2}
    own = train(vllm_config(tmp_path, "own", **keys))
    monkeypatch.setattr(run_module, "build_offload", build)
    monkeypatch.setattr(ColocatedBackend, "generate_rounds", watched)
    by_vllm = train(vllm_config(tmp_path, "colocated", rollout_matching__offload=OFFLOAD, **COLOCATED, **keys))
    try:
        assert away == [True, True] and not built[0].is_away
        assert [line["loss"] for line in step_lines(by_vllm)] == [line["loss"] for line in step_lines(own)]
        assert same_weights(weights(by_vllm.model), weights(own.model))
    finally:
        by_vllm.close()
