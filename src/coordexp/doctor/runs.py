"""Shipped configurations, started by ``coordexp train`` as users start them, and their logs: seconds by part of a step,
rates, and the share of a GPU's arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from coordexp.checkpoints.describe import TABLES, weight_shapes
from coordexp.checkpoints.folder import Checkpoint, part_of
from coordexp.config import RunConfig, load_config
from coordexp.config.schema import TunerConfig
from coordexp.data.files import asset
from coordexp.errors import CoordExpError

STATE = "trainer_state.json"
LOG_LINES = 12  # of a failed run's output, in the error
MATRIX = 8192  # side of the matrices whose product shows the GPU's speed
# Parts of an optimizer step, in their order.
PARTS = (
    "reading",  # waiting for samples that loader processes have not encoded yet
    "push",  # of weights to the engine, with its wake-up
    "answers",
    "targets",  # parsing and matching that decoding does not hide, building targets, the engine's sleep
    "packing",
    "rows",  # waiting for the tensors of a packed row
    "forward and backward",
    "optimizer",
)


class ShippedRunFailed(CoordExpError):
    """A shipped configuration did not train to its end."""


@dataclass(frozen=True)
class ShippedRun:
    """A finished run. ``lines``: its log, a line for each optimizer step. ``warm_up``: steps that figures leave out.
    ``seconds``: of the whole command."""

    config: RunConfig
    lines: Sequence[Mapping[str, float]]
    seconds: float
    warm_up: int

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part of a step."""
        steps = [_parts(line) for line in self._measured]
        return {part: sum(step[part] for step in steps) / len(steps) for part in PARTS}

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def computing_s(self) -> float:
        """Mean seconds of a step in which the device computes gradients and weights."""
        return self.parts["forward and backward"] + self.parts["optimizer"]

    def per_step(self, metric: str) -> float:
        """Mean of a metric over the measured steps."""
        return sum(line.get(metric, 0.0) for line in self._measured) / len(self._measured)

    @cached_property
    def flops(self) -> float:
        """Operations of a step's matrix products, without attention's own and without recomputation."""
        units = {name: self.per_step(f"train/{name}_total") for name in ("tokens", "patches", "supervised")}
        return step_flops(self.config, **units)

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for tables and JSON."""
        figures = {f"{part}_s": seconds for part, seconds in self.parts.items()}
        tokens, images = self.per_step("train/tokens_total"), self.per_step("train/samples_total")
        figures |= {
            "step_s": self.step_s, "tokens": tokens, "images": images,
            "rows_of_step": self.per_step("train/micro_steps"),
            "tokens_per_s": tokens / self.step_s, "images_per_s": images / self.step_s,
            "tokens_per_s_computing": tokens / self.computing_s, "flops": self.flops,
            "flops_per_s_computing": self.flops / self.computing_s, "flops_per_s": self.flops / self.step_s,
        }  # fmt: skip
        if "memory/allocated_peak_gb" in self.lines[-1]:
            figures |= {
                f"{kind}_peak_gb": self.lines[-1][f"memory/{kind}_peak_gb"] for kind in ("allocated", "reserved")
            }
        return {name: float(value) for name, value in figures.items()}

    def shares(self) -> str:
        """Each part's share of a step, without those under one per cent."""
        found = {part: seconds / self.step_s for part, seconds in self.parts.items()}
        return ", ".join(f"{part} {share:.0%}" for part, share in found.items() if share >= 0.01)

    @property
    def _measured(self) -> Sequence[Mapping[str, float]]:
        return self.lines[self.warm_up :]


def _parts(line: Mapping[str, float]) -> dict[str, float]:
    push, answers = (line.get(f"time/{name}_s", 0.0) for name in ("weight_sync", "rollout_wait"))
    pack, waited = line["time/pack_s"], line["time/row_wait_s"]
    seconds = (
        line["time/data_wait_s"], push, answers, line["time/window_prepare_s"] - push - answers - pack, pack, waited,
        line["time/learner_s"] - waited, line["time/optimizer_s"],
    )  # fmt: skip
    return dict(zip(PARTS, seconds, strict=True))


