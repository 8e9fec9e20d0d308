"""Processes that need not import torch and transformers: forked from one of this session that has done only that.

A rank of a tiny model trains for two seconds, and would import for ten. It is a process like any other: it has its own
process group, environment and log, and a signal ends it as it would end one that a shell had started.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = (
    "accelerate",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "transformers.models.auto.processing_auto",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "transformers.trainer",
    "coordexp.cli",
    "coordexp.inference.predict",
    "coordexp.training.build",
    "coordexp.training.trainer",
)


def forked(
    target: Callable[..., None],
    *arguments: object,
    log: Path,
    err: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """``target(*arguments)``, started.

    Args:
        target, arguments: picklable; the target is a function of a module, not of a test.
        log, err: take what it prints; without ``err``, ``log`` takes both streams.
        environment: besides the present one, and one thread for torch.

    Returns:
        Its process. ``exitcode`` is negative for a signal.
    """
    for file in {log, err or log}:
        file.write_bytes(b"")  # whoever waits for a line may look before the process begins, and must find no old one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    process = context.Process(target=_run, args=(target, arguments, str(log), str(err or log), whole))
    process.start()
    return process


def coordexp(command: list[str]) -> None:
    """The command line, as a target."""
    from coordexp.cli import main

    main(command)


class Handle:
    """A forked process, as :class:`subprocess.Popen` would hold it."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """As :meth:`poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once there is one.

        Raises:
            subprocess.TimeoutExpired: there is none within ``timeout`` seconds.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
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
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out if err == log else os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)
