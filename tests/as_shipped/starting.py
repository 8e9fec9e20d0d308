"""Starts commands as a user's shell does, in new processes, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from as_shipped.table import (
    DATA,
    GROUP_PORT,
    MODEL,
    PORT,
    ROOT,
    RUN,
    SCENES,
    Row,
    interrupted_step,
    interruption,
)
from coordexp.checkpoints.run_folder import LOCK, SEAL, STATE, check_not_running, checkpoints_in
from coordexp.config import RunConfig, load_config
from coordexp.data.scenes import SPARSE, write_scenes
from support.busy import busyness
from support.forked import Handle, coordexp_in, forked
from support.ports import free_ports

START_S = 900.0  # imports, model, engine and all steps
# On a quiet machine; a busy one takes longer in proportion.
AFTER_LAST_STEP_S = 30.0  # the last evaluation, saving, and ending; servers have 15 s
AFTER_SIGNAL_S = 10.0
PASSES_USR1 = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # torchrun's, by docs/reliability.md
SERVERS_END_S = 15.0  # those that a launch started, after its trainer
# The token of server_multi_node.yaml, in every process here.
TOKEN = {"COORDEXP_API_KEY": "as-shipped"}
MODULES = {"coordexp": "coordexp", "torchrun": "torch.distributed.run"}
SERVERS = "rollout_matching.vllm.server.servers"
_MARK = "COORDEXP_TEST_START"
_QUIET = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip
CHECKPOINT = ROOT / "checkpoints" / "demo-stage1"


@dataclass(frozen=True, slots=True)
class Started:
    """A command that was started, in a session of its own. ``mark``: in the environment of all its processes, unless it
    was :func:`repeated`."""

    words: Sequence[str]
    process: subprocess.Popen[bytes] | Handle
    log: Path
    scratch: Path
    mark: str

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, reached: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until ``reached()``. AssertionError if it takes ``limit_s``, which a busy machine prolongs, or if the
        command ends before."""
        deadline = time.monotonic() + limit_s * busyness()
        while not reached():
            ended = self.process.poll() is not None
            if (ended and not reached()) or time.monotonic() > deadline:
                how = f"it ended with {self.process.returncode}" if ended else f"not after {limit_s:g} s"
                raise AssertionError(f"{what}: {how}:\n{self.output[-6000:]}")
            time.sleep(0.02)

    def trainers(self) -> list[psutil.Process]:
        """The command's own process, or the ranks under torchrun."""
        if not any(Path(word).name in ("torchrun", MODULES["torchrun"]) for word in self.words):
            return [psutil.Process(self.process.pid)]
        return [one for one in psutil.Process(self.process.pid).children() if "coordexp" in one.cmdline()]

    def end(self, limit_s: float, what: str) -> int:
        """The exit code. AssertionError if the command takes longer."""
        self.until(lambda: self.process.poll() is not None, limit_s, what)
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """All living processes of this start, whatever their parents and sessions are."""
        return [one for one in psutil.process_iter() if _is_of(one, self.mark, self.process.pid)]

    def nothing_is_left(self, limit_s: float = 60.0, sockets: bool = True) -> None:
        """Assert that every process ends within ``limit_s``, more on a busy machine, and that no shared memory is left
        and, if ``sockets``, no socket. A process that SIGKILL ended removes none: they are files of its own."""
        deadline = time.monotonic() + limit_s * busyness()
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"processes are left: {[(one.pid, one.cmdline()[:6]) for one in left]}"
        if sockets:
            found = [path for path in self.scratch.rglob("*") if path.is_socket() or path.name.startswith("vllm_dist_")]
            assert not found, f"sockets or files of engines' starts are left: {found}"
        # Names have the number of the process, which is part of other processes' numbers too.
        shared = [
            path.name for path in Path("/dev/shm").iterdir() if str(self.process.pid) in re.findall(r"\d+", path.name)
        ]
        assert not shared, f"shared memory is left: {shared}"

    def kill(self) -> None:
        """SIGKILL to all of its processes at once, as if the machine went down."""
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(30 * busyness())
        shutil.rmtree(self.scratch, ignore_errors=True)


def _is_of(process: psutil.Process, mark: str, session: int) -> bool:
    try:
        marked = process.environ().get(_MARK) == mark or os.getsid(process.pid) == session
        return marked and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
        return False


def started(command: Sequence[str], cwd: Path, **environment: str) -> Started:
    """Start ``command``, whose first word is a program of this environment, in a session of its own."""
    mark, scratch, log = _places(cwd)
    program = Path(sys.executable).with_name(command[0])
    if program.is_file():
        words = [str(program), *command[1:]]
    elif command[0] in MODULES:  # a source tree on PYTHONPATH, without an installation
        words = [sys.executable, "-m", MODULES[command[0]], *command[1:]]
    else:
        words = list(command)
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    given = {**os.environ, **_QUIET, "PYTHONPATH": source, "TMPDIR": str(scratch), _MARK: mark, **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=cwd, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return Started(words, process, log, scratch, mark)


def repeated(command: Sequence[str], cwd: Path, **environment: str) -> Started:
    """Start again what :func:`started` has started before, a ``coordexp`` command without a colocated engine. A fork of
    a process that has made its imports takes the place of a new Python, which would take half of the CPU time."""
    mark, scratch, log = _places(cwd)
    given = {**_QUIET, "TMPDIR": str(scratch), **environment}
    process = forked(coordexp_in, str(cwd), list(command[1:]), log=log, environment=given)
    return Started(command, Handle(process), log, scratch, mark)


def _places(cwd: Path) -> tuple[str, Path, Path]:
    """Mark, scratch folder and log of a start."""
    mark = uuid.uuid4().hex
    cwd.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="as-shipped-"))  # a short name, because it holds sockets
    return mark, scratch, cwd / f"output-{mark[:6]}.log"


