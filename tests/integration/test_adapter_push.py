"""Adapter pushes to a real ``coordexp serve`` with ``enable_lora``: exact where vLLM adapts, full where it cannot."""

from __future__ import annotations

import logging

import httpx
import pytest

from coordexp.engine.trainer.client import ServerClient
from coordexp.errors import RolloutError
from coordexp.modeling.load import LoadedModel
from support import tuned_models
from support.rollout_servers import (
    RunningServer,
    greedy_tokens,
    openai_payload,
    pushing,
    requests_of,
    served_checkpoint,
    served_tokens,
)

LLM_ONLY = {"freeze_vit": True, "freeze_aligner": True}


def trainer_of(**tuner: bool) -> LoadedModel:
    return tuned_models.tuned(tuned_models.lora(**tuner), checkpoint=served_checkpoint())


# The order matters here: on a server that has once received full weights, adapters no longer fit.
@pytest.mark.parametrize("rows", [False, True], ids=["lora", "lora and coordinate rows"])
def test_answers_after_an_adapter_push_are_the_trainers(
    server: RunningServer, client: ServerClient, rows: bool
) -> None:
    trainer = trainer_of(train_coord_rows=rows, **LLM_ONLY)
    requests = requests_of(trainer, 3)
    with pushing(client, trainer, mode="adapter", fallback_to_full=False) as sync:
        first = sync.push(1)
        old_answers = greedy_tokens(trainer, requests)
        assert served_tokens(client, requests) == old_answers
        tuned_models.randomise(trainer.model, 8)  # the same adapter after another step, for the same prompts
        second = sync.push(2)
    new_answers = greedy_tokens(trainer, requests)
    assert new_answers != old_answers
    assert served_tokens(client, requests) == new_answers
    url = f"{server.base_url}/v1/chat/completions"
    openai = httpx.post(url, json=openai_payload(requests[0]), trust_env=False, timeout=60.0).json()
    assert openai["choices"][0]["token_ids"] == new_answers[0]
    assert (first.mode, second.mode, second.fallback) == ("adapter", "adapter", None)
    whole = sum(parameter.numel() * 4 for parameter in trainer.model.parameters())
    assert 0 < second.bytes < whole
    status = client.status()
    assert status is not None and status["adapter"] and status["weight_version"] == 2


def test_an_adapter_that_vllm_ignores_is_an_error_without_fallback(client: ServerClient) -> None:
    trainer = trainer_of(train_coord_rows=False)
    with (
        pushing(client, trainer, mode="adapter", fallback_to_full=False) as sync,
        pytest.raises(RolloutError, match=r"vision tower.*sync\.mode: full"),
    ):
        sync.push(3)


@pytest.mark.scenario("Adapter sync can fall back to full sync")
@pytest.mark.parametrize(
    ("tuner", "reason"),
    [
        pytest.param({"train_coord_rows": False, "use_dora": True, **LLM_ONLY}, "DoRA", id="refused by the engine"),
        pytest.param({"train_coord_rows": False}, "vision tower", id="refused by the trainer"),
    ],
)
def test_after_a_failed_adapter_push_all_pushes_are_full(
    client: ServerClient, caplog: pytest.LogCaptureFixture, tuner: dict[str, bool], reason: str
) -> None:
    trainer = trainer_of(**tuner)
    requests = requests_of(trainer, 2)
    with pushing(client, trainer, mode="adapter") as sync:
        with caplog.at_level(logging.WARNING):
            first = sync.push(4)
        assert (first.mode, sync.mode) == ("full", "full")
        assert first.fallback is not None and reason in first.fallback
        assert "pushes are full from here on" in caplog.text
        assert served_tokens(client, requests) == greedy_tokens(trainer, requests)
        tuned_models.randomise(trainer.model, 9)
        second = sync.push(5)
        assert (second.mode, second.fallback) == ("full", None)
        assert served_tokens(client, requests) == greedy_tokens(trainer, requests)
    status = client.status()
    assert status is not None and not status["adapter"]


def test_an_adapter_push_onto_merged_weights_is_refused(client: ServerClient) -> None:
    trainer = trainer_of(train_coord_rows=False, **LLM_ONLY)
    with pushing(client, trainer) as full:
        full.push(6)
    with (
        pushing(client, trainer, mode="adapter", fallback_to_full=False) as sync,
        pytest.raises(RolloutError, match="an earlier push of full weights"),
    ):
        sync.push(7)
