"""Servers that drip, hang, close and lie: every call ends at its deadline, and what is no answer is none."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from coordexp.engine.client import ServerClient
from coordexp.engine.protocol import infer_payload, read_answer
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.weight_sync import WeightVersion
from faults import lying_server
from faults.lying_server import lying
from support.answers import tiny_vocab
from support.settings import client_to, decoding
from support.tiny_run import load_tiny, tiny_samples

DEADLINE_S = 1.0
CALLS: dict[str, Callable[[ServerClient], Any]] = {
    "infer": lambda client: client.infer({"infer_requests": [{}], "request_config": {"max_tokens": 4}}),
    "status": lambda client: client.status(),
    "health": lambda client: client.health(),
    "commit": lambda client: client.commit_weights(WeightVersion(1, "a"), True, DEADLINE_S),
    "bucket": lambda client: client.update_flattened_params([{"name": "a"}], DEADLINE_S),
    "group": lambda client: client.close_communicator(),
}
SLOW = ["drips", "drips_headers", "drips_chunks", "hangs", "hangs_half_way"]


def client_of(url: str) -> ServerClient:
    return client_to(url, 1, timeout_s=DEADLINE_S, infer_timeout_s=DEADLINE_S)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("behaviour", SLOW)
def test_a_call_ends_at_its_deadline_however_the_server_drags(behaviour: str, call: str) -> None:
    with lying(getattr(lying_server, behaviour)) as url:
        started = time.monotonic()
        with pytest.raises(ServerTimeout, match="no answer within 1 s"):
            CALLS[call](client_of(url))
        assert time.monotonic() - started < DEADLINE_S + 10


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "behaviour", ["closes_at_once", "closes_behind_the_header", "closes_half_way", "talks_of_something_else"]
)
def test_a_connection_that_breaks_is_named(behaviour: str, call: str) -> None:
    with lying(getattr(lying_server, behaviour)) as url, pytest.raises(ServerUnreachable, match="connection broke"):
        CALLS[call](client_of(url))


@pytest.mark.parametrize("call", ["infer", "status", "commit"])
def test_an_answer_without_end_is_cut_off_before_it_fills_the_memory(call: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    client = client_to("http://unused", 1)
    with lying(lying_server.never_ends) as url:
        client = client_to(url, 1, timeout_s=120.0, infer_timeout_s=120.0)
        with pytest.raises(ServerRefused, match=r"the answer is longer than [\d,]+ bytes"):
            client.commit_weights(WeightVersion(1, "a"), True, 120.0) if call == "commit" else CALLS[call](client)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def test_an_answer_nested_200000_deep_is_no_answer() -> None:
    with lying(lying_server.nests) as url, pytest.raises(ServerRefused, match="the answer is not JSON"):
        CALLS["status"](client_of(url))


STAMP = WeightVersion(3, "learner")
SAID = {**STAMP.payload(), "uuid": "0"}


def item(num_tokens: int = 2, /, **envelope: Any) -> dict[str, Any]:
    vocab = tiny_vocab()
    ids = (vocab.encode("{}") * num_tokens)[:num_tokens]
    choice = {"token_ids": ids, "finish_reason": "length"}
    return {"response": {"choices": [choice], "prompt_token_ids": [1, 2]}, "coordexp": envelope}


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (item(**{name: value for name, value in SAID.items() if name != "weight_version"}), "does not say which"),
        (item(**{name: value for name, value in SAID.items() if name != "learner_id"}), "does not say which"),
        (item(**SAID | {"weight_version": 2}), "the server restarted"),
        (item(**SAID | {"uuid": "1"}), "answers were exchanged on the way"),
        (item(480, **SAID), "480 tokens, and rollout_matching.max_new_tokens is 12"),
    ],
    ids=["no version", "no learner", "stale weights", "swapped", "too many tokens"],
)
def test_what_a_server_of_ours_must_say_is_missed(lie: dict[str, Any], says: str) -> None:
    request = tiny_samples(load_tiny(), 1)[0].request
    options = {"stamped": True, "max_new_tokens": 12, "place": 0}
    assert read_answer(item(**SAID), request, tiny_vocab(), STAMP, False, "here", **options).weight_version == 3
    with pytest.raises(RolloutError, match=says):
        read_answer(lie, request, tiny_vocab(), STAMP, False, "here", **options)


def test_requests_to_a_server_of_ours_carry_their_place() -> None:
    requests = [sample.request for sample in tiny_samples(load_tiny(), 2)]
    options = decoding(4)
    sent = [infer_payload(requests, 1, options, str, tagged=tagged) for tagged in (True, False)]
    assert [one.get("uuid") for one in sent[0]["infer_requests"]] == ["0", "1"]
    assert not any("uuid" in one for one in sent[1]["infer_requests"])
