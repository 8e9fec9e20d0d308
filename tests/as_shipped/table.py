"""Everything that users start: a row for each shipped YAML, and what a row replaces in it.

To read a row, for example ``Row("stage1/lora", FULL_SIZE, _SIZES)``: ``configs/stage1/lora.yaml`` is started by the
command of its first lines, ``coordexp train configs/stage1/lora.yaml``, followed by each key of :data:`FULL_SIZE` as
``key=value``; :data:`_SIZES` says in words what that replaces.

Replacements are in two parts: ``short`` makes the run short, on every machine; ``on_cpu`` is for machines without a
GPU. Everything else is as shipped: number types, loader processes, packing, saving, evaluation, logs, resuming.

A row is started to its end, its model answers, the same command says that the run is finished, and a run of its own is
ended by the signal of :func:`interruption`, if it has one. Rows of documented commands are in :mod:`documented`.

This module imports neither torch nor coordexp.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TRAIN = "coordexp train configs/{name}.yaml"
TORCHRUN = "torchrun --nproc_per_node=2 -m coordexp train configs/{name}.yaml"
LAUNCH = "coordexp launch configs/{name}.yaml"
# A start puts its own paths and free ports in place of these.
MODEL, DATA, RUN, PORT, GROUP_PORT = "{model}", "{data}", "{run}", "{port}", "{group_port}"
SCENES = 6  # images of DATA; with EFFECTIVE of them a step, an epoch has three steps
EFFECTIVE = 2

# --- sets of replacements ---

# Every row: six generated scenes for training and validation, and a folder of its own.
PLACES: dict[str, Any] = {
    "custom.train_jsonl": DATA,
    "custom.val_jsonl": DATA,
    "training.output_dir": RUN,
}
# Rows of files for models of 2B and more. The demo's model takes their place: it has 4 million parameters and answers
# in the right format. Samples a step and the length of rows are in proportion to images of 128 pixels; there is a
# checkpoint and an evaluation within three steps.
FULL_SIZE: dict[str, Any] = PLACES | {
    "model.model": MODEL,
    "custom.val_sample_limit": 2,
    "training.effective_batch_size": EFFECTIVE,
    "training.per_device_train_batch_size": 1,
    "training.save_steps": 1,
    "training.eval_steps": 2,
    "training.max_steps": 3,
    "global_max_length": 384,
    "rollout_matching.max_new_tokens": 192,
}
# Rows of files for models of 4 million parameters, of a CPU's size already. Only samples and steps are fewer.
TINY: dict[str, Any] = PLACES | {
    "custom.val_sample_limit": 2,
    "training.per_device_train_batch_size": EFFECTIVE,
    "training.max_steps": 3,
}
TINY_SAVES: dict[str, Any] = TINY | {"training.save_steps": 1}  # the file saves checkpoints, hundreds of steps apart
TINY_CONTINUES: dict[str, Any] = TINY_SAVES | {"model.model": MODEL}  # the file's model is what another run leaves
IN_MID_EPOCH = {"training.max_steps": 4}
# vLLM without a GPU: its compiler takes minutes there, and the share of the device's memory is one of the machine's.
ENGINE_ON_CPU: dict[str, Any] = {
    "rollout_matching.vllm.enforce_eager": True,
    "rollout_matching.vllm.gpu_memory_utilization": 0.02,
}
# [] starts servers, or the trainer, on the CPU.
LAUNCH_ON_CPU: dict[str, Any] = ENGINE_ON_CPU | {"launch.server_devices": [], "launch.learner_devices": []}
ONE_SERVER: dict[str, Any] = {
    "rollout_matching.vllm.server.servers": [{"base_url": f"http://127.0.0.1:{PORT}", "group_port": GROUP_PORT}]
}

# --- what ends a run before its last step ---

TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
INTERRUPTIONS = (TERM, INT, USR1, KILL)
WORKERS = "data.num_workers"
# For files that save nothing before the end: an interrupted run of them has checkpoints, and continues from them.
SAVES_STEPS = {
    "training.save_strategy": "steps",
    "training.save_steps": 1,
    "training.resume_from_checkpoint": True,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One shipped YAML.

    Attributes:
        name: the file below ``configs``, without ``.yaml``.
        short: keys that make the run short, on every machine, and ``why``.
        on_cpu: keys that it takes on a machine without a GPU.
        command: as the file documents it; ``{name}`` is its name.
        ranks: processes of torchrun.
        ends: where in an epoch of three steps the run ends.
        interrupted_with: keys of the run that is interrupted; they do not change the weights.
        same_as: the row with whose replaced configuration this one's is identical, except for ``training.output_dir``,
            which a test compares. It is started to its end, and not interrupted again.
        server: the row whose ``coordexp serve`` answers this one's trainer on a machine without a GPU, where ``on_cpu``
            trains by ``coordexp train``: a server takes a minute to start there, so rows share one.
        gpus: the least number on which its own command can run.
        failed: how the same start failed at commit b290dcee, when no test started shipped files.
    """

    name: str
    short: Mapping[str, Any]
    why: str
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    command: str = TRAIN
    ranks: int = 1
    ends: str = "at the end of an epoch"
    interrupted_with: Mapping[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    server: str | None = None
    gpus: int = 1
    failed: str | None = None

    @property
    def path(self) -> Path:
        return CONFIGS / f"{self.name}.yaml"

    @property
    def is_small(self) -> bool:
        """Whether the file is the demo's or a study's, for a model of 4 million parameters."""
        return self.name.startswith(("bccd/", "crowd/", "demo/"))

    @property
    def uses_vllm(self) -> bool:
        return any(key.startswith("rollout_matching.vllm.") for key in self.on_cpu)

    @property
    def kind(self) -> str:
        """The kind of run. Each of :data:`INTERRUPTIONS` ends a row of each kind."""
        if self.uses_vllm:
            return "answers by vLLM"
        if "two_channel" in self.name:
            return "two channels"
        return "rollout matching" if "stage2" in self.name else "stage 1"

    def words(self, on_gpu: bool = False) -> list[str]:
        """The command's words, without replacements."""
        joins_a_server = self.server is not None and not on_gpu and self.command == LAUNCH
        return (TRAIN if joins_a_server else self.command).format(name=self.name).split()

    def replaced(self, on_gpu: bool = False) -> dict[str, Any]:
        return {**self.short, **({} if on_gpu else self.on_cpu)}


# Of ``why``.
_SIZES = "model, data, folder, steps; rows, answers and samples a step in proportion to 128-pixel images"
_PORTS = f"{_SIZES}; one server, on free ports"
_FEW = "model, data, folder; few steps of two samples"
_OWN = "data, folder; few steps of two samples. The model is the file's own"
# Of ``failed``. The third of these faults needs a GPU: tests/fake_cuda/shipped_rows.py.
_HUNG = "loader processes: after the last step it waited for ever, and the final model was never written"
_CRASHED = "float32 weights, bf16 and skipped forced tokens: the first rollout crashed (Index put requires …)"

SERVED = "stage2_rollout_aligned/rewritten_server"
MIDDLE = "in the middle of an epoch"

ROWS: tuple[Row, ...] = (
    # -- stage 1 ------------------------------------------------------------------------------------------------------
    Row("stage1/sft", FULL_SIZE | IN_MID_EPOCH, _SIZES, ends=MIDDLE, interrupted_with={WORKERS: 1}, failed=_HUNG),
    Row("stage1/lora", FULL_SIZE, _SIZES),
    # -- stage 2 ------------------------------------------------------------------------------------------------------
    Row("stage2_rollout_aligned/base", FULL_SIZE, _SIZES, same_as="stage2_rollout_aligned/hf"),
    Row("stage2_rollout_aligned/hf", FULL_SIZE, _SIZES),
    Row("stage2_rollout_aligned/rewritten", FULL_SIZE | IN_MID_EPOCH, _SIZES, ends=MIDDLE, failed=_CRASHED),
    Row("stage2_rollout_aligned/lora", FULL_SIZE | IN_MID_EPOCH, _SIZES, ends=MIDDLE),
    Row("stage2_rollout_aligned/colocate", FULL_SIZE, _SIZES, ENGINE_ON_CPU),
    Row("stage2_rollout_aligned/rewritten_colocate", FULL_SIZE, _SIZES, ENGINE_ON_CPU),
    Row("stage2_rollout_aligned/server", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, gpus=2),
    Row(SERVED, FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED, gpus=2),
    Row("stage2_rollout_aligned/server_3v1", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED,
        gpus=4),
    Row("stage2_rollout_aligned/server_multi_node", FULL_SIZE | ONE_SERVER, _PORTS, ENGINE_ON_CPU, TORCHRUN, ranks=2,
        server=SERVED, gpus=20),
    # -- two channels -------------------------------------------------------------------------------------------------
    Row("stage2_two_channel/base", FULL_SIZE, _SIZES, interrupted_with={WORKERS: 4}),
    Row("stage2_two_channel/mixed", FULL_SIZE, _SIZES, same_as="stage2_two_channel/base"),
    Row("stage2_two_channel/a_only", FULL_SIZE | IN_MID_EPOCH, _SIZES, ends=MIDDLE),
    Row("stage2_two_channel/b_only", FULL_SIZE, _SIZES),
    Row("stage2_two_channel/prod", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED, gpus=4),
    Row("stage2_two_channel/smoke", {"custom.train_jsonl": DATA, "training.output_dir": RUN},
        "data, folder. Model, samples and its four steps are the file's own", interrupted_with=SAVES_STEPS),
    # -- 4 million parameters -----------------------------------------------------------------------------------------
    Row("bccd/stage1", TINY_SAVES, _OWN),
    Row("crowd/stage1", TINY_SAVES, _OWN),
    Row("crowd/large", TINY_CONTINUES, _FEW),
    Row("crowd/start", TINY_CONTINUES | IN_MID_EPOCH, _FEW, ends=MIDDLE),
    Row("crowd/stage2", TINY_CONTINUES, _FEW),
    Row("demo/stage1", TINY_CONTINUES | {"training.eval_steps": 2}, _FEW),
    Row("demo/stage1_second", TINY_CONTINUES | {"training.eval_steps": 2}, _FEW),
    Row("demo/start", TINY, _OWN, interrupted_with=SAVES_STEPS),
    Row("demo/sft", TINY_SAVES, _OWN),
    Row("demo/completed", TINY_SAVES, _OWN, same_as="demo/sft"),
    Row("demo/stage2", TINY_SAVES, _OWN),
    Row("demo/two_channel", TINY, _OWN, interrupted_with=SAVES_STEPS),
)  # fmt: skip
STARTED = [one for one in ROWS if one.same_as is None]

# YAML files that are parts of configurations: the row that uses each.
FRAGMENTS: dict[str, str] = {
    "stage2_rollout_aligned/parts/rewritten_target": "stage2_rollout_aligned/rewritten",
}


def row(name: str) -> Row:
    (found,) = [one for one in ROWS if one.name == name]
    return found


def interruption(of: Row) -> signal.Signals | None:
    """The signal that ends this row in every test run; the fault campaign tries all. In each kind, rows take the four
    in turns, in a random order, files for users' models before those of the demo and the studies. Of the latter, rows
    beyond the fourth of their kind are not interrupted."""
    rows = [one for one in STARTED if one.kind == of.kind]
    random.Random(f"rows of {of.kind}").shuffle(rows)
    rows.sort(key=lambda one: one.is_small)
    place = rows.index(of)
    return None if of.is_small and place >= len(INTERRUPTIONS) else INTERRUPTIONS[place % len(INTERRUPTIONS)]


def interrupted_step(of: Row, number: signal.Signals, steps: int) -> int:
    """After how many of ``steps`` steps: at least one more is whole, so that a slow test does not miss the run."""
    return random.Random(f"{of.name} {number.name}").randint(1, steps - 2)


def shipped() -> Iterator[str]:
    """Names of all YAML files below ``configs``."""
    for path in sorted(CONFIGS.rglob("*.yaml")):
        yield path.relative_to(CONFIGS).with_suffix("").as_posix()
