"""Adapter pushes into a real colocated engine: exact where vLLM adapts, merged weights for good where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config import resolved_rollout
from coordexp.data.images import open_rgb
from coordexp.engine.colocated import ColocatedBackend
from coordexp.errors import RolloutError
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.tiny import build_tiny_checkpoint
from coordexp.modeling.weights import LearnerWeights
from coordexp.rollouts import SeedContext, build_backend, rollout_session
from coordexp.rollouts.learner import LearnerParts
from support import tuned_models
from support.rollout_servers import SPEC, greedy_tokens, load_served, requests_of, served_checkpoint, sharpen
from support.vllm_runs import COLOCATED, vllm_config

SEEDS = SeedContext(1, 0, 0, 0)
TOKENS = 12
ADAPTERS: dict[str, Any] = {
    "tuner__train_type": "lora",
    "tuner__train_coord_rows": False,
    "tuner__lora_rank": 4,
    "rollout_matching__vllm__enable_lora": True,
    "rollout_matching__vllm__sync__mode": "adapter",
    "rollout_matching__max_new_tokens": TOKENS,
}


@contextmanager
def colocated(
    learner: LoadedModel, folder: Path, checkpoint: Path | None = None, **keys: Any
) -> Iterator[ColocatedBackend]:
    config = vllm_config(folder, **COLOCATED | keys)
    parts = LearnerParts(
        model=learner.model, vocab=learner.vocab, image_token_id=learner.image_token_id,
        weights=LearnerWeights(learner.model), checkpoint=checkpoint or served_checkpoint(), open_image=open_rgb,
    )  # fmt: skip
    backend = build_backend(resolved_rollout(config), parts)
    assert isinstance(backend, ColocatedBackend)
    try:
        yield backend
    finally:
        backend.close()


def answers(backend: ColocatedBackend, learner: LoadedModel, version: int) -> list[list[int]]:
    with rollout_session(backend, version):
        rollouts = backend.generate(requests_of(learner, 3), SEEDS)
    assert {rollout.weight_version for rollout in rollouts} == {version}
    return [list(rollout.response_token_ids) for rollout in rollouts]


def expected(learner: LoadedModel) -> list[list[int]]:
    eos = learner.vocab.eos_id
    found = greedy_tokens(learner, requests_of(learner, 3), TOKENS)
    return [ids[: ids.index(eos)] if eos in ids else ids for ids in found]


def test_an_adapter_alone_makes_the_engines_answers_the_learners(tmp_path: Path) -> None:
    config = tuned_models.lora(train_coord_rows=False, freeze_vit=True, freeze_aligner=True)
    learner = tuned_models.tuned(config, checkpoint=served_checkpoint())
    with colocated(
        learner, tmp_path, None, **ADAPTERS | {"rollout_matching__vllm__sync__fallback_to_full": False}
    ) as backend:
        own = {name: parameter.detach().clone() for name, parameter in learner.model.named_parameters()}
        before = answers(backend, learner, 1)
        assert all(torch.equal(parameter, own[name]) for name, parameter in learner.model.named_parameters())
        assert before == expected(learner) != expected(load_served())
        tuned_models.randomise(learner.model, 8)  # the same adapter after another step, for the same prompts
        assert answers(backend, learner, 2) == expected(learner) != before
        assert backend.last_report()["sync_mode"] == "adapter"


def test_an_adapter_that_the_engine_would_ignore_means_merged_weights_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reaches the vision tower."""
    learner = tuned_models.tuned(tuned_models.lora(train_coord_rows=False), checkpoint=served_checkpoint())
    with colocated(learner, tmp_path, None, **ADAPTERS) as backend:
        with caplog.at_level(logging.WARNING, logger="coordexp"):
            assert answers(backend, learner, 3) == expected(learner)
        assert "pushes are full from here on" in caplog.text
        (event,) = backend.last_report()["fallbacks"]
        assert event.startswith("version 3: ") and "vision tower" in event
        assert backend.take_metrics()["rollout/sync_fallbacks_total"] == 1
        tuned_models.randomise(learner.model, 9)
        assert answers(backend, learner, 4) == expected(learner)
        report = backend.last_report()
        assert (report["sync_mode"], report["fallbacks"]) == ("full", [event])
        assert "rollout/sync_fallbacks_total" not in backend.take_metrics()


def test_without_fallback_such_an_adapter_is_an_error(tmp_path: Path) -> None:
    learner = tuned_models.tuned(tuned_models.lora(train_coord_rows=False), checkpoint=served_checkpoint())
    keys = ADAPTERS | {"rollout_matching__vllm__sync__fallback_to_full": False}
    with (
        colocated(learner, tmp_path, None, **keys) as backend,
        pytest.raises(RolloutError, match=r"vision tower.*sync\.mode: full"),
        rollout_session(backend, 1),
    ):
        pass


def test_a_language_head_of_its_own_is_pushed_too(tmp_path: Path) -> None:
    """Untied, as large checkpoints are: with a tied head the embedding's push would hide a head that stayed behind."""
    checkpoint = build_tiny_checkpoint(tmp_path / "untied", seed=6, spec=replace(SPEC, tied=False))
    learner = load_served(checkpoint)
    sharpen(learner.model)
    assert "lm_head.weight" in LearnerWeights(learner.model).names()
    with colocated(learner, tmp_path, checkpoint, rollout_matching__max_new_tokens=TOKENS) as backend:
        before = answers(backend, learner, 1)
        assert before == expected(learner)
        with torch.no_grad():
            learner.model.lm_head.weight.copy_(learner.model.lm_head.weight.flip(0))  # nothing else changes
        assert answers(backend, learner, 2) == expected(learner) != before