def finished(command: Sequence[str], cwd: Path, limit_s: float = START_S, **environment: str) -> str:
    """The output of a command that ends with exit code 0 and leaves nothing behind."""
    one = started(command, cwd, **environment)
    try:
        assert one.end(limit_s, shlex.join(command)) == 0, f"{shlex.join(command)}:\n{one.output[-6000:]}"
        one.nothing_is_left()
    finally:
        one.kill()
    return one.output


def scenes(folder: Path, count: int = SCENES) -> Path:
    """The JSONL of :data:`DATA`, or another number of its scenes."""
    if not (folder / "scenes.jsonl").is_file():
        write_scenes(folder, count, SPARSE, 5)
    return folder / "scenes.jsonl"


class RowRun:
    """The starts of one row, in a folder."""

    def __init__(self, row: Row, folder: Path, on_gpu: bool = False, forks: bool = True, **more: Any) -> None:
        """``forks``: whether later starts of its command are :func:`repeated`. ``more``: replacements on top."""
        self.row = row
        self.folder = folder
        self.forks = forks and not on_gpu and not (row.uses_vllm and row.server is None)  # a colocated engine
        self.run = folder / "run"
        self.data = scenes(folder / "data")
        ports = free_ports(2)
        places: dict[str, Any] = {
            MODEL: str(CHECKPOINT), DATA: str(self.data), RUN: str(self.run),
            PORT: str(ports[0]), GROUP_PORT: ports[1],
        }  # fmt: skip
        keys = {**row.replaced(on_gpu), **more}
        self.replaced = {key: _placed(value, places) for key, value in keys.items()}
        self.environment: Mapping[str, str] = {}
        self.command = self.command_by(" ".join(row.words(on_gpu)))
        for name in ("configs", "checkpoints"):  # files name them relative to the repository's root
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)

    def command_by(self, documented: str) -> list[str]:
        """The words of another command on this row's file, with its replacements."""
        keys = [f"{key}={json.dumps(value)}" for key, value in self.replaced.items()]
        return [*documented.format(name=self.row.name).split(), *keys]

    @property
    def servers(self) -> Any:
        return self.replaced[SERVERS]

    def resolved(self) -> RunConfig:
        """The configuration with its replacements."""
        return load_config(self.row.path, arguments=self.command[-len(self.replaced) :])

    def start(self, *options: str) -> Started:
        """``options``: of the command's first word."""
        return started([self.command[0], *options, *self.command[1:]], self.folder, **self.environment)

    def start_again(self) -> Started:
        """After :meth:`start` of the same command."""
        start = repeated if self.forks and self.command[:2] == ["coordexp", "train"] else started
        return start(self.command, self.folder, **self.environment)

    def steps_saved(self) -> int:
        """Steps in the newest whole checkpoint."""
        whole = [path for path in checkpoints_in(self.run) if (path / SEAL).is_file()]
        return int(whole[0].name.rpartition("-")[2]) if whole else 0

    def to_the_end(self, again: bool = False) -> str:
        """Start, or start ``again``, and wait for the end; the output. Asserts exit code 0 within a limit after the
        last step, and that nothing is left behind."""
        one = self.start_again() if again else self.start()
        try:
            ended = one.process.poll  # at once, if a signal came in the last step
            one.until(lambda: _last_step(one.output) or ended() is not None, START_S, f"{self.row.name}: its last step")
            code = one.end(AFTER_LAST_STEP_S, f"{self.row.name}: the end after its last step")
            assert code == 0, one.output[-6000:]
            one.nothing_is_left()
        finally:
            one.kill()
        check_not_running(self.run)
        return one.output

    def answers(self) -> None:
        """Assert that the final model loads and finds objects."""
        from coordexp import Detector

        images = sorted((self.data.parent / "images").iterdir())[:3]
        found = [objects for objects in Detector(str(self.run)).predict([str(path) for path in images])]
        assert any(found), f"{self.row.name}: the trained model finds nothing in {len(images)} scenes"

    def says_that_it_is_finished(self) -> None:
        """Assert that the same command does nothing, and says so: with ``resume_from_checkpoint: true`` that the run is
        finished, otherwise that the folder has a run's results."""
        before = {path: path.stat().st_mtime_ns for path in self.run.rglob("*")}
        again = self.start()
        code = again.end(START_S, f"{self.row.name}: again")
        resumes = self.resolved().training.resume_from_checkpoint
        assert code == (0 if resumes else 2), again.output
        assert ("this run is finished" if resumes else "of an earlier run; name another folder") in again.output
        again.nothing_is_left()
        after = {path: path.stat().st_mtime_ns for path in self.run.rglob("*")}
        assert {path for path in before if before[path] != after.get(path)} <= {self.run / LOCK}

    def interrupt(self, number: signal.Signals, after_step: int) -> None:
        """Start again, and send ``number`` when a checkpoint of ``after_step`` or a later step is whole. Asserts that a
        stop signal ends the run within 10 s with a checkpoint, and that nothing of it is left."""
        step = max(after_step, self.steps_saved() + 1)  # of this start, not of the one before
        launched = "launch" in self.command
        to_torchrun = number == signal.SIGUSR1 and self.row.ranks > 1
        one = self.start(PASSES_USR1) if to_torchrun else self.start_again()
        try:
            one.until(lambda: self.steps_saved() >= step, START_S, f"{self.row.name}: a checkpoint of step {step}")
            limit_s = AFTER_SIGNAL_S + (SERVERS_END_S if launched else 0.0)
            if number == signal.SIGKILL:
                one.trainers()[-1].kill()  # this process alone; others of the run notice
            elif number == signal.SIGINT:
                os.killpg(one.process.pid, number)  # as a terminal does, to the whole group
            else:
                one.process.send_signal(number)
            code = one.end(limit_s, f"{self.row.name}: the end after {number.name}")
            by_torchrun = self.row.ranks > 1 or launched
            if number == signal.SIGKILL and self.row.ranks == 1:
                assert code == -signal.SIGKILL, "the run ended before it was killed"
            else:  # torchrun's is 1, whatever its processes end with
                by_itself = launched and number != signal.SIGKILL
                assert code == (1 if by_torchrun and not by_itself else 128 + number), one.output[-6000:]
            if number != signal.SIGKILL:
                assert f"stopped by {number.name} after step" in one.output, one.output[-6000:]
                assert by_torchrun or "Traceback" not in one.output, one.output[-6000:]
            one.nothing_is_left(sockets=number != signal.SIGKILL)
        finally:
            one.kill()
        assert self.steps_saved() >= step
        assert not any(self.run.glob("*.safetensors")), "an unfinished run must not look finished"


