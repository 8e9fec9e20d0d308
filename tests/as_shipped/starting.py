"""Starts commands as a user's shell does, in new processes, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from as_shipped.table import DATA, GROUP_PORT, MODEL, PORT, ROOT, RUN, SCENES, Interruption, Row
from coordexp.checkpoints.run_folder import SEAL, checkpoints_in
from coordexp.checkpoints.run_lock import check_not_running
from coordexp.config import RunConfig, load_config
from coordexp.data.scenes import SPARSE, write_scenes
from support.ports import free_ports

START_S = 300.0  # imports, model, engine and all steps, on a busy machine
AFTER_LAST_STEP_S = 60.0  # the last evaluation, saving, and ending; servers have 15 s
AFTER_SIGNAL_S = 10.0
MODULES = {"coordexp": "coordexp", "torchrun": "torch.distributed.run"}
_MARK = "COORDEXP_TEST_START"
CHECKPOINT = ROOT / "checkpoints" / "demo-stage1"


@dataclass(frozen=True, slots=True)
class Started:
    """A command that was started. ``mark``: in the environment of all its processes."""

    process: subprocess.Popen[bytes]
    log: Path
    scratch: Path
    mark: str

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, reached: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until ``reached()``. AssertionError if it takes ``limit_s``, or if the command ends before."""
        deadline = time.monotonic() + limit_s
        while not reached():
            ended = self.process.poll() is not None
            if (ended and not reached()) or time.monotonic() > deadline:
                how = f"it ended with {self.process.returncode}" if ended else f"not after {limit_s:g} s"
                raise AssertionError(f"{what}: {how}:\n{self.output[-6000:]}")
            time.sleep(0.02)

    def end(self, limit_s: float, what: str) -> int:
        """The exit code. AssertionError if the command takes longer."""
        self.until(lambda: self.process.poll() is not None, limit_s, what)
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """All living processes of this start, whatever their parents and sessions are."""
        return [one for one in psutil.process_iter() if _has_mark(one, self.mark)]

    def nothing_is_left(self, limit_s: float = 15.0) -> None:
        """Assert that every process ends within ``limit_s``, and that no socket and no shared memory is left."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"processes are left: {[(one.pid, one.cmdline()[:6]) for one in left]}"
        sockets = [path for path in self.scratch.rglob("*") if path.is_socket()]
        assert not sockets, f"sockets are left: {sockets}"
        shared = [path.name for path in Path("/dev/shm").glob(f"*{self.process.pid}*")]
        assert not shared, f"shared memory is left: {shared}"

    def kill(self) -> None:
        """SIGKILL to all of its processes at once, as if the machine went down."""
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(30)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def started(command: Sequence[str], cwd: Path, **environment: str) -> Started:
    """Start ``command``, whose first word is a program of this environment, in a session of its own."""
    mark = uuid.uuid4().hex
    scratch = cwd / f"tmp-{mark[:6]}"
    scratch.mkdir(parents=True)
    log = scratch / "output.log"
    program = Path(sys.executable).with_name(command[0])
    if program.is_file():
        words = [str(program), *command[1:]]
    elif command[0] in MODULES:  # a source tree on PYTHONPATH, without an installation
        words = [sys.executable, "-m", MODULES[command[0]], *command[1:]]
    else:
        words = list(command)
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    given = {
        **os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch), _MARK: mark,
        **environment,
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=cwd, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return Started(process, log, scratch, mark)


def finished(command: Sequence[str], cwd: Path, limit_s: float = START_S, **environment: str) -> str:
    """The output of a command that ends with exit code 0 and leaves nothing behind."""
    one = started(command, cwd, **environment)
    try:
        assert one.end(limit_s, shlex.join(command)) == 0, f"{shlex.join(command)}:\n{one.output[-6000:]}"
        one.nothing_is_left()
    finally:
        one.kill()
    return one.output


def scenes(folder: Path) -> Path:
    """The JSONL of :data:`DATA`."""
    if not (folder / "scenes.jsonl").is_file():
        write_scenes(folder, SCENES, SPARSE, 5)
    return folder / "scenes.jsonl"


class RowRun:
    """The starts of one row, in a folder."""

    def __init__(self, row: Row, folder: Path, on_gpu: bool = False, **more: Any) -> None:
        """``more``: replacements on top, with ``__`` for the dot."""
        self.row = row
        self.folder = folder
        self.run = folder / "run"
        ports = free_ports(2)
        places: dict[str, Any] = {
            MODEL: str(CHECKPOINT), DATA: str(scenes(folder / "data")), RUN: str(self.run),
            PORT: str(ports[0]), GROUP_PORT: ports[1],
        }  # fmt: skip
        keys = {**row.replaced(on_gpu), **{key.replace("__", "."): value for key, value in more.items()}}
        self.replaced = {key: _placed(value, places) for key, value in keys.items()}
        self.command = [*row.words(on_gpu), *(f"{key}={json.dumps(value)}" for key, value in self.replaced.items())]
        for name in ("configs", "checkpoints"):  # files name them relative to the repository's root
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)

    def resolved(self) -> RunConfig:
        """The configuration with its replacements."""
        return load_config(self.row.path, arguments=self.command[-len(self.replaced) :])

    def start(self) -> Started:
        return started(self.command, self.folder)

    def steps_saved(self) -> int:
        """Steps in the newest whole checkpoint."""
        whole = [path for path in checkpoints_in(self.run) if (path / SEAL).is_file()]
        return int(whole[0].name.rpartition("-")[2]) if whole else 0

    def to_the_end(self) -> str:
        """Start and wait for the end; the output. Asserts exit code 0 within a limit after the last step, and that
        nothing is left behind."""
        one = self.start()
        try:
            one.until(lambda: _last_step(one.output), START_S, f"{self.row.name}: its last step")
            code = one.end(AFTER_LAST_STEP_S, f"{self.row.name}: the end after its last step")
            assert code == 0, one.output[-6000:]
            one.nothing_is_left()
        finally:
            one.kill()
        check_not_running(self.run)
        return one.output

    def interrupt(self, by: Interruption) -> None:
        """Start, and interrupt after a step. Asserts that a signal ends the run within 10 s with a checkpoint."""
        one = self.start()
        try:
            what = f"{self.row.name}: a checkpoint of step {by.after_step}"
            one.until(lambda: self.steps_saved() >= by.after_step, START_S, what)
            if by.number == signal.SIGKILL:
                one.kill()
                assert one.process.returncode == -signal.SIGKILL, "the run ended before it was killed"
            else:
                os.kill(one.process.pid, by.number)
                code = one.end(AFTER_SIGNAL_S, f"{self.row.name}: the end after {by.number.name}")
                assert code == 128 + by.number, one.output[-6000:]
                assert f"stopped by {by.number.name} after step" in one.output and "Traceback" not in one.output
            one.nothing_is_left()
        finally:
            one.kill()
        assert self.steps_saved() >= by.after_step
        assert not any(self.run.glob("*.safetensors")), "an unfinished run must not look finished"


def _placed(value: Any, places: Mapping[str, Any]) -> Any:
    """``value`` with places and ports for their names; a name alone keeps its place's type."""
    if isinstance(value, list):
        return [_placed(one, places) for one in value]
    if isinstance(value, dict):
        return {key: _placed(one, places) for key, one in value.items()}
    if isinstance(value, str):
        if value in places:
            return places[value]
        for name, place in places.items():
            value = value.replace(name, str(place))
    return value


def _last_step(output: str) -> bool:
    steps = [line for line in output.splitlines() if ": step " in line]
    if not steps:
        return False
    done, _, total = steps[-1].rpartition(": step ")[2].split(",")[0].partition("/")
    return done == total
