"""Real servers, ``coordexp serve`` and ``swift rollout``, with a proxy that breaks requests and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from coordexp.engine.trainer.server_backend import ServerBackend
from coordexp.errors import CoordExpError, ServerTimeout
from coordexp.rollouts import SeedContext
from support.busy import busyness
from support.lying_proxy import AFTER, ANSWERS, BEFORE, STALE, LyingProxy, lying_proxy
from support.rollout_servers import PlainServer, server_config, server_keys, swift_rollout, vllm_config

DEADLINE_S = 3.0 * busyness()  # of healthy requests too
COMMIT = "/process_weights_after_loading/"


class Proxied(NamedTuple):
    """A trainer's backend, the proxy through which it reaches its server, and what it asks."""

    backend: ServerBackend
    proxy: LyingProxy
    requests: list[Any]
    version: list[int]

    def push(self) -> None:
        self.version[0] += 1
        self.backend.sync_weights(self.version[0])

    def ask(self) -> list[tuple[int, ...]]:
        rollouts = self.backend.generate(self.requests, SeedContext(0, 0, 0, 0))
        assert {one.weight_version for one in rollouts} == {self.version[0]}
        return [one.response_token_ids for one in rollouts]

    def push_and_ask(self) -> list[tuple[int, ...]]:
        """Without a fault. The deadline is short, so that the faults take no longer: on a machine that is busy with
        other work, a healthy request can take more, and is sent again for a minute."""
        last = time.monotonic() + 60 * busyness()
        while True:
            try:
                self.push()
                return self.ask()
            except ServerTimeout:
                if busyness() == 1 or time.monotonic() > last:
                    raise


@pytest.fixture(scope="module", params=["coordexp serve", pytest.param("swift rollout", marks=pytest.mark.campaign)])
def behind(
    request: pytest.FixtureRequest, plain_server: PlainServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    from rich.console import Console

    from coordexp.training.checked_run import check_run
    from coordexp.training.run import build_trainer

    folder = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        if request.param == "swift rollout":
            config = server_config(folder) | {"launch": {"server": "swift", "wait_s": 240.0}}
            server = stack.enter_context(swift_rollout(folder, config))
        else:
            config, server = plain_server.get()
        proxy = stack.enter_context(lying_proxy(server.base_url))
        entry = {"base_url": proxy.url, "group_port": server.group_port}
        keys: dict[str, Any] = server_keys(config) | {
            "rollout_matching__vllm__server": {
                "servers": [entry], "timeout_s": 15.0, "infer_timeout_s": DEADLINE_S, "retries": 0,
            },
            "rollout_matching__vllm__sync": {"timeout_s": DEADLINE_S, "bucket_mb": 1},
            "rollout_matching__decode_batch_size": 4,
        }  # fmt: skip
        trainer, _ = build_trainer(check_run(vllm_config(folder, **keys)), Console(quiet=True))
        # Images that ms-swift leaves at their size.
        dataset: Any = trainer.batches.dataset
        samples = [dataset[index] for index in range(12)]
        requests = [sample.request for sample in samples if sample.record.width >= 64][:3]
        backend = trainer.backend
        assert isinstance(backend, ServerBackend)
        yield Proxied(backend, proxy, requests, [0])
        backend.close()


@pytest.fixture(autouse=True)
def healed(behind: Proxied) -> Iterator[list[tuple[int, ...]]]:
    """Before and after each fault the server gives the same answers: the weights are the same."""
    before = behind.push_and_ask()
    yield before
    behind.proxy.heal()
    assert behind.push_and_ask() == before


def refused(act: Callable[[], Any], seen: Callable[[object], None]) -> str:
    """The trainer's error, raised within its deadline and, on a quiet machine, two seconds."""
    begun = time.monotonic()
    with pytest.raises(CoordExpError) as error:
        act()
    assert time.monotonic() - begun < DEADLINE_S + 2 * busyness()
    seen(error.value)
    return str(error.value)


@pytest.mark.parametrize("behaviour", [*BEFORE, *AFTER, *ANSWERS])
def test_a_broken_rollout_request_ends_the_step(
    behaviour: str, behind: Proxied, seen: Callable[[object], None]
) -> None:
    behind.proxy.misbehave("/infer/", behaviour)
    assert behind.proxy.url in refused(behind.ask, seen)


def test_an_answer_from_older_weights_is_refused(behind: Proxied, seen: Callable[[object], None]) -> None:
    behind.push()
    behind.proxy.misbehave("/infer/", STALE)
    assert "the answer is from weights of" in refused(behind.ask, seen)


@pytest.mark.parametrize("path", ["/update_flattened_params/", COMMIT])
@pytest.mark.parametrize("behaviour", [*BEFORE, *AFTER])
def test_a_broken_push_ends_the_step(
    behaviour: str, path: str, behind: Proxied, seen: Callable[[object], None]
) -> None:
    """The weights themselves do not pass through the proxy; until the next push, requests to the server are refused."""
    behind.proxy.misbehave(path, behaviour)
    assert "http" in refused(behind.push, seen)
    behind.proxy.heal()
    with pytest.raises(CoordExpError, match="call sync_weights before"):
        behind.ask()
