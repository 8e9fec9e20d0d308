"""The repeat guard in real servers: tests that ``swift rollout`` and ``coordexp serve`` share.

Transformers answers without a guard; the guard, run offline on these answers, gives the end of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.trainer.server_backend import check_servers
from coordexp.engine.wire.arguments import check_guard
from coordexp.errors import RolloutError
from coordexp.modeling.load import LoadedModel
from coordexp.records import RolloutRequest
from support.config_samples import set_key, write_yaml
from support.rollout_servers import (
    GUARD,
    GUARDED_TOKENS,
    RunningServer,
    greedy_tokens,
    load_served,
    payload,
    requests_of,
)
from support.settings import first_trigger

SETTINGS = RepeatTerminateConfig(**GUARD)

Guarded = tuple[RunningServer, dict[str, Any]]


def answered(server: RunningServer, requests: list[RolloutRequest], **config: Any) -> list[dict[str, Any]]:
    client = server.client()
    try:
        return client.infer(payload(requests, GUARDED_TOKENS, **config))
    finally:
        client.close()


def tokens(item: dict[str, Any], loaded: LoadedModel) -> list[int]:
    """An answer without its end token."""
    ids = item["response"]["choices"][0]["token_ids"]
    return ids[:-1] if ids and ids[-1] == loaded.vocab.eos_id else ids


class GuardedServerContract:
    """Tests of every program that guards. A test file with a fixture ``guarded`` (its server, and the
    configuration of a trainer to it) inherits the tests; ``workers`` is how many it has."""

    workers = 1

    @pytest.fixture(scope="class")
    def loaded(self) -> LoadedModel:
        return load_served()

    @pytest.fixture(scope="class")
    def requests_(self, loaded: LoadedModel) -> list[RolloutRequest]:
        return requests_of(loaded, 12)

    @pytest.fixture(scope="class")
    def free(self, loaded: LoadedModel, requests_: list[RolloutRequest]) -> list[list[int]]:
        """Unguarded answers, by transformers."""
        return greedy_tokens(loaded, requests_, GUARDED_TOKENS)

    @pytest.mark.scenario("Offending sequence is terminated without batch abort")
    def test_a_repeating_answer_ends_and_its_batch_continues(
        self, guarded: Guarded, loaded: LoadedModel, requests_: list[RolloutRequest], free: list[list[int]]
    ) -> None:
        """One batch in which some answers repeat, at different steps, and some do not."""
        items = answered(guarded[0], requests_)
        expected = [first_trigger(answer, SETTINGS) for answer in free]
        assert None in expected and len({one.num_new_tokens for one in expected if one is not None}) > 1
        for item, without, trigger in zip(items, free, expected, strict=True):
            cut = len(without) if trigger is None else trigger.num_new_tokens
            assert tokens(item, loaded) == without[:cut]
            choice = item["response"]["choices"][0]
            ended = trigger is not None
            assert choice["finish_reason"] == ("stop" if ended else "length")
            assert item["coordexp"]["repeat_terminate_triggered"] == int(ended)
            assert not ended or choice["token_ids"][-1] == loaded.vocab.eos_id

    def test_flags_belong_to_their_sequence_in_any_split(
        self, guarded: Guarded, requests_: list[RolloutRequest], free: list[list[int]]
    ) -> None:
        """Each worker counts its own requests, so ids repeat; and a worker may get no request."""
        expected = [int(first_trigger(answer, SETTINGS) is not None) for answer in free]
        for size in (1, 3, len(requests_)):
            flags: list[int] = []
            for start in range(0, len(requests_), size):
                items = answered(guarded[0], requests_[start : start + size])
                flags += [item["coordexp"]["repeat_terminate_triggered"] for item in items]
            assert flags == expected

    @pytest.mark.scenario("vLLM V1 rollout does not rely on request-time logits processors")
    def test_the_server_guards_by_default(
        self, guarded: Guarded, loaded: LoadedModel, requests_: list[RolloutRequest], free: list[list[int]]
    ) -> None:
        """A request without any key of a guard is guarded, and every worker reports it."""
        server, _ = guarded
        client = server.client()
        plain = payload(requests_, GUARDED_TOKENS)
        assert not any("logits" in key or "repeat" in key for key in plain["request_config"])
        items = client.infer(plain)
        client.close()
        assert sum(item["coordexp"]["repeat_terminate_triggered"] for item in items) > 0
        assert sum(len(tokens(item, loaded)) for item in items) < sum(map(len, free))
        status = server.status()
        assert [one["repeat_terminate"]["active"] for one in status["workers"]] == [True] * self.workers
        check_guard(status["workers"], SETTINGS)

    @pytest.mark.scenario("Existing YAML enables repeat-aware behavior in vLLM mode")
    def test_the_guard_is_configured_only_by_the_yaml(self, guarded: Guarded, tmp_path: Path) -> None:
        """A configuration with the guard on, switched from hf to vllm: the server that it starts guards by its six
        keys, and a trainer with other thresholds, or with none, refuses that server before its first step."""
        _, config = guarded

        def rollout_of(config: dict[str, Any]) -> Any:
            return load_config(write_yaml(tmp_path, config)).rollout_matching

        assert rollout_of(set_key(config, "rollout_matching.rollout_backend", "hf")).repeat_terminate == SETTINGS
        check_servers(rollout_of(config), 1)
        for key, value in (("ngram_size", 21), ("max_object_keys", 3), ("enabled", False)):
            other = rollout_of(set_key(config, f"rollout_matching.repeat_terminate.{key}", value))
            with pytest.raises(RolloutError, match="not active as configured"):
                check_servers(other, 1)
