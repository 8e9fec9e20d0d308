"""Everything that users start: a row for each shipped YAML, and what a row replaces in it.

A row is started by the command of its file's own first lines. Its replacements are in two parts: ``short`` makes the
run short, on every machine; ``on_cpu`` is for machines without a GPU. Everything else is as shipped: number types,
loader processes, packing, saving, evaluation, logs, resuming. Rows of documented commands are in :mod:`documented`.

This module imports neither torch nor coordexp.
"""

from __future__ import annotations

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
# Names that a start replaces by its own paths and free ports.
MODEL, DATA, RUN, PORT, GROUP_PORT = "{model}", "{data}", "{run}", "{port}", "{group_port}"
SCENES = 12  # in DATA; with EFFECTIVE samples a step, an epoch has three steps
EFFECTIVE = 4

# Of every row: twelve generated scenes.
PLACES: dict[str, Any] = {
    "custom.train_jsonl": DATA,
    "custom.val_jsonl": DATA,
    "training.output_dir": RUN,
}
# Files for 2B and more: fewer samples a step and shorter rows, in proportion to images of 128 pixels; a checkpoint and
# an evaluation within three steps. The model has 4 million parameters and answers in the right format.
FULL_SIZE: dict[str, Any] = PLACES | {
    "model.model": MODEL,
    "custom.val_sample_limit": 4,
    "training.effective_batch_size": EFFECTIVE,
    "training.per_device_train_batch_size": 2,
    "training.save_steps": 1,
    "training.eval_steps": 2,
    "training.max_steps": 3,
    "global_max_length": 384,
    "rollout_matching.max_new_tokens": 192,
}
# Files for 4 million parameters are of a CPU's size: only fewer samples and steps.
SMALL: dict[str, Any] = PLACES | {
    "custom.val_sample_limit": 4,
    "training.per_device_train_batch_size": EFFECTIVE,
    "training.max_steps": 3,
}
SAVED: dict[str, Any] = SMALL | {"training.save_steps": 1}
LATER: dict[str, Any] = SAVED | {"model.model": MODEL}  # files whose model is the result of another run
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


@dataclass(frozen=True, slots=True)
class Interruption:
    """``number`` is sent when a checkpoint of this start is whole, of ``after_step`` or of a later step."""

    number: signal.Signals
    after_step: int


def interrupted(*pairs: tuple[signal.Signals, int]) -> tuple[Interruption, ...]:
    return tuple(Interruption(number, step) for number, step in pairs)


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
        again: a run with the same weights, interrupted and continued by the same command, with ``again_with`` changed
            (keys that do not change the weights).
        same_as: the row with whose replaced configuration this one's is identical, except for ``training.output_dir``,
            which a test compares. It is not started.
        server: the row whose ``coordexp serve`` answers this one's trainer on a machine without a GPU, where ``on_cpu``
            trains by ``coordexp train``: a server takes a minute to start there, so rows share one.
        gpus: the least number on which its own command can run.
    """

    name: str
    short: Mapping[str, Any]
    why: str
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    command: str = TRAIN
    ranks: int = 1
    ends: str = "at the end of an epoch"
    again: tuple[Interruption, ...] = ()
    again_with: Mapping[str, Any] = field(default_factory=dict)
    same_as: str | None = None
    server: str | None = None
    gpus: int = 1

    @property
    def path(self) -> Path:
        return CONFIGS / f"{self.name}.yaml"

    @property
    def uses_vllm(self) -> bool:
        return any(key.startswith("rollout_matching.vllm.") for key in self.on_cpu)

    def words(self, on_gpu: bool = False) -> list[str]:
        """The command's words, without replacements."""
        joins_a_server = self.server is not None and not on_gpu and self.command == LAUNCH
        return (TRAIN if joins_a_server else self.command).format(name=self.name).split()

    def replaced(self, on_gpu: bool = False) -> dict[str, Any]:
        return {**self.short, **({} if on_gpu else self.on_cpu)}


_SIZES = "model, data, folder, steps; rows, answers and samples a step in proportion to 128-pixel images"
_PORTS = f"{_SIZES}; one server, on free ports"
_FEW = "model, data, folder; three steps of four samples"
_OWN = "data, folder; three steps of four samples. The model is the file's own"
TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
WORKERS = "data.num_workers"
SERVED = "stage2_rollout_aligned/rewritten_server"

