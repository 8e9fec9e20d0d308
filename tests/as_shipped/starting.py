"""Starts commands as a user's shell does, in new processes, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
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

from as_shipped.table import DATA, GROUP_PORT, MODEL, PORT, ROOT, RUN, SCENES, Interruption, Row
from coordexp.checkpoints.run_folder import SEAL, STATE, checkpoints_in
from coordexp.checkpoints.run_lock import LOCK, check_not_running
from coordexp.config import RunConfig, load_config
from coordexp.data.scenes import SPARSE, write_scenes
from support.ports import free_ports

START_S = 300.0  # imports, model, engine and all steps
# On a quiet machine; a busy one takes longer in proportion, see Started.slowness.
AFTER_LAST_STEP_S = 30.0  # the last evaluation, saving, and ending; servers have 15 s
AFTER_SIGNAL_S = 10.0
MODULES = {"coordexp": "coordexp", "torchrun": "torch.distributed.run"}
SERVERS = "rollout_matching.vllm.server.servers"
_MARK = "COORDEXP_TEST_START"
CHECKPOINT = ROOT / "checkpoints" / "demo-stage1"


@dataclass(frozen=True, slots=True)
class Started:
    """A command that was started. ``mark``: in the environment of all its processes."""

    process: subprocess.Popen[bytes]
    log: Path
    scratch: Path
    mark: str
    since: float

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

    def trainers(self) -> list[psutil.Process]:
        """The command's own process, or the ranks under torchrun."""
        words: Any = self.process.args
        if not any(Path(word).name in ("torchrun", MODULES["torchrun"]) for word in words):
            return [psutil.Process(self.process.pid)]
        return [one for one in psutil.Process(self.process.pid).children() if "coordexp" in one.cmdline()]

    def slowness(self) -> float:
        """How much longer than its processor time the command has run, at least 1: on a machine that is busy with other
        work, limits are multiplied by it."""
        used = 0.0
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                used += sum(one.cpu_times()[:4])  # with children that have ended
        return max(1.0, (time.monotonic() - self.since) / max(used, 1.0))

    def end(self, limit_s: float, what: str) -> int:
        """The exit code. AssertionError if the command takes longer."""
        self.until(lambda: self.process.poll() is not None, limit_s, what)
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """All living processes of this start, whatever their parents and sessions are."""
        return [one for one in psutil.process_iter() if _has_mark(one, self.mark)]

    def nothing_is_left(self, limit_s: float = 60.0) -> None:
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
        shutil.rmtree(self.scratch, ignore_errors=True)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def started(command: Sequence[str], cwd: Path, **environment: str) -> Started:
    """Start ``command``, whose first word is a program of this environment, in a session of its own."""
    mark = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="as-shipped-"))  # a short name, because it holds sockets
    cwd.mkdir(parents=True, exist_ok=True)
    log = cwd / f"output-{mark[:6]}.log"
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
    return Started(process, log, scratch, mark, time.monotonic())


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
        """``more``: replacements on top."""
        self.row = row
        self.folder = folder
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

    def start(self) -> Started:
        return started(self.command, self.folder, **self.environment)

    def steps_saved(self) -> int:
        """Steps in the newest whole checkpoint."""
        whole = [path for path in checkpoints_in(self.run) if (path / SEAL).is_file()]
        return int(whole[0].name.rpartition("-")[2]) if whole else 0

    def to_the_end(self) -> str:
        """Start and wait for the end; the output. Asserts exit code 0 within a limit after the last step, and that
        nothing is left behind."""
        one = self.start()
        try:
            ended = one.process.poll  # at once, if a signal came in the last step
            one.until(lambda: _last_step(one.output) or ended() is not None, START_S, f"{self.row.name}: its last step")
            code = one.end(AFTER_LAST_STEP_S * one.slowness(), f"{self.row.name}: the end after its last step")
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

    def interrupt(self, by: Interruption) -> None:
        """Start, and interrupt after a step. Asserts that a signal ends the run within 10 s with a checkpoint."""
        step = max(by.after_step, self.steps_saved() + 1)  # of this start, not of the one before
        one = self.start()
        try:
            what = f"{self.row.name}: a checkpoint of step {step}"
            one.until(lambda: self.steps_saved() >= step, START_S, what)
            limit_s = AFTER_SIGNAL_S * one.slowness()
            if by.number == signal.SIGKILL:
                one.trainers()[-1].kill()  # this process alone; others of the run notice
            elif by.number == signal.SIGINT:
                os.killpg(one.process.pid, by.number)  # as a terminal does, to the whole group
            else:
                one.process.send_signal(by.number)
            code = one.end(limit_s, f"{self.row.name}: the end after {by.number.name}")
            if self.row.ranks > 1:
                assert code == 1, "torchrun's, whatever its processes end with"
            elif by.number == signal.SIGKILL:
                assert code == -signal.SIGKILL, "the run ended before it was killed"
            else:
                assert code == 128 + by.number, one.output[-6000:]
            if by.number != signal.SIGKILL:
                assert f"stopped by {by.number.name} after step" in one.output, one.output[-6000:]
                assert self.row.ranks > 1 or "Traceback" not in one.output, one.output[-6000:]
            one.nothing_is_left()
        finally:
            one.kill()
        assert self.steps_saved() >= step
        assert not any(self.run.glob("*.safetensors")), "an unfinished run must not look finished"


def check_row(
    row: Row, folder: Path, on_gpu: bool = False, servers: Any = None, environment: Mapping[str, str] | None = None
) -> None:
    """Start a row to its end, use its model, start it again, and interrupt and continue the same run if the row says
    so. ``servers``: running ones, in place of the row's."""
    whole = RowRun(row, folder, on_gpu, **({} if servers is None else {SERVERS: servers}))
    whole.environment = environment or {}
    whole.to_the_end()
    config = whole.resolved()
    state = json.loads((whole.run / STATE).read_text(encoding="utf-8"))
    assert state["global_step"] == config.training.max_steps
    assert (state["epoch"] % 1 == 0) == (row.ends == "at the end of an epoch"), state["epoch"]
    whole.answers()
    whole.says_that_it_is_finished()
    if row.again:
        again = RowRun(row, folder / "again", on_gpu, **row.again_with)
        for one in row.again:
            again.interrupt(one)
        assert "resuming from" in again.to_the_end()
        assert same_weights(again.run, whole.run), f"{row.name}: interrupted and continued, the weights differ"


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
