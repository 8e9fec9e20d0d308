"""A learner process of its own, with a process group, in which a guarded engine starts, answers and ends.

Prints, as JSON, what it found changed after each of these.
"""

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
import torch
import torch.distributed as dist

from coordexp.config import resolved_rollout
from coordexp.data.images import open_rgb
from coordexp.modeling.weights import LearnerWeights
from coordexp.rollouts import SeedContext, build_backend, rollout_session
from coordexp.rollouts.learner import LearnerParts
from support.rollout_servers import load_served, requests_of, served_checkpoint
from support.vllm_runs import COLOCATED, vllm_config


def found() -> dict[str, Any]:
    """What an engine could change in the process that it lives in."""
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


def main(folder: Path) -> None:
    learner = load_served()
    requests = requests_of(learner, 3)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    keys = COLOCATED | {"rollout_matching__repeat_terminate__enabled": True}
    config = vllm_config(folder, **keys)
    parts = LearnerParts(
        model=learner.model, vocab=learner.vocab, image_token_id=learner.image_token_id,
        weights=LearnerWeights(learner.model), checkpoint=served_checkpoint(), open_image=open_rgb,
    )  # fmt: skip
    torch.set_num_threads(2)  # not what the environment says
    torch.manual_seed(3)
    before = found()
    seen = {}
    backend = build_backend(resolved_rollout(config), parts)
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
