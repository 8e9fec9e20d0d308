"""A real ``swift rollout`` of two workers: its guard, then pushes of adapters and of full weights, after which it
answers exactly like the trainer."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.trainer.push import ServerPusher
from coordexp.engine.wire.arguments import executor_on_cpu, with_image_size
from coordexp.engine.wire.engine_process import has_gpu
from coordexp.errors import RolloutError, ServerRefused
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.records import RolloutRequest
from support import tuned_models
from support.forked import SWIFT, Handle, by_file, forked
from support.guarded_server import Guarded, GuardedServerContract, answered
from support.rollout_servers import (
    RunningServer,
    all_gone,
    disturb,
    greedy_tokens,
    guarded_config,
    load_served,
    payload,
    pushing,
    requests_of,
    served_checkpoint,
    served_tokens,
    swift_rollout,
)

WORKERS = 2


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """It guards answers of more than forty tokens: those that are compared after pushes are shorter."""
    folder = tmp_path_factory.mktemp("swift")
    config = guarded_config(
        folder, "swift", rollout_matching__vllm__enable_lora=True, rollout_matching__vllm__max_lora_rank=8
    )
    with swift_rollout(folder, config, vllm_data_parallel_size=WORKERS) as running:
        yield running, config


@pytest.fixture(scope="module")
def server(guarded: Guarded) -> RunningServer:
    return guarded[0]


class TestGuard(GuardedServerContract):
    """First of the file: the weights are still the checkpoint's."""

    workers = WORKERS

    def test_the_envelope_removes_nothing(self, guarded: Guarded, requests_: list[RolloutRequest]) -> None:
        """Everything that ms-swift itself answers with is still there, token details included."""
        from swift.infer_engine.protocol import ChatCompletionResponse, RolloutOutput

        (item,) = answered(guarded[0], requests_[:1])
        assert set(item) == {*RolloutOutput.model_fields, "coordexp"}
        assert set(ChatCompletionResponse.__dataclass_fields__) <= set(item["response"])
        assert item["response"]["prompt_token_ids"] == list(requests_[0].prompt_token_ids)
        assert item["response"]["choices"][0]["token_ids"]
        assert item["coordexp"]["repeat_terminate_triggered"] in (0, 1)


def assert_answers_as(client: ServerClient, trainer: LoadedModel, version: int) -> list[list[int]]:
    requests = requests_of(trainer, 2 * WORKERS)
    answers = served_tokens(client, requests)
    assert answers == greedy_tokens(trainer, requests)
    status = client.status()
    assert status is not None and [one["weight_version"] for one in status["workers"]] == [version] * WORKERS
    assert has_gpu() or {one["executor"] for one in status["workers"]} == {executor_on_cpu(1)}
    return answers


def test_memory_is_profiled_on_the_largest_image_of_a_prompt(guarded: Guarded) -> None:
    """And not on the processor's largest, as ms-swift would have it."""
    server, config = guarded
    limits = {"model": served_checkpoint(), "limit_mm_per_prompt": {"image": 1, "video": 0}}
    wanted = with_image_size({**limits, "max_model_len": config["global_max_length"]})["limit_mm_per_prompt"]["image"]
    profiled = [one["profiled_image"] for one in server.status()["workers"]]
    assert profiled == [[wanted["width"], wanted["height"]]] * WORKERS


# The order matters: on a server that has once received full weights, adapters no longer fit.
def test_answers_after_an_adapter_push_are_the_trainers(client: ServerClient) -> None:
    config = tuned_models.lora(train_coord_rows=False, freeze_vit=True, freeze_aligner=True)
    trainer = tuned_models.tuned(config, checkpoint=served_checkpoint())
    with pushing(client, trainer, mode="adapter", fallback_to_full=False) as sync:
        assert sync.push(1).mode == "adapter"
        before = assert_answers_as(client, trainer, 1)
        tuned_models.randomise(trainer.model, 8)
        assert sync.push(2).mode == "adapter"
        assert assert_answers_as(client, trainer, 2) != before


def test_after_a_failed_adapter_push_all_pushes_are_full(client: ServerClient) -> None:
    """It reaches the vision tower, where vLLM would ignore it. LoRA arrives merged then."""
    trainer = tuned_models.tuned(tuned_models.lora(train_coord_rows=False), checkpoint=served_checkpoint())
    with pushing(client, trainer, mode="adapter") as sync:
        first = sync.push(3)
        assert first.mode == "full" and first.fallback is not None and first.checksum is not None
        assert_answers_as(client, trainer, 3)
        tuned_models.randomise(trainer.model, 9)
        assert (sync.push(4).mode, sync.mode) == ("full", "full")
        assert_answers_as(client, trainer, 4)


