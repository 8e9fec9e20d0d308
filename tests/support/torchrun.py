"""Ranks as ``torchrun`` starts them, without waiting for their imports.

The agent is torchrun's own (``elastic_launch``, which its command line calls) and so are its ranks, but both are
:mod:`forked <support.forked>`. The command line itself is what ``coordexp launch`` starts, and is tested there.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from support.forked import LEARNER, Behind, forked

TIMEOUT_S = 300.0


class Finished(NamedTuple):
    """``output``: what agent and ranks printed, both streams."""

    returncode: int
    output: str


def torchrun(
    *command: object,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    behind: Behind = LEARNER,
) -> Finished:
    """Two ranks of ``command`` (a script and its arguments, or ``-m``, a module and its arguments), to their end.
    ``behind``: as :func:`support.forked.forked` takes it.

    Raises:
        TimeoutError: they are not done after ``timeout_s``; they are killed.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        log = Path(file.name)
        agent = start(*command, log=log, environment=environment, behind=behind)
        try:
            return Finished(wait(agent, timeout_s), log.read_text(errors="replace"))
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{log.read_text(errors='replace')[-3000:]}") from None


def start(
    *command: object, log: Path, environment: Mapping[str, str] | None = None, behind: Behind = LEARNER
) -> BaseProcess:
    """The agent of :func:`torchrun`, not waited for; everything is printed into ``log``."""
    return forked(_agent, [str(word) for word in command], log=log, environment=environment, behind=behind)


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


def _agent(command: list[str]) -> None:
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
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's own, which says the rank
        sys.exit(1)
