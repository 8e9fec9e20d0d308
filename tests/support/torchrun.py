"""Ranks as ``torchrun`` starts them, without waiting for their imports.

The agent is torchrun's own (``elastic_launch``, which its command line calls), and each rank is a real process; but
both are forked from one process of this session that has imported torch and transformers, for which a rank takes ten
seconds otherwise, to train for two. The command line itself is what ``coordexp launch`` starts, and is tested there.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

IMPORTED = (
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "transformers.trainer",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "coordexp.training.build",
    "coordexp.training.trainer",
    "coordexp.inference.predict",
)
TIMEOUT_S = 300.0


class Finished(NamedTuple):
    """``output``: what agent and ranks printed, both streams."""

    returncode: int
    output: str


def torchrun(*command: object, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Finished:
    """Two ranks of ``command`` (a script and its arguments, or ``-m``, a module and its arguments), to their end.

    Raises:
        TimeoutError: they are not done after ``timeout_s``; they are killed.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        log = Path(file.name)
        agent = start(*command, log=log, environment=environment)
        try:
            return Finished(wait(agent, timeout_s), log.read_text(errors="replace"))
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{log.read_text(errors='replace')[-3000:]}") from None


def start(*command: object, log: Path, environment: Mapping[str, str] | None = None, processes: int = 2) -> BaseProcess:
    """The agent of :func:`torchrun`, not waited for; everything is printed into ``log``."""
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    agent = _context().Process(target=_agent, args=([str(word) for word in command], processes, str(log), whole))
    agent.start()
    return agent


def wait(agent: BaseProcess, timeout_s: float = TIMEOUT_S) -> int:
    """The agent's exit code.

    Raises:
        TimeoutError: it runs on after ``timeout_s``, and is killed with its ranks.
    """
    agent.join(timeout_s)
    if agent.exitcode is None:
        assert agent.pid is not None
        os.killpg(agent.pid, 9)
        agent.join()
        raise TimeoutError(f"the ranks are not done after {timeout_s:.0f} s")
    return agent.exitcode


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _agent(command: list[str], processes: int, log: str, environment: dict[str, str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    try:
        elastic_launch(how, _rank)(command)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def _rank(command: list[str]) -> None:
    """As the interpreter would run ``command``, exit code and traceback included."""
    module = command[0] == "-m"
    sys.argv = command[module:]
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's own, which says the rank
        sys.exit(1)
