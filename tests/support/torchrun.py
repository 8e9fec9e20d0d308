"""Two ranks as ``torchrun`` starts them, without waiting for their imports.

The agent is torchrun's own (``elastic_launch``, which its command line calls) and so are its ranks, but both are
:mod:`forked <support.forked>`. The command line itself is what ``coordexp launch`` starts, and is tested there.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from coordexp.config import RunConfig, load_config
from coordexp.distributed import rank
from coordexp.training.run import run_training
from support.forked import TRAINER, Behind, by_file, forked
from support.tiny_run import step_lines, weights

TIMEOUT_S = 900.0
# Plain SGD shows the gradient itself in the weights.
SGD: dict[str, Any] = {"training__optim": "sgd", "training__learning_rate": 0.05, "training__max_grad_norm": 0.0}


class Finished(NamedTuple):
    """``output``: everything that agent and ranks printed."""

    returncode: int
    output: str


def torchrun(*command: Any, timeout_s: float = TIMEOUT_S, behind: Behind = TRAINER) -> Finished:
    """Run two ranks of ``command`` to their end.

    Args:
        command: a function of a test file and its arguments, a script and its arguments, or ``-m``, a module and its
            arguments.
        behind: see :func:`support.forked.forked`.

    Raises:
        TimeoutError: they run for longer than ``timeout_s``; they are killed.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        log = Path(file.name)
        agent = start(*command, log=log, behind=behind)
        try:
            return Finished(wait(agent, timeout_s), log.read_text(errors="replace"))
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{log.read_text(errors='replace')[-3000:]}") from None


def results_of_two(folder: Path, *command: Any, behind: Behind = TRAINER) -> list[Any]:
    """Run two ranks to their end; returns what each wrote into ``folder``: ``rank0.json``, ``rank1.json``."""
    done = torchrun(*command, behind=behind)
    assert done.returncode == 0, done.output[-4000:]
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in (0, 1)]


def start(*command: Any, log: Path, behind: Behind = TRAINER) -> BaseProcess:
    """Start the agent of :func:`torchrun`; everything is printed into ``log``."""
    function: Any = command[0]
    if callable(function):
        return forked(_agent, *by_file(function, *command[1:]), log=log, behind=behind)
    return forked(_agent, _run, [str(word) for word in command], log=log, behind=behind)


def wait(agent: BaseProcess, timeout_s: float = TIMEOUT_S) -> int:
    """The agent's exit code.

    Raises:
        TimeoutError: it runs for longer than ``timeout_s``, and is killed with its ranks.
    """
    agent.join(timeout_s)
    if agent.exitcode is None:
        assert agent.pid is not None
        os.killpg(agent.pid, 9)
        agent.join()
        raise TimeoutError(f"the ranks are not done after {timeout_s:.0f} s")
    return agent.exitcode


def _agent(function: Callable[..., None], *arguments: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(how, _rank)(function, *arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def _rank(function: Callable[..., None], *arguments: Any) -> None:
    """Exit code and traceback are an interpreter's."""
    try:
        function(*arguments)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's own, which names the rank
        sys.exit(1)


def _run(command: list[str]) -> None:
    module = command[0] == "-m"
    sys.argv = command[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


# -- training ----------------------------------------------------------------------------------------------------------


def train_rank(yaml: Path) -> None:
    """Train ``yaml`` as one of several ranks; write what this rank logged into ``rank0.json``, ``rank1.json``."""
    config = load_config(yaml)
    trainer = run_training(config, Console(quiet=True))
    result = {
        "steps": [line for line in trainer.state.log_history if "loss" in line],
        "evaluations": [line for line in trainer.state.log_history if "eval_rollout/f1" in line],
        "sharded": sum(isinstance(weight, DTensor) for weight in trainer.model.parameters()),
    }
    (Path(config.training.output_dir) / f"rank{rank()}.json").write_text(json.dumps(result), encoding="utf-8")


def yaml_of(config: RunConfig) -> Path:
    folder = Path(config.training.output_dir)
    return folder.with_name(f"{folder.name}.yaml")


def train_by_two(
    config: RunConfig, *arguments: Any, by: Callable[..., None] = train_rank, behind: Behind = TRAINER
) -> list[dict[str, Any]]:
    """Train with two ranks of ``by``; returns what :func:`train_rank` wrote for each."""
    return results_of_two(Path(config.training.output_dir), by, yaml_of(config), *arguments, behind=behind)


def assert_same_weights(config: RunConfig, alone: Any, atol: float = 5e-6, rtol: float = 1e-4) -> None:
    trained = load_file(Path(config.training.output_dir) / "model.safetensors")
    expected = weights(alone.model)
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_training(config: RunConfig, alone: Any, ranks: list[dict[str, Any]], but: Collection[str] = ()) -> None:
    """Both ranks log the same, and the same about whole steps as the trainer ``alone`` except for the names in ``but``;
    the weights are equal too."""
    assert_same_weights(config, alone, atol=3e-5, rtol=1e-3)
    first, second = ([{k: v for k, v in line.items() if "time/" not in k} for line in one["steps"]] for one in ranks)
    assert first == second
    for line, other in zip(first, step_lines(alone), strict=True):
        # Each process has its own rows; everything else is of the whole step.
        for name in other.keys() - set(but):
            if name.startswith(("loss", "coord_diag/", "stage2/", "rollout/", "safeguard/", "grad_norm")):
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
