"""Processes that need not import torch and transformers: forked from one of this session that has done only that.

A rank of a tiny model trains for two seconds, and would import for ten. It is a process like any other: it has its own
process group, environment and log, and a signal ends it as it would end one that a shell had started.

Processes with vLLM engines are forked from a second one, which has imported vLLM as well, and ``swift rollout`` from a
third: ms-swift patches transformers.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing import process as parentage
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple


class Behind(NamedTuple):
    """A server that has imported ``modules`` and forks processes."""

    modules: tuple[str, ...]
    server: forkserver.ForkServer


TRAINER = Behind((
    "accelerate", "torch.distributed.fsdp", "torch.distributed.launcher.api",
    "transformers.models.auto.processing_auto", "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3_vl.modeling_qwen3_vl", "transformers.models.qwen3_vl.processing_qwen3_vl",
    "transformers.trainer", "coordexp.cli.commands", "coordexp.inference.evaluation", "coordexp.inference.prediction",
    "coordexp.training.run", "coordexp.training.loop",
), forkserver.ForkServer())  # fmt: skip
_VLLM = ("vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker",
         "vllm.model_executor.models.qwen3_vl")  # fmt: skip
ENGINES = Behind((
    *TRAINER.modules, "vllm", "vllm.v1.engine.async_llm", *_VLLM, "coordexp.engine.worker.cpu_patches",
    "coordexp.engine.server.app", "coordexp.engine.server.served_engine", "coordexp.engine.trainer.colocated",
    "coordexp.engine.worker.extension",
), forkserver.ForkServer())  # fmt: skip
SWIFT = Behind((
    "swift.pipelines.infer.rollout", *_VLLM, "coordexp.engine.server.swift_rollout",
    "coordexp.engine.worker.cpu_patches",
), forkserver.ForkServer())  # fmt: skip


def forked(
    target: Callable[..., None],
    *arguments: object,
    log: Path,
    err: Path | None = None,
    environment: Mapping[str, str] | None = None,
    behind: Behind = TRAINER,
) -> BaseProcess:
    """``target(*arguments)``, started.

    Args:
        target, arguments: picklable; :func:`by_file` makes them of a function of a test file.
        log, err: take what it prints; without ``err``, ``log`` takes both streams.
        environment: besides the present one, and one thread for torch.
        behind: decides which modules are imported already. With vLLM imported, its engine processes are forked too,
            as by default with GPUs; on CPUs vLLM spawns them, and each imports everything again.

    Returns:
        Its process. ``exitcode`` is negative for a signal.
    """
    for file in {log, err or log}:
        file.write_bytes(b"")  # a test may look for a line before the process begins, and must not find an old one
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(target, arguments, str(log), str(err or log), whole))
    with _from(behind):
        process.start()
    return process


def by_file(function: Callable[..., Any], *arguments: object) -> tuple[Any, ...]:
    """Target and arguments that call a function of a test file: another process cannot import it by pytest's name."""
    return _call, inspect.getsourcefile(function), function.__name__, arguments


def _call(file: str, name: str, arguments: tuple[object, ...]) -> None:
    runpy.run_path(file)[name](*arguments)


@contextmanager
def _from(behind: Behind) -> Iterator[None]:
    """multiprocessing's contexts share one server; here it is that of ``behind``."""
    behind.server.set_forkserver_preload([*behind.modules, "support.no_collection"])
    shared: Any = forkserver
    usual = shared.connect_to_new_process
    shared.connect_to_new_process = behind.server.connect_to_new_process
    try:
        yield
    finally:
        shared.connect_to_new_process = usual


def coordexp(command: list[str]) -> None:
    from coordexp.cli import main

    main(command)


def coordexp_in(folder: str, command: list[str]) -> None:
    os.chdir(folder)
    tempfile.tempdir = None  # imports have asked for it
    coordexp(command)


def swift_rollout(arguments: list[str]) -> None:
    """``swift rollout``, as a target; its workers are forked from it, and have none of its plugins imported."""
    known: Any = parentage
    known._parent_process = None  # by which the plugin knows a worker
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=_forget_plugins)
    sys.argv = ["rollout", *arguments]
    from swift.pipelines import rollout_main

    rollout_main()


class Handle:
    """A forked process with the methods of :class:`subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    target: Callable[..., None], arguments: tuple[object, ...], log: str, err: str, environment: dict[str, str]
) -> None:
    os.setsid()
    # Processes that it starts are forked from it, as from a command that a shell started, and inherit its files.
    multiprocessing.set_start_method(None, force=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out if err == log else os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    environment = {**_set_by_imports(), **environment}
    os.environ.clear()
    os.environ.update(environment)
    if "vllm" in sys.modules:
        _fork_engines()
    target(*arguments)


def _set_by_imports() -> dict[str, str]:
    """Variables that the process which this one was forked from did not begin with."""
    began = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for name, value in os.environ.items() if os.fsencode(f"{name}={value}") not in began}


def _fork_engines() -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    modules: tuple[Any, ...] = (utils, multiproc_executor)
    for module in modules:
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=_let_go_of_ports)


def _let_go_of_ports() -> None:
    """As in a spawned process: the port of a dead server must refuse connections while its engines still end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
        except OSError:  # the listing's own
            continue
        with socket.socket(fileno=os.dup(fd)) as one:
            is_port = one.family in (socket.AF_INET, socket.AF_INET6) and not _has_peer(one)
        if is_port:
            os.dup2(nothing, fd)  # not closed: the number's owner would later close another file
    os.close(nothing)


def _has_peer(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def _forget_plugins() -> None:
    for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
        del sys.modules[name]
