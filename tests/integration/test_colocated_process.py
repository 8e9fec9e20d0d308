"""A colocated engine leaves the process state unchanged after start, rollouts, pushes and shutdown."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from coordexp.rollouts import SeedContext, rollout_session
from support.forked import Handle, by_file, forked
from support.rollout_servers import colocated, load_served, requests_of
from support.tiny_run import tiny_checkpoint


def found() -> dict[str, Any]:
    """State of this process that an engine could change."""
    return {
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), torch.set_num_threads),
        "numbers": (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_default_device()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "random": (torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),  # type: ignore[union-attr]
        "group": (dist.is_initialized(), dist.group.WORLD, dist.destroy_process_group),
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)],
        "hooks": (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr),
        "cores": os.sched_getaffinity(0),
    }


def changed(before: dict[str, Any]) -> dict[str, str]:
    now = found()
    here, was = now.pop("environment"), before["environment"]
    differences = {name: f"{before[name]} -> {now[name]}" for name in now if now[name] != before[name]}
    for name in sorted(here.keys() | was.keys()):
        if here.get(name) != was.get(name):
            differences[f"${name}"] = f"{was.get(name)} -> {here.get(name)}"
    return differences


def note_changes(folder: Path) -> None:
    """A trainer with a process group, in which a guarded engine starts, answers and ends; writes what changed."""
    trainer = load_served()
    requests = requests_of(trainer, 3)
    tiny_checkpoint()  # the configuration names it; its random weights change random states
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    torch.set_num_threads(2)  # not what the environment says
    torch.manual_seed(3)
    before = found()
    seen: dict[str, Any] = {}
    backend = colocated(trainer, folder, rollout_matching__repeat_terminate__enabled=True)
    with rollout_session(backend, 0):
        seen["start"] = changed(before)
        seen["answers"] = len(backend.generate(requests, SeedContext(1, 0, 0, 0)))
        seen["rollouts"] = changed(before)
    with rollout_session(backend, 1):
        seen["second push"] = changed(before)
    backend.close()
    seen["shutdown"] = changed(before)
    seen["imported"] = sorted({"swift"} & sys.modules.keys())
    total = torch.ones(1)
    dist.all_reduce(total)
    seen["the group still works"] = float(total)
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process that has not imported vLLM: its import changes things too."""
    folder = tmp_path_factory.mktemp("state")
    log = folder / "log"
    process = Handle(forked(*by_file(note_changes, folder), log=log))
    assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("after", ["start", "rollouts", "second push", "shutdown"])
def test_the_trainers_process_state_is_unchanged(after: str, seen: dict[str, Any]) -> None:
    """Thread settings, random states, environment, process group, signal handlers."""
    assert seen["answers"] == 3
    assert seen[after] == {}


def test_the_trainers_process_group_outlives_the_engine(seen: dict[str, Any]) -> None:
    assert seen["the group still works"] == 1.0


def test_an_engine_does_not_import_ms_swift(seen: dict[str, Any]) -> None:
    """Its plugin for vLLM would, in every process of every engine, and take seconds."""
    assert seen["imported"] == []
