"""``coordexp launch`` with the real ``swift rollout``: training completes; without the guard it is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.launch.plan import PLAN_JSON, PLUGIN, LaunchPlan
from support.config_samples import pipeline, set_key, write_yaml
from support.rollout_servers import descendants, guarded_config, is_alive, plan_of, serving_environment, with_arguments
from support.tiny_run import tiny_scenes

LAUNCH_S = 900.0
RUN_PLAN = (
    "import sys; from coordexp.launch.supervisor import run_plan; "
    "from coordexp.launch.plan import PLAN_JSON; "
    "sys.exit(run_plan(PLAN_JSON.validate_json(sys.stdin.readline())))"
)


def channel_b(folder: Path, max_steps: int) -> dict[str, Any]:
    """Channel-B with a guarded swift rollout, on images that ms-swift does not enlarge."""
    config = guarded_config(folder, "swift")
    scenes = folder / "scenes.jsonl"
    write_jsonl([record for record in read_jsonl(tiny_scenes()) if record.width >= 64], scenes)
    del config["rollout_matching"]["pipeline"]
    config["stage2_ab"] = {"schedule": {"b_ratio": 1.0}, "pipeline": pipeline()}
    config["custom"] |= {"train_jsonl": str(scenes), "trainer_variant": "stage2_two_channel"}
    config["custom"].pop("val_jsonl", None)
    config["training"] |= {
        "max_steps": max_steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "logging_steps": 1,
        "packing_min_fill_ratio": 0.01,
    }
    return config


@contextmanager
def running(command: list[str], folder: Path, stdin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    with (folder / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=serving_environment(),
            text=True,
            start_new_session=True,
        )
    if process.stdin is not None and stdin is not None:
        process.stdin.write(stdin + "\n")
        process.stdin.flush()
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def shown(folder: Path) -> str:
    return (folder / "launch.log").read_text(errors="replace")


def test_launch_trains_with_swift_rollout_and_ends_all_processes(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, channel_b(tmp_path, max_steps=1))
    seen: set[int] = set()
    with running([sys.executable, "-m", "coordexp", "launch", "--config", str(path)], tmp_path) as process:
        deadline = time.monotonic() + LAUNCH_S
        while process.poll() is None and time.monotonic() < deadline:
            seen.update(descendants(process.pid))
            time.sleep(0.5)
        assert process.returncode == 0, shown(tmp_path)
    assert len(seen) >= 5  # supervisor, swift rollout, its worker, vLLM's core and worker, torchrun, trainer
    assert [pid for pid in seen if is_alive(pid)] == []
    text = shown(tmp_path)
    assert "repeat guard active" in text and "trainer ended with exit code 0" in text
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert {"server0.log", "trainer.log"} <= {log.name for log in (tmp_path / "run" / "logs").iterdir()}


def server_changed(plan: LaunchPlan, environment: dict[str, str] | None = None, **flags: Any) -> LaunchPlan:
    (server,) = plan.servers
    assert server.process is not None
    process = with_arguments(server.process, **flags)
    process = replace(process, environment={**process.environment, **(environment or {})})
    return replace(plan, servers=(replace(server, process=process),))


def missing_plugin(folder: Path, plan: LaunchPlan) -> LaunchPlan:
    return server_changed(plan, external_plugins=folder / "no_such_plugin.py")


def dropped_processor(folder: Path, plan: LaunchPlan) -> LaunchPlan:
    """A version of ms-swift that does not hand ``logits_processors`` on to vLLM."""
    plugin = folder / "dropping_plugin.py"
    plugin.write_text(
        f"exec(open({str(PLUGIN)!r}).read())\n"
        "from swift.infer_engine import GRPOVllmEngine\n"
        "if not hasattr(GRPOVllmEngine, '_honest'):\n"
        "    GRPOVllmEngine._honest = GRPOVllmEngine._prepare_engine_kwargs\n"
        "    def drop(self, max_model_len, engine_kwargs):\n"
        "        engine_kwargs.pop('logits_processors', None)\n"
        "        return GRPOVllmEngine._honest(self, max_model_len, engine_kwargs)\n"
        "    GRPOVllmEngine._prepare_engine_kwargs = drop\n"
    )
    return server_changed(plan, external_plugins=plugin)


@pytest.mark.scenario("Config-required repeat-aware processor missing fails fast")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (missing_plugin, "no_such_plugin"),
        pytest.param(dropped_processor, "--external_plugins", marks=pytest.mark.campaign),
    ],
)
def test_a_server_without_the_guard_fails_before_training(tmp_path: Path, broken: Any, message: str) -> None:
    plan = broken(tmp_path, plan_of(tmp_path, set_key(guarded_config(tmp_path, "swift"), "launch.wait_s", 240.0)))
    seen: set[int] = set()
    with running([sys.executable, "-c", RUN_PLAN], tmp_path, stdin=PLAN_JSON.dump_json(plan).decode()) as process:
        deadline = time.monotonic() + LAUNCH_S
        while process.poll() is None and time.monotonic() < deadline:
            seen.update(descendants(process.pid))
            time.sleep(0.2)
        assert process.returncode == 1, shown(tmp_path)
    assert message in shown(tmp_path)
    assert "not up after" not in shown(tmp_path), "it ends by itself without waiting"
    assert not plan.trainer.log.exists(), "no trainer, so no training step"
    assert [pid for pid in seen if is_alive(pid)] == []