def train_shipped(file: str, keys: Mapping[str, Any], log: Path, timeout_s: float, warm_up: int = 2) -> ShippedRun:
    """Run ``coordexp train`` for ``configs/FILE`` with ``keys`` on top; its output goes to ``log``.

    Raises:
        ConfigError: the keys do not fit the file.
        ShippedRunFailed: it exited with an error, did not end in time, or left no log of more than ``warm_up`` steps.
    """
    path = asset(f"configs/{file}")
    given = {"training.logging_steps": 1, **keys}
    config = load_config(path, given)
    words = [f"{key}={json.dumps(value, default=str)}" for key, value in given.items()]
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as output:
        # In this process's group, so that whoever ends the group ends the run too.
        command = [sys.executable, "-m", "coordexp", "train", str(path), *words]
        given_output = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        try:
            code = subprocess.run(command, **given_output, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:  # it has been killed
            code = None
    seconds = time.monotonic() - started
    ended = f"not done after {timeout_s:.0f} s" if code is None else f"exit code {code}"
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    state = Path(config.training.output_dir) / STATE
    if code != 0 or not state.is_file():
        raise ShippedRunFailed(f"coordexp train configs/{file}: {ended}; the end of its output ({log}):\n{last}")
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    lines = [line for line in history if "time/learner_s" in line]
    if len(lines) <= warm_up:
        raise ShippedRunFailed(
            f"coordexp train configs/{file}: {len(lines)} steps logged, {warm_up} are warm-up; {log}"
        )
    return ShippedRun(config, lines, seconds, warm_up)


def step_flops(config: RunConfig, *, tokens: float, patches: float, supervised: float) -> float:
    """:func:`product_flops` for the checkpoint ``config.model.model``."""
    checkpoint = Checkpoint.open(config.model.model)
    shapes = weight_shapes(checkpoint)
    return product_flops(config.tuner, checkpoint.config, shapes, tokens=tokens, patches=patches, supervised=supervised)


def product_flops(
    tuner: TunerConfig,
    model: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    tokens: float,
    patches: float,
    supervised: float,
) -> float:
    """Operations of the matrix products of a step's forward and backward. ``model``: a checkpoint's ``config.json``;
    ``shapes``: of its weights, by name.

    A weight of the language model is used once a token, of the vision tower once a patch, of a merger once for each
    group of patches that it merges, of the head once a supervised position. A use costs two operations in the forward,
    two for the weight's gradient if it is trained, and two for its input's gradient if anything before it is trained.
    """
    merged = int(model["vision_config"]["spatial_merge_size"]) ** 2
    uses = {"vit": patches, "aligner": patches / merged, "llm": tokens}
    frozen = {part: getattr(tuner, f"freeze_{part}") for part in uses}
    lora = tuner.train_type == "lora"
    order = ("vit", "aligner", "llm")  # in which a forward passes them
    total = 0.0
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) < 2 or module.rpartition(".")[2] in TABLES:
            continue
        part = part_of(name)
        reached = not all(frozen[one] for one in order[: order.index(part) + 1])  # by a gradient, if only of adapters
        each = 2 + 2 * (not lora and not frozen[part]) + 2 * reached
        total += each * uses[part] * prod(shape)
        if lora and not frozen[part] and len(shape) == 2:
            total += 6 * uses[part] * tuner.lora_rank * sum(shape)
    head = int(model["text_config"]["vocab_size"]) * int(model["text_config"]["hidden_size"])
    return total + (4 if lora or tuner.freeze_llm else 6) * supervised * head


def matrix_flops(device: torch.device) -> float:
    """Operations a second of a large product in bfloat16."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        torch.mm(a, b)
    torch.cuda.synchronize()
    return 10 * 2 * MATRIX**3 / (time.perf_counter() - started)
