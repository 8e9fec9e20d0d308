"""Slow, hanging, closing and wrong servers: every call ends at its timeout with a clear error."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import pytest

from coordexp.engine.trainer.client import ServerClient
from coordexp.errors import ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.weight_sync import WeightVersion
from support.lying_server import lying
from support.settings import client_to

DEADLINE_S = 1.0
CALLS: dict[str, Callable[[ServerClient], Any]] = {
    "infer": lambda client: client.infer({"infer_requests": [{}], "request_config": {"max_tokens": 4}}),
    "status": lambda client: client.status(),
    "health": lambda client: client.health(),
    "commit": lambda client: client.commit_weights(WeightVersion(1, "a"), True, DEADLINE_S),
    "bucket": lambda client: client.update_flattened_params([{"name": "a"}], DEADLINE_S),
    "group": lambda client: client.close_communicator(),
}


def client_of(url: str) -> ServerClient:
    return client_to(url, 1, timeout_s=DEADLINE_S, infer_timeout_s=DEADLINE_S)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("behaviour", ["drips", "drips_headers", "drips_chunks", "hangs", "hangs_half_way"])
def test_a_call_to_a_slow_server_times_out(behaviour: str, call: str) -> None:
    key = "infer_timeout_s" if call == "infer" else "server.timeout_s"
    with lying(behaviour) as url:
        started = time.monotonic()
        with pytest.raises(ServerTimeout, match=f"no answer within 1 s.*{key}"):
            CALLS[call](client_of(url))
        assert time.monotonic() - started < DEADLINE_S + 10


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "behaviour", ["closes_at_once", "closes_after_the_header", "closes_half_way", "speaks_another_protocol"]
)
def test_a_broken_connection_raises_a_clear_error(behaviour: str, call: str) -> None:
    with lying(behaviour) as url, pytest.raises(ServerUnreachable, match="connection broke"):
        CALLS[call](client_of(url))


@pytest.mark.parametrize("call", ["infer", "status", "commit"])
def test_an_endless_answer_is_cut_off(call: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with lying("never_ends") as url:
        client = client_to(url, 1, timeout_s=120.0, infer_timeout_s=120.0)
        with pytest.raises(ServerRefused, match=r"the answer is longer than [\d,]+ bytes"):
            client.commit_weights(WeightVersion(1, "a"), True, 120.0) if call == "commit" else CALLS[call](client)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def test_an_answer_nested_200000_deep_is_refused() -> None:
    with lying("nests") as url, pytest.raises(ServerRefused, match="unexpected answer"):
        CALLS["status"](client_of(url))
