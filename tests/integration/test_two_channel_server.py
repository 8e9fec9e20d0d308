"""Two-channel training of two processes on a real vLLM server: the same run as with transformers' rollouts in one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordexp.engine.server.served_engine import HEARTBEAT_S
from coordexp.engine.trainer.client import STALL_KEYS
from coordexp.errors import RolloutError
from coordexp.training.run import run_training
from support.fake_servers import FakeRolloutServer
from support.guarded_server import GuardedServerContract
from support.rollout_servers import (
    GUARD,
    GUARDED_TOKENS,
    RunningServer,
    guarded_config,
    served_checkpoint,
    server_keys,
    serving,
)
from support.tiny_run import run_config, step_lines, train
from support.torchrun import SGD, assert_same_training, train_by_two


def guarded_keys() -> dict[str, Any]:
    return SGD | {
        "model__model": str(served_checkpoint()),
        "training__max_steps": 4,
        "training__learning_rate": 0.005,  # sharpened weights have steep losses
        "global_max_length": 2000,
        "rollout_matching__max_new_tokens": GUARDED_TOKENS,
        "rollout_matching__repeat_terminate": GUARD,
        "stage2_ab__coord_ctx_embed_mode": "soft",
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("server")
    config = guarded_config(folder, "coordexp", global_max_length=guarded_keys()["global_max_length"])
    with serving(folder, config) as running:
        yield running, config


class TestGuard(GuardedServerContract):
    """First of the file: the weights are still the checkpoint's."""

    @pytest.fixture(scope="class")
    def guarded(self, server: Any) -> Any:
        return server


@pytest.mark.scenario("Channel-B run in vLLM mode uses repeat-aware termination")
@pytest.mark.scenario("Tail-control audit metrics are emitted")
def test_a_two_channel_run_on_a_real_server(server: Any, tmp_path: Path) -> None:
    """A, B, A, B in two processes: the guard ends the answers that repeat, and training continues with
    all of them, to the same weights as with transformers' rollouts and guard in one process."""
    keys = guarded_keys()
    alone = train(run_config(tmp_path, "two_channel", "one", training__per_device_train_batch_size=4, **keys))
    keys |= server_keys(server[1])
    config = run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=2, **keys)
    ranks = train_by_two(config)
    # The percentile is each rank's own, then the largest: by its definition not the whole step's.
    but = {"rollout/gen_new_tokens_p99", "rollout/server_retries_total"}
    assert_same_training(config, alone, ranks, but)
    lines = ranks[0]["steps"]
    assert [line["stage2/channel_b"] for line in lines] == [0, 1, 0, 1]
    audit = ("rollout/gen_new_tokens_p99", "rollout/parse_truncated_rate", "rollout/parse_dropped_invalid")
    for line in (lines[1], lines[3]):
        assert line["rollout/repeat_terminate_active"] == 1
        assert line["rollout/samples_total"] == line["packing/segments_total"] == 4
        assert all(name in line for name in audit)
        assert (
            0 < line["rollout/gen_new_tokens_p99"] <= GUARDED_TOKENS and 0 <= line["rollout/parse_truncated_rate"] <= 1
        )
    assert sum(lines[step]["rollout/repeat_terminate_triggered_sequences"] for step in (1, 3)) > 0
    assert not [name for step in (0, 2) for name in lines[step] if name.startswith("rollout/")]


@pytest.mark.scenario("Channel-B startup fails when repeat-aware contract is enabled but inactive")
@pytest.mark.parametrize("b_ratio", [1.0, 0.5])
def test_an_unguarded_server_stops_the_run_before_its_first_step(
    b_ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy server with one worker and without a repeat guard."""
    monkeypatch.setattr("coordexp.modeling.load.read_weights", lambda *_: pytest.fail("weights were read"))
    worker = {"weight_version": 0, "repeat_terminate": {"active": False, "config": None}}
    status = {"workers": [worker], "versions": {}, "repeat_terminate": worker["repeat_terminate"]}
    with FakeRolloutServer(1, status) as unguarded:
        entry = {"base_url": unguarded.url, "group_port": 1}
        config = run_config(
            tmp_path, "two_channel", stage2_ab__schedule__b_ratio=b_ratio, **guarded_keys(),
            rollout_matching__rollout_backend="vllm",
            rollout_matching__vllm={"mode": "server", "server": {"servers": [entry], "timeout_s": 20.0}},
        )  # fmt: skip
        with pytest.raises(RolloutError, match=r"external_plugins.*coordexp serve") as stopped:
            run_training(config, Console(quiet=True))
        assert not unguarded.calls
    assert "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION" in str(stopped.value)
    assert not list(tmp_path.glob("run/checkpoint-*")) and not (tmp_path / "run" / "model.safetensors").exists()


def test_channel_a_sends_no_requests(server: Any, tmp_path: Path) -> None:
    """Evaluation may: the server is checked at the start, and gets no weights and no request while training."""
    keys = guarded_keys() | server_keys(server[1]) | {"training__max_steps": 2, "stage2_ab__schedule__b_ratio": 0}

    def state() -> dict[str, Any]:
        """Status that any request or push changes, two heartbeats later."""
        time.sleep(2 * HEARTBEAT_S)
        return {key: value for key, value in server[0].status().items() if key not in STALL_KEYS}

    before = state()
    deadline = time.monotonic() + 60
    while (later := state()) != before:  # tokens of the test before that no heartbeat had counted
        assert time.monotonic() < deadline
        before = later
    lines = step_lines(train(run_config(tmp_path, "two_channel", **keys)))
    assert [line["stage2/channel_a"] for line in lines] == [1, 1]
    assert state() == before
