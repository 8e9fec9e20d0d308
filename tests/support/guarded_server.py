"""The repeat guard in real servers: what ``swift rollout`` and ``coordexp serve`` have in common.

Both are asked what transformers answers without a guard; the guard, asked offline, says where each answer must end.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.arguments import check_guard
from coordexp.engine.server_backend import check_servers
from coordexp.errors import RolloutError
from coordexp.modeling.load import LoadedModel
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend
from support.guards import first_trigger
from support.rollout_servers import RunningServer, greedy_tokens, is_alive, load_served, payload
from support.settings import decoding
from support.swift_servers import GUARD, GUARDED_TOKENS
from support.tiny_run import tiny_samples

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
    """What holds of every program that guards. A test file with a fixture ``guarded`` (its server, and the
    configuration of a learner to it) inherits the tests; ``workers`` is how many it has."""

    workers = 1

    @pytest.fixture(scope="class")
    def loaded(self) -> LoadedModel:
        return load_served()

    @pytest.fixture(scope="class")
    def requests_(self, loaded: LoadedModel) -> list[RolloutRequest]:
        """Images that ms-swift leaves at their size: it enlarges those under 4,096 pixels."""
        return [sample.request for sample in tiny_samples(loaded, 12) if sample.record.width >= 64]

    @pytest.fixture(scope="class")
    def free(self, loaded: LoadedModel, requests_: list[RolloutRequest]) -> list[list[int]]:
        """Unguarded answers, by transformers."""
        return greedy_tokens(loaded, requests_, GUARDED_TOKENS)

    @pytest.mark.scenario("Offending sequence is terminated without batch abort")
    def test_a_repeating_answer_ends_at_its_step_and_its_neighbours_go_on(
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

    def test_transformers_and_servers_agree_token_for_token(
        self, guarded: Guarded, loaded: LoadedModel, requests_: list[RolloutRequest]
    ) -> None:
        """The same section of the YAML, three engines."""
        backend = HFBackend(
            loaded.model, loaded.vocab, decoding(GUARDED_TOKENS), len(requests_), loaded.image_token_id, SETTINGS
        )
        own = backend.generate(requests_, SeedContext(0, 0, 0, 0))
        for item, rollout in zip(answered(guarded[0], requests_), own, strict=True):
            assert tuple(tokens(item, loaded)) == rollout.response_token_ids
            assert bool(item["coordexp"]["repeat_terminate_triggered"]) == rollout.repeat_terminated

    def test_flags_belong_to_their_sequence_whatever_the_split(
        self, guarded: Guarded, requests_: list[RolloutRequest], free: list[list[int]]
    ) -> None:
        """Workers count their requests by themselves, so equal ids meet; and a worker may get nothing."""
        expected = [int(first_trigger(answer, SETTINGS) is not None) for answer in free]
        for size in (1, 3, len(requests_)):
            flags: list[int] = []
            for start in range(0, len(requests_), size):
                items = answered(guarded[0], requests_[start : start + size])
                flags += [item["coordexp"]["repeat_terminate_triggered"] for item in items]
            assert flags == expected

    @pytest.mark.scenario("vLLM V1 rollout does not rely on request-time logits processors")
    def test_the_guard_is_the_servers_own(
        self, guarded: Guarded, loaded: LoadedModel, requests_: list[RolloutRequest], free: list[list[int]]
    ) -> None:
        """The request of a client that knows nothing of a guard is guarded all the same, and every worker says so."""
        server, _ = guarded
        client = server.client()
        plain = payload(requests_, GUARDED_TOKENS)
        assert not any("logits" in key or "repeat" in key for key in plain["request_config"])
        items = client.infer(plain)
        assert sum(item["coordexp"]["repeat_terminate_triggered"] for item in items) > 0
        assert sum(len(tokens(item, loaded)) for item in items) < sum(map(len, free))
        status = client.status()
        client.close()
        assert status is not None
        assert [one["repeat_terminate"]["active"] for one in status["workers"]] == [True] * self.workers
        check_guard(status["workers"], SETTINGS)

    @pytest.mark.scenario("Existing YAML enables repeat-aware behavior in vLLM mode")
    def test_the_yaml_section_alone_decides(self, guarded: Guarded, tmp_path: Path) -> None:
        """A configuration with the guard on, switched from hf to vllm: the server that it starts guards by its six
        keys, and a learner with other thresholds, or with none, refuses that server before its first step."""
        from support.config_samples import set_key, write_yaml

        _, config = guarded

        def rollout_of(config: dict[str, Any]) -> Any:
            return load_config(write_yaml(tmp_path, config)).rollout_matching

        assert rollout_of(set_key(config, "rollout_matching.rollout_backend", "hf")).repeat_terminate == SETTINGS
        check_servers(rollout_of(config), 1)
        for key, value in (("ngram_size", 21), ("max_object_keys", 3), ("enabled", False)):
            other = rollout_of(set_key(config, f"rollout_matching.repeat_terminate.{key}", value))
            with pytest.raises(RolloutError, match="not active as configured"):
                check_servers(other, 1)


def assert_killing_leaves_nothing(server: RunningServer) -> None:
    """kill -9 of the HTTP process, and its workers, cores and engines end too."""
    client = server.client()
    status = client.status()
    client.close()
    below = server.children()
    assert status is not None and {one["pid"] for one in status["workers"]} <= set(below)
    os.kill(server.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [pid for pid in below if is_alive(pid)] == []