ROWS: tuple[Row, ...] = (
    # -- stage 1 ------------------------------------------------------------------------------------------------------
    Row("stage1/sft", FULL_SIZE | {"training.max_steps": 4}, _SIZES, ends="in the middle of an epoch",
        again=interrupted((TERM, 1), (KILL, 2)), again_with={WORKERS: 1}),
    Row("stage1/lora", FULL_SIZE, _SIZES),
    # -- stage 2 ------------------------------------------------------------------------------------------------------
    Row("stage2_rollout_aligned/base", FULL_SIZE, _SIZES, same_as="stage2_rollout_aligned/hf"),
    Row("stage2_rollout_aligned/hf", FULL_SIZE, _SIZES),
    Row("stage2_rollout_aligned/rewritten", FULL_SIZE | {"training.max_steps": 4}, _SIZES,
        ends="in the middle of an epoch", again=interrupted((KILL, 1), (INT, 2))),
    Row("stage2_rollout_aligned/lora", FULL_SIZE | {"training.max_steps": 2}, _SIZES,
        ends="in the middle of an epoch"),
    Row("stage2_rollout_aligned/colocate", FULL_SIZE, _SIZES, ENGINE_ON_CPU),
    Row("stage2_rollout_aligned/rewritten_colocate", FULL_SIZE, _SIZES, ENGINE_ON_CPU),
    Row("stage2_rollout_aligned/server", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, gpus=2),
    Row(SERVED, FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED, gpus=2),
    Row("stage2_rollout_aligned/server_3v1", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED,
        gpus=4),
    Row("stage2_rollout_aligned/server_multi_node", FULL_SIZE | ONE_SERVER, _PORTS, ENGINE_ON_CPU, TORCHRUN, ranks=2,
        server=SERVED, gpus=20),
    # -- two channels -------------------------------------------------------------------------------------------------
    Row("stage2_two_channel/base", FULL_SIZE, _SIZES, again=interrupted((USR1, 1)), again_with={WORKERS: 4}),
    Row("stage2_two_channel/mixed", FULL_SIZE, _SIZES, same_as="stage2_two_channel/base"),
    Row("stage2_two_channel/a_only", FULL_SIZE | {"training.max_steps": 2}, _SIZES, ends="in the middle of an epoch"),
    Row("stage2_two_channel/b_only", FULL_SIZE, _SIZES),
    Row("stage2_two_channel/prod", FULL_SIZE | ONE_SERVER, _PORTS, LAUNCH_ON_CPU, LAUNCH, server=SERVED, gpus=4),
    Row("stage2_two_channel/smoke", {"custom.train_jsonl": DATA, "training.output_dir": RUN},
        "data, folder. Model, samples and its four steps are the file's own"),
    # -- 4 million parameters -----------------------------------------------------------------------------------------
    Row("bccd/stage1", SAVED, _OWN),
    Row("crowd/stage1", SAVED, _OWN),
    Row("crowd/large", LATER, _FEW),
    Row("crowd/start", LATER | {"training.max_steps": 2}, _FEW, ends="in the middle of an epoch"),
    Row("crowd/stage2", LATER, _FEW),
    Row("demo/stage1", LATER | {"training.eval_steps": 2}, _FEW),
    Row("demo/stage1_second", LATER | {"training.eval_steps": 2}, _FEW),
    Row("demo/start", SMALL, _OWN),
    Row("demo/sft", SAVED, _OWN),
    Row("demo/completed", SAVED, _OWN, same_as="demo/sft"),
    Row("demo/stage2", SAVED, _OWN),
    Row("demo/two_channel", SMALL, _OWN),
)  # fmt: skip

# YAML files that are no configurations by themselves: which row uses them.
FRAGMENTS: dict[str, str] = {
    "stage2_rollout_aligned/parts/rewritten_target": "stage2_rollout_aligned/rewritten",
}


def row(name: str) -> Row:
    (found,) = [one for one in ROWS if one.name == name]
    return found


def shipped() -> Iterator[str]:
    """Names of all YAML files below ``configs``."""
    for path in sorted(CONFIGS.rglob("*.yaml")):
        yield path.relative_to(CONFIGS).with_suffix("").as_posix()
