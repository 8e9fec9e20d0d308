"""Runs a launch plan: starts servers and trainer, watches them, and leaves no process behind.

``coordexp launch`` (:func:`run_plan`) starts a supervisor process and holds the other end of its standard input. The
plan arrives there in one line; when the pipe closes, the launcher is gone, even by SIGKILL, and the supervisor ends
everything. If the supervisor is killed instead, the launcher adopts its processes and ends them.

Launched programs start others, some in new sessions, some renamed, some orphaned when their parent is killed. Launcher
and supervisor are *subreapers*: orphans below them become their children, so nothing leaves the tree that psutil reads.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.distributed import RENDEZVOUS
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.wire.arguments import check_guard
from coordexp.engine.wire.engine_process import api_key_from_environment, die_with_parent
from coordexp.errors import CoordExpError, LaunchFailed, RolloutError
from coordexp.launch.plan import PLAN_JSON, SERVER_ONLY, LaunchPlan, ProcessPlan, ServerPlan
from coordexp.temporary import temporary_folder

_POLL_S = 0.2
PROBE_S = 5.0
SERVER_GRACE_S = 15.0
AT_ONCE_S = 2.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED = (*ENDING, signal.SIGUSR1)
LOG_TAIL_LINES = 25
LAST_BYTES = 4096
FAILED = 1
_CLEAR_LINE = "\r\x1b[2K"
REAP_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36  # a request to the kernel for which psutil has no function


def _forwarded() -> list[signal.Signals]:
    """:data:`FORWARDED` without SIGHUP under ``nohup``, which starts programs that ignore it."""
    ignores = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in FORWARDED if not (ignores and number == signal.SIGHUP)]


def run_plan(plan: LaunchPlan) -> int:
    """Run ``plan`` to its end under a supervisor process. Returns the trainer's exit code. Raises OSError if there can
    be no folder of logs."""
    plan.trainer.log.parent.mkdir(parents=True, exist_ok=True)  # the servers' too
    adopt_orphans()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )
    assert supervisor.stdin is not None
    handlers = {
        number: signal.signal(number, lambda received, _: supervisor.send_signal(received)) for number in _forwarded()
    }
    try:
        supervisor.stdin.write(PLAN_JSON.dump_json(plan) + b"\n")
        supervisor.stdin.flush()
        return exit_code(supervisor.wait())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
        supervisor.stdin.close()
        end_descendants(grace_s=0.0)


class LaunchView:
    """Writes to ``out`` for as long as that is possible; the logs have it all. On a terminal a line about what is being
    waited for is replaced by the next one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._started = time.monotonic()
        self._replaces_line = False

    def say(self, text: str) -> None:
        self.pass_on(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")

    def waiting(self, name: str, doing: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self.pass_on(f"[{time.monotonic() - self._started:6.1f} s] {name}: starting · {doing.strip()}"[:width])
            self._replaces_line = True

    def pass_on(self, text: str) -> None:
        if text:
            try:
                self._out.write((_CLEAR_LINE if self._replaces_line else "") + text)
                self._out.flush()
            except OSError:  # a pipe or terminal that is gone, a full disk: no reason to end a training
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._out.fileno())
            self._replaces_line = False


class _LauncherGone(Exception):
    """The pipe from ``coordexp launch`` closed."""


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(slots=True)
class Supervisor:
    """One launch. ``stdin`` is the launcher's pipe."""

    plan: LaunchPlan
    view: LaunchView
    stdin: int
    # Private to this user: anyone who can write to it can pose as a process of the run.
    _private: Path = Path()
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _trainer_log: TextIO = field(init=False)
    _signal: int | None = None
    _at_once: bool = False  # a second Ctrl-C or SIGTERM: wait no longer

    def run(self) -> int:
        """Start, watch, end. Returns the trainer's exit code, or another one if there is none."""
        adopt_orphans()
        for number in _forwarded():
            signal.signal(number, self._note_signal)
        with temporary_folder("coordexp-launch-") as self._private:
            return self._run_and_end()

    def _run_and_end(self) -> int:
        try:
            return self._run()
        except _Signalled as received:
            outlook = "no trainer has started; everything ends"
            if "trainer" in self._running:
                outlook = (
                    f"the trainer has {self.plan.trainer_grace_s:g} s to finish its step, save and end; then "
                    "everything ends. A second signal ends it at once"
                )
            self.view.say(f"{signal.Signals(received.number).name}: {outlook}")
            return self._end_trainer(received.number)
        except _LauncherGone:
            self._end_trainer(signal.SIGTERM)
            return FAILED
        except (CoordExpError, OSError) as error:
            self.view.say(f"error: {error}")
            return FAILED
        finally:
            end_descendants(AT_ONCE_S if self._at_once else SERVER_GRACE_S)

    def _run(self) -> int:
        for server in self.plan.servers:
            if server.process is not None:
                self._start(server.process)
        deadline = time.monotonic() + self.plan.wait_s
        for server in self.plan.servers:
            self._await_server(server, deadline)
        trainer = self._start(self.plan.trainer)
        self._trainer_log = self.plan.trainer.log.open(encoding="utf-8", errors="replace")

        def watch() -> None:
            self._pause()
            self._check_servers()

        try:
            self._follow_trainer(math.inf, watch)
            if trainer.returncode is None:  # two signals came while its log was shown
                self._pause()
        except LaunchFailed:
            # A trainer that loses a server saves what it has learned and then ends by itself.
            self.view.say(f"a server ended: the trainer has {self.plan.trainer_grace_s:g} s to save and end")
            self._follow_trainer(self.plan.trainer_grace_s, self._pause)
            raise
        code = exit_code(trainer.wait(0))  # it has ended
        self.view.say(f"trainer ended with exit code {code}")
        return code

    def _start(self, process: ProcessPlan) -> subprocess.Popen[bytes]:
        if process.log.exists():  # of an earlier start, which a restart continues
            names = (process.log.with_name(f"{process.log.stem}.{number}.log") for number in itertools.count(1))
            process.log.rename(next(path for path in names if not path.exists()))
        left_out = {*SERVER_ONLY} - {self.plan.api_key_env}  # which may name the variable of swift's own token
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= process.environment
        environment |= {name: os.environ[source] for name, source in process.secrets.items()}
        if process is self.plan.trainer:
            environment[RENDEZVOUS] = str(self._private / "store")
            # Torchrun's --rdzv-endpoint, a file, and --log-dir, where it makes a folder. It removes neither.
            environment["PET_RDZV_ENDPOINT"] = str(self._private / "torchrun")
            environment["PET_LOG_DIR"] = str(self._private)
        environment["PYTHONUNBUFFERED"] = "1"
        with process.log.open("wb") as log:
            self._running[process.name] = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is forwarded in order, not sent to all at once
                preexec_fn=die_with_parent,  # safe: no other thread runs here that could hold a lock across the fork
            )
        self.view.say(f"{process.name}: started on {process.device_names()}, log {process.log}")
        return self._running[process.name]

    def _await_server(self, server: ServerPlan, deadline: float) -> None:
        name = server.base_url if server.process is None else server.process.name
        client = ServerClient(
            server.base_url,
            server.group_port,
            timeout_s=PROBE_S,
            infer_timeout_s=PROBE_S,  # not used
            api_key=api_key_from_environment(self.plan.api_key_env),
        )
        try:
            while True:
                self._check_servers()
                try:
                    client.health(timeout_s=PROBE_S)
                    break
                except RolloutError as error:
                    if time.monotonic() > deadline:
                        raise LaunchFailed(
                            f"{name}: not up after {self.plan.wait_s:g} s (launch.wait_s): {error}" + _log_tail(server)
                        ) from error
                    self.view.waiting(name, str(error) if server.process is None else _last_line(server.process.log))
                self._pause()
            wanted = self.plan.repeat_terminate
            guard = None if wanted is None else RepeatTerminateConfig.model_validate(wanted)
            check_guard(client.status(timeout_s=60.0).get("workers"), guard, name)
            guarded = ", repeat guard active" if wanted is not None else ""
            self.view.say(f"{name}: answers at {server.base_url}{guarded}")
        finally:
            client.close()

    def _check_servers(self) -> None:
        for server in self.plan.servers:
            process = server.process
            if process is not None and (code := self._running[process.name].poll()) is not None:
                raise LaunchFailed(f"{process.name} ended with exit code {exit_code(code)}{_log_tail(server)}")

    def _end_trainer(self, number: int) -> int:
        """Send the trainer a signal and let it end by itself. Returns the signal's exit code."""
        trainer = self._running.get("trainer")
        if trainer is None:
            return 128 + number
        trainer.send_signal(number)
        self._follow_trainer(self.plan.trainer_grace_s, lambda: time.sleep(_POLL_S))
        return 128 + number  # torchrun, which passes a signal on, ends with 1 whatever its processes ended with

    def _follow_trainer(self, seconds: float, pause: Callable[[], None]) -> None:
        """Show the trainer's log until it has ended, for at most ``seconds``."""
        trainer, deadline = self._running["trainer"], time.monotonic() + seconds
        while trainer.poll() is None and time.monotonic() < deadline and not self._at_once:
            pause()
            self.view.pass_on(self._trainer_log.read())
        self.view.pass_on(self._trainer_log.read())

    def _pause(self) -> None:
        readable, _, _ = select.select([self.stdin], [], [], _POLL_S)
        if readable and not os.read(self.stdin, 1):
            raise _LauncherGone
        if self._signal is not None:
            raise _Signalled(self._signal)

    def _note_signal(self, number: int, _: object) -> None:
        if self._signal not in ENDING:
            self._signal = number
        elif number in ENDING:
            self._at_once = True