def run_of(
    row: Row, folder: Path, servers: Any = None, more: Mapping[str, Any] | None = None, forks: bool = True
) -> RowRun:
    """A run of ``row``. ``servers``: running ones, in place of the row's. ``more``: replacements on top."""
    run = RowRun(row, folder, forks=forks, **({} if servers is None else {SERVERS: servers}), **(more or {}))
    if row.server is not None:
        run.environment = TOKEN
    return run


def check_row(row: Row, folder: Path, servers: Any = None) -> None:
    """Start a row to its end, use its model, and start it again. Then interrupt another run of it, if
    :func:`interruption` says so; after SIGKILL, continue it to the same weights."""
    whole = run_of(row, folder, servers=servers)
    whole.to_the_end()
    config = whole.resolved()
    state = json.loads((whole.run / STATE).read_text(encoding="utf-8"))
    assert state["global_step"] == config.training.max_steps
    assert (state["epoch"] % 1 == 0) == (row.ends == "at the end of an epoch"), state["epoch"]
    whole.answers()
    whole.says_that_it_is_finished()
    number = interruption(row)
    if number is not None:
        interrupt_and_continue(whole, [number], continues=number == signal.SIGKILL, servers=servers)


def interrupt_and_continue(
    whole: RowRun, numbers: Sequence[signal.Signals], continues: bool = True, servers: Any = None, forks: bool = True
) -> None:
    """Interrupt a second run of the row of ``whole`` by each of ``numbers``. ``continues``: then to its end, where its
    weights equal those of ``whole`` in every bit."""
    row, steps = whole.row, whole.resolved().training.max_steps
    names = "-".join(number.name for number in numbers)
    again = run_of(row, whole.folder / names, servers=servers, more=row.interrupted_with, forks=forks)
    for number in numbers:
        again.interrupt(number, interrupted_step(row, number, steps))
    if continues:
        assert "resuming from" in again.to_the_end(again=True)
        assert same_weights(again.run, whole.run), f"{row.name}: interrupted by {names} and continued, weights differ"


def is_healthy(served: RowRun) -> bool:
    """Whether the server of ``served`` answers."""
    from coordexp.errors import RolloutError
    from support.settings import client_to

    (entry,) = served.servers
    client = client_to(entry["base_url"], entry["group_port"], timeout_s=5.0, infer_timeout_s=5.0)
    try:
        client.health(timeout_s=5.0)
    except RolloutError:
        return False
    finally:
        client.close()
    return True


def same_weights(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other)]
    if names[0] != names[1] or not names[0]:
        return False
    for name in names[0]:
        mine, theirs = load_file(one / name), load_file(other / name)
        if mine.keys() != theirs.keys() or any(not mine[key].equal(theirs[key]) for key in mine):
            return False
    return True


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
