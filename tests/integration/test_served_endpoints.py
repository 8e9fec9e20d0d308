"""Endpoints of a real ``coordexp serve``: seeds, single tensors, caches, empty requests; and a crash during a push."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from coordexp.background import in_background
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.wire.arguments import executor_on_cpu
from coordexp.engine.wire.engine_process import has_gpu
from coordexp.errors import RolloutError, ServerUnreachable
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.weight_sync import WeightVersion
from coordexp.weight_sync.group import GroupAddress, join
from support.rollout_servers import (
    RunningServer,
    all_gone,
    disturb,
    greedy_tokens,
    load_served,
    openai_payload,
    payload,
    pushing,
    requests_of,
    served_checkpoint,
    served_tokens,
)


@pytest.fixture(scope="module")
def trainer() -> LoadedModel:
    return load_served()


def sampled(client: ServerClient, requests: Any, seed: int | None) -> list[list[int]]:
    items = client.infer(payload(requests, temperature=2.0, seed=seed))
    return [item["response"]["choices"][0]["token_ids"] for item in items]


def test_idle_cpu_engines_sleep(client: ServerClient) -> None:
    """Their core process runs the executor that makes them sleep; ``test_cpu_queues`` tests that one."""
    status = client.status()
    assert status is not None
    assert has_gpu() or {one["executor"] for one in status["workers"]} == {executor_on_cpu(1)}
    assert {tuple(one["settings"]["image_processor.image_mean"]) for one in status["workers"]} == {(0.5, 0.5, 0.5)}


def test_sampled_answers_depend_only_on_the_seed(client: ServerClient, trainer: LoadedModel) -> None:
    requests = requests_of(trainer, 3)
    first = sampled(client, requests, 7)
    assert sampled(client, requests, 7) == first
    assert sampled(client, requests, 8) != first
    # Each request of a call has a seed of its own, counting up: alone it has the same answer as with others.
    assert [sampled(client, [request], 7 + index)[0] for index, request in enumerate(requests)] == first
    assert len({tuple(sampled(client, requests[:1], 0)[0]) for _ in range(4)}) > 1, "0 means no seed"


def test_single_tensors_can_be_pushed_like_ms_swift_does(
    server: RunningServer, client: ServerClient, trainer: LoadedModel
) -> None:
    """Every weight by a request of its own, and a commit that carries nothing."""
    requests = requests_of(trainer, 3)
    before = served_tokens(client, requests)
    disturb(trainer, 1)
    client.close_communicator()
    opened = in_background(lambda: client.init_communicator(2, 0, 30.0), "open")
    group = join(GroupAddress("127.0.0.1", server.group_port, 1, 2, 30.0), torch.device("cpu"))
    opened.result(30)
    with TrainerWeights(trainer.model).full() as named:
        for name, tensor in named:
            body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            update = in_background(lambda body=body: client._call("POST", "/update_named_param/", body), "update")
            group.broadcast([tensor.detach().contiguous().view(torch.uint8).flatten()], 1)
            update.result(30)
    (report,) = client.commit_weights(WeightVersion(17), True, 30.0) or [None]
    group.close()
    assert report is not None and report["weight_version"] == 17 and report["failure"] is None
    after = served_tokens(client, requests)
    assert after == greedy_tokens(trainer, requests) != before


def test_answers_are_unchanged_after_clearing_a_cache(client: ServerClient, trainer: LoadedModel) -> None:
    requests = requests_of(trainer, 2)
    answers = served_tokens(client, requests)
    for cache in ("prefix", "encoder", "mm"):
        assert client._call("POST", f"/reset_{cache}_cache/") == {"message": f"{cache} cache reset"}
        assert served_tokens(client, requests) == answers


def test_openai_clients_get_equal_answers(server: RunningServer, client: ServerClient, trainer: LoadedModel) -> None:
    requests = requests_of(trainer, 2)
    expected = served_tokens(client, requests)
    with httpx.Client(base_url=server.base_url, trust_env=False, timeout=60.0) as openai:
        (model,) = openai.get("/v1/models").json()["data"]
        assert model["id"] == str(served_checkpoint())
        for request, token_ids in zip(requests, expected, strict=True):
            reply = openai.post("/v1/chat/completions", json=openai_payload(request, model=model["id"])).json()
            (choice,) = reply["choices"]
            assert tuple(reply["prompt_token_ids"]) == request.prompt_token_ids
            assert choice["token_ids"] == token_ids
            assert "<|coord_" in choice["message"]["content"], "special tokens are shown: coordinates may be special"
        with openai.stream("POST", "/v1/chat/completions", json=openai_payload(requests[0], stream=True)) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0] for line in lines]
        assert [token for delta in deltas for token in delta.get("token_ids") or ()] == expected[0]


def test_metrics_count_answers(server: RunningServer, client: ServerClient, trainer: LoadedModel) -> None:
    def num_answers() -> float:
        lines = httpx.get(f"{server.base_url}/metrics", trust_env=False).text.splitlines()
        counts = [line for line in lines if line.startswith("vllm:request_success_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    before = num_answers()
    client.infer(payload(requests_of(trainer, 3), 4))
    assert num_answers() == before + 3


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]}]}, 400),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}, 400),
        ({"vllm_xargs": {"coordexp_names": ["cat"]}}, 400),
        ({"model": "another"}, 404),
        ({"temperature": -1}, 400),
        ({"messages": 3}, 400),
        ({"use_beam_search": True, "n": 2}, 400),
    ],
    ids=["address", "file", "our own arguments", "model", "temperature", "messages", "beam search"],
)  # fmt: skip
def test_unsupported_openai_requests_are_refused(
    server: RunningServer, trainer: LoadedModel, change: dict[str, Any], status: int
) -> None:
    body = openai_payload(requests_of(trainer, 1)[0]) | change
    reply = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, trust_env=False)
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize("path", ["/scale_elastic_ep", "/v1/load_lora_adapter", "/collective_rpc", "/tokenize"])
def test_other_vllm_endpoints_are_disabled(server: RunningServer, path: str) -> None:
    assert httpx.post(f"{server.base_url}{path}", json={}, trust_env=False).status_code == 404


class DeadlyWeights(TrainerWeights):
    """Kills a server when half of the weights have been handed out."""

    def __init__(self, model: Any, victim: int) -> None:
        super().__init__(model)
        self._victim = victim

    @contextmanager
    def full(self) -> Iterator[Any]:
        def killing(named: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for number, one in enumerate(named):
                if number == len(self.names()) // 2:
                    os.kill(self._victim, signal.SIGKILL)
                yield one

        with super().full() as named:
            yield killing(named)


def test_a_server_that_dies_during_a_push_ends_it(
    server: RunningServer, client: ServerClient, trainer: LoadedModel
) -> None:
    """Last of the file: it kills the server, and its engines with it. The push's own deadline is far away."""
    requests = requests_of(trainer, 1)
    with pushing(client, trainer) as good:
        good.push(21)
    openai = f"{server.base_url}/v1/chat/completions"
    assert httpx.post(openai, json=openai_payload(requests[0]), trust_env=False).status_code == 200
    family = server.children()
    started = time.monotonic()
    with pushing(client, DeadlyWeights(trainer.model, server.process.pid), timeout_s=300.0) as deadly:
        with pytest.raises(RolloutError, match=server.base_url):
            deadly.push(22)
        server.process.wait()
        for act in (lambda: deadly.push(23), lambda: client.infer(payload(requests)), client.status, client.health):
            with pytest.raises(ServerUnreachable, match="start it"):
                act()
    assert time.monotonic() - started < 30
    assert all_gone(family)
