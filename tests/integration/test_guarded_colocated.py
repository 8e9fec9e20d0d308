"""The repeat guard in a real engine inside the learner: every answer ends where the guard, asked offline, ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.colocated import ColocatedBackend
from coordexp.modeling.load import LoadedModel
from coordexp.records import RolloutRequest
from coordexp.rollouts import SeedContext, rollout_session
from support.guards import first_trigger
from support.rollout_servers import greedy_tokens, load_served
from support.swift_servers import GUARD, GUARDED_TOKENS
from support.tiny_run import tiny_samples
from support.vllm_runs import colocated

SETTINGS = RepeatTerminateConfig(**GUARD)


@pytest.fixture(scope="module")
def learner() -> LoadedModel:
    return load_served()


@pytest.fixture(scope="module")
def backend(learner: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedBackend]:
    keys = {
        "rollout_matching__repeat_terminate": GUARD,
        "rollout_matching__max_new_tokens": GUARDED_TOKENS,
        "rollout_matching__decoding__temperature": 0.0,
    }
    backend = colocated(learner, tmp_path_factory.mktemp("guarded"), **keys)
    yield backend
    backend.close()


def test_repeating_answers_end_at_their_step_in_whatever_batch(backend: ColocatedBackend, learner: LoadedModel) -> None:
    requests: list[RolloutRequest] = [sample.request for sample in tiny_samples(learner, 12)]
    free = greedy_tokens(learner, requests, GUARDED_TOKENS)
    triggers = [first_trigger(answer, SETTINGS) for answer in free]
    assert None in triggers and len({one.num_new_tokens for one in triggers if one is not None}) > 1
    for version, size in enumerate((len(requests), 5)):
        rollouts = []
        with rollout_session(backend, version):
            for start in range(0, len(requests), size):
                rollouts += backend.generate(requests[start : start + size], SeedContext(1, 0, 0, 0))
        for rollout, without, trigger in zip(rollouts, free, triggers, strict=True):
            cut = len(without) if trigger is None else trigger.num_new_tokens
            assert list(rollout.response_token_ids) == without[:cut], rollout.sample_id
            assert rollout.repeat_terminated is (trigger is not None)
            assert rollout.truncated is (trigger is None and len(without) == GUARDED_TOKENS)
    assert backend.take_metrics()["rollout/repeat_terminate_active"] == 1.0