def test_a_missing_weight_is_named_although_ms_swift_hides_errors(client: ServerClient) -> None:
    class Partial(TrainerWeights):
        @contextmanager
        def full(self) -> Iterator[Any]:
            with super().full() as named:
                yield (one for one in named if "layers.0.self_attn.k_proj" not in one[0])

    trainer = load_served()
    with (
        pushing(client, Partial(trainer.model)) as sync,
        pytest.raises(RolloutError, match=r"not sent: \S+qkv_proj\.weight \(k_proj\)"),
    ):
        sync.push(7)
    with pytest.raises(ServerRefused, match=r"failed half-way \(.*push them again first"):
        served_tokens(client, requests_of(trainer, 2 * WORKERS))
    with pushing(client, trainer) as whole:
        whole.push(8)
        assert_answers_as(client, trainer, 8)


def test_a_new_trainer_takes_over_the_server_when_its_owner_is_gone(client: ServerClient) -> None:
    """The first one is killed without closing its group, which still exists in every worker."""
    trainer = load_served()
    gone = ServerPusher([client], TrainerWeights(trainer.model), SyncConfig(timeout_s=60.0))
    owner = gone.push(9).weights.trainer_id
    with (
        pushing(client, trainer) as early,
        pytest.raises(ServerRefused, match=rf"409.*belongs to trainer {owner} .*, which is connected"),
    ):
        early.push(9)
    gone.links[0].close(notify=False)
    disturb(trainer, 10)
    started = time.monotonic()
    with pushing(client, trainer) as anew:
        stamp = anew.push(10).weights
        assert time.monotonic() - started < 40
        assert_answers_as(client, trainer, 10)
        assert (
            client.infer(payload(requests_of(trainer, 2 * WORKERS)))[0]["coordexp"].items() >= stamp.payload().items()
        )
        with pytest.raises(RolloutError, match=f"trainer {stamp.trainer_id} has pushed"):
            gone.push(11)


def test_a_worker_error_reaches_the_trainer(client: ServerClient) -> None:
    trainer = load_served()
    (request, *_) = requests_of(trainer, 2 * WORKERS)
    call = {
        "infer_requests": [{"messages": [{"role": "user", "content": "<image>x"}], "images": ["/no/such/file.png"]}],
        "request_config": {"max_tokens": 4, "temperature": 0.0, "return_details": True},
    }
    with pytest.raises(ServerRefused, match=r"(?s)status 500.*cannot identify image"):
        client.infer(call)
    assert len(served_tokens(client, [request])) == 1, "and the server still answers"


def test_a_worker_that_hangs_during_decoding_is_detected(server: RunningServer) -> None:
    """Its process stopped; the one that answers HTTP knows by the steps that no longer come."""
    trainer, client = load_served(), server.client()
    status = client.status()
    assert status is not None
    before = status["num_steps"]
    pids = [one["pid"] for one in status["workers"]]
    answers: list[Any] = []
    asked = threading.Thread(
        target=lambda: answers.extend(client.infer(payload(requests_of(trainer, 2 * WORKERS), 64)))
    )
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        asked.start()
        deadline = time.monotonic() + 60
        while client.engine_stall_seconds(timeout_s=5.0) < 3.0:
            assert time.monotonic() < deadline and asked.is_alive(), "hung workers were not detected"
            time.sleep(0.2)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    asked.join(120)
    assert len(answers) == 2 * WORKERS and client.engine_stall_seconds() == 0.0
    assert client.status()["num_steps"] > before  # pyright: ignore[reportOptionalSubscript]


def test_killing_the_server_leaves_no_process(server: RunningServer) -> None:
    """Last of the file: kill -9 of the HTTP process ends its workers, cores and engines too."""
    status, below = server.status(), server.children()
    assert {one["pid"] for one in status["workers"]} <= set(below)
    os.kill(server.process.pid, signal.SIGKILL)
    assert all_gone(below)


def note_size_of_a_small_image(file: Path) -> None:
    """In a process with the plugin: as ms-swift gives it to vLLM, for patches of Qwen3-VL's size."""
    from PIL import Image
    from qwen_vl_utils import vision_process
    from swift.model.models.qwen import patch_qwen_vl_utils

    from coordexp.engine.server.swift_rollout import install

    install()
    patch_qwen_vl_utils(vision_process)
    image = vision_process.fetch_image({"image": Image.new("RGB", (64, 32))}, image_patch_size=16)
    file.write_text(json.dumps(image.size), encoding="utf-8")


def test_images_under_4096_pixels_keep_their_size(tmp_path: Path) -> None:
    file, log = tmp_path / "size.json", tmp_path / "log"
    process = Handle(forked(*by_file(note_size_of_a_small_image, file), log=log, behind=SWIFT))
    assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert json.loads(file.read_text()) == [64, 32]