def _log_tail(server: ServerPlan) -> str:
    if server.process is None:
        return ""
    lines = server.process.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f". The end of {server.process.log}:\n" + "\n".join(f"  {line}" for line in lines)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


# -- process trees (on Linux; elsewhere a launcher that is killed leaves its processes behind)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")


def descendants(pid: int, *, recursive: bool = True) -> list[int]:
    """Every living process below ``pid``, each after its parent; or its children only."""
    living = []
    with suppress(psutil.NoSuchProcess):  # it has just ended, and its children have another parent
        for process in psutil.Process(pid).children(recursive):
            with suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    living.append(process.pid)
    return living


def end_descendants(grace_s: float) -> None:
    """End everything below this process: SIGTERM once to each child, and to each orphan as it is adopted; SIGKILL to
    the rest after ``grace_s``."""
    own = os.getpid()
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while left := descendants(own):  # repeatedly: a process may have started another meanwhile
        if time.monotonic() < deadline:
            children = set(descendants(own, recursive=False))
            _signal(children - asked, signal.SIGTERM)
            asked |= children
        else:
            _signal(left, signal.SIGKILL)
        _reap()
        time.sleep(REAP_POLL_S)
    _reap()


def exit_code(returncode: int) -> int:
    """``subprocess``'s return code as shells report it: 128 + number for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def _reap() -> None:
    """Collect adopted orphans, which would stay as zombies. Takes the exit codes of ``subprocess``'s children too, so
    call it only when those are done with."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    """Read the plan, one line on standard input, and run it."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # unbuffered: Supervisor selects on it too
        line = pipe.readline()
    if not line.endswith(b"\n"):
        sys.exit(FAILED)
    if isinstance(sys.stdout, io.TextIOWrapper):  # of a terminal that cannot show every character of the logs
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(Supervisor(PLAN_JSON.validate_json(line), LaunchView(sys.stdout), 0).run())


if __name__ == "__main__":
    main()
