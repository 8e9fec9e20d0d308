"""Train shipped configurations with a tiny model, on the CPU; ``run_on_gpu.py`` does the same on a simulated GPU.

    python tests/fake_cuda/run_shipped.py --out FOLDER [ROW …]

A row goes through ``check_run``, ``build_trainer``, ``train`` and ``save_model`` in a process of its own, forked from
this one, which has imported everything. Its result is ``FOLDER/cpu/ROW.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_without_vllm
import torch
import vllm.exceptions  # noqa: F401  # pushes import it
from rich.console import Console
from server_without_vllm import servers_without_vllm
from shipped_rows import ROWS, Row

from coordexp.config import load_config
from coordexp.training import checked_run, offload, run
from support.tiny_run import tiny_checkpoint, tiny_scenes

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
LIMIT_S = 600  # of a row, which takes seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Where rows run. ``context`` surrounds each run; ``after_loading`` is called once the model is loaded.
    ``movable``: types of tensors that an offload may move; ``seen``: figures that are added to a result."""

    name: str
    device: torch.device
    context: Callable[[], AbstractContextManager[Any]]
    after_loading: Callable[[], None] = lambda: None
    movable: tuple[type[torch.Tensor], ...] = ()
    seen: Callable[[], dict[str, Any]] = dict


CPU = Machine("cpu", torch.device("cpu"), nullcontext)


def overrides(row: Row, output_dir: Path) -> dict[str, Any]:
    """Keys that every row replaces: model, data, number of steps, and sizes that a CPU cannot hold."""
    return {
        "model.model": str(tiny_checkpoint()),
        "model.fused_kernels": False,  # Triton kernels
        "data.num_workers": 0,
        "custom.train_jsonl": str(tiny_scenes()),
        "custom.val_jsonl": str(tiny_scenes()),
        "custom.val_sample_limit": 2,
        "training.output_dir": str(output_dir),
        "training.report_to": ["none"],
        "training.max_steps": 2,
        "training.effective_batch_size": 4,
        "training.per_device_train_batch_size": 2,
        "training.warmup_steps": 0,
        "training.learning_rate": 1e-3,
        "training.logging_steps": 1,
        "training.save_strategy": "steps",
        "training.save_steps": 1,
        "training.eval_strategy": "steps",
        "training.eval_steps": 2,
        "training.metric_for_best_model": None,
        "training.packing_min_fill_ratio": 0.01,
        "global_max_length": 512,
        "rollout_matching.max_new_tokens": 18,
        "rollout_matching.decode_batch_size": 2,
        **row.changes,
    }


def train(machine: Machine, row: Row, output_dir: Path, resume: Path | None) -> dict[str, Any]:
    """Train one row. Returns what the tests compare."""
    changes = overrides(row, output_dir) | {"training.resume_from_checkpoint": None if resume is None else str(resume)}
    with machine.context(), servers_without_vllm(row.servers, machine.device) as servers:
        if servers:
            urls = [{"base_url": one.url, "group_port": one.group_port} for one in servers]
            changes["rollout_matching.vllm.server.servers"] = urls
        checked = checked_run.check_run(load_config(CONFIGS / row.config, changes), servers_are_up=False)
        for one in servers:
            one.guarded = checked.rollout.repeat_terminate.enabled
        trainer, checkpoint = run.build_trainer(checked, Console(quiet=True))
        machine.after_loading()
        elsewhere = not_on(machine.device, trainer, "built")
        trainer.train(None if checkpoint is None else str(checkpoint))
        elsewhere += not_on(machine.device, trainer, "trained")
        trainer.save_model()
        engine = engine_without_vllm.use_of(trainer.backend)
        trainer.close()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [[line["step"], line["loss"], line["grad_norm"]] for line in lines],
        "evaluated": any("eval_rollout/f1" in line for line in trainer.state.log_history),
        "elsewhere": elsewhere,
        "engine": engine,
        "pushes_to_servers": [one.pushes for one in servers],
        "files": sorted(path.name for path in output_dir.iterdir()),
    }


def not_on(device: torch.device, trainer: Any, when: str) -> list[str]:
    """Weights, buffers, parameters of the optimizer and its state that are not on ``device``. AdamW in several kernels
    counts its steps on the host, in scalars."""
    run_state = trainer.run
    named = [*run_state.loaded.model.named_parameters(), *run_state.loaded.model.named_buffers()]
    for number, group in enumerate(run_state.optimizer.param_groups):
        named += [(f"optimizer group {number}, parameter {i}", one) for i, one in enumerate(group["params"])]
    for number, state in enumerate(run_state.optimizer.state.values()):
        tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor) and one.dim() > 0}
        named += [(f"optimizer state {number} {name}", one) for name, one in tensors.items()]
    return [f"{when}: {name} is on {one.device}" for name, one in named if one.device != device]


@contextmanager
def one_process_of_torchrun() -> Iterator[None]:
    """A process group of one, in which FSDP runs although :func:`check_parallel` refuses it."""
    variables = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with (
        patch.dict(os.environ, variables),
        patch.object(checked_run, "check_parallel", lambda config, world_size: None),
    ):
        yield
    torch.distributed.destroy_process_group()


@contextmanager
def replaced(machine: Machine) -> Iterator[None]:
    """Stand-ins for parts that are missing here: vLLM, and plain tensors as the only ones that an offload may move."""
    with (
        patch.object(run, "build_backend", engine_without_vllm.build_backend),
        patch.object(offload, "MOVABLE", (*offload.MOVABLE, *machine.movable)),
        patch.dict(os.environ, {"COORDEXP_API_KEY": "of server_multi_node.yaml"}),
    ):
        yield


def run_row(machine: Machine, row: Row, folder: Path) -> dict[str, Any]:
    started = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    resume = None
    try:
        with replaced(machine), one_process_of_torchrun() if row.fsdp else nullcontext():
            if row.resumed:  # from the first step of a run that made two
                train(machine, row, folder / "before", None)
                resume = folder / "before" / "checkpoint-1"
            found = train(machine, row, folder / "run", resume)
    except BaseException:  # reported by the test
        found = {"error": traceback.format_exc()}
    return found | machine.seen() | {"seconds": time.perf_counter() - started}


def in_a_fork(machine: Machine, row: Row, folder: Path, result: Path) -> None:
    """Run a row in a forked process, with its output in ``folder``'s log. Writes ``result`` in any case."""
    result.parent.mkdir(parents=True, exist_ok=True)
    partial = result.with_suffix(".partial")
    child = os.fork()
    if child == 0:
        log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        partial.write_text(json.dumps(run_row(machine, row, folder)))
        os._exit(0)
    deadline = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not partial.exists():
        partial.write_text(json.dumps({"error": f"no result after {LIMIT_S} s, or killed (status {ended[1]})"}))
    partial.replace(result)


def main(machine: Machine = CPU) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True)
    flags.add_argument("rows", nargs="*", metavar="ROW", help="of shipped_rows.py [all]")
    options = flags.parse_args()
    torch.set_num_threads(1)
    tiny_checkpoint()  # both are made once, not in each fork
    tiny_scenes()
    out = options.out / machine.name
    failed = 0
    for row in ROWS:
        if options.rows and row.name not in options.rows:
            continue
        result = out / f"{row.file}.json"
        in_a_fork(machine, row, out / row.file, result)
        found = json.loads(result.read_text())
        failed += "error" in found
        told = found["error"].strip().splitlines()[-1] if "error" in found else f"losses {found['losses']}"
        print(f"{row.name}: {told} ({found.get('seconds', 0):.1f} s)", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
