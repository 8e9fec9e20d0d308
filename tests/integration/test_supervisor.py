"""However a launch ends, it leaves no process. Servers and trainer are fakes: small programs that
answer ``/health/`` and start children in sessions of their own, as torchrun and vLLM do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pytest

from coordexp.launch import supervisor
from coordexp.launch.plan import PLAN_JSON, LaunchPlan, ProcessPlan, ServerPlan
from coordexp.launch.supervisor import LaunchView, Supervisor
from support.busy import busyness
from support.ports import free_ports
from support.rollout_servers import all_gone, descendants, is_alive

# Answers /health/ with 200 and everything else with 404, and has a child in a session of its own.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# A trainer that ignores signals, with a child in its own session.
LONG_TRAINER = """
import signal, subprocess, sys, time
child = "import time; print('child up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(600)
"""
# A trainer that notices a moment later that its server is gone, and saves first.
SAVING_TRAINER = """
import socket, sys, time
print("training", flush=True)
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60).close()
    except OSError:
        break
    time.sleep(0.1)
time.sleep(2)
print("saved", flush=True)
sys.exit(1)
"""
LAUNCHER = """
import sys
from coordexp.launch.supervisor import run_plan
from coordexp.launch.plan import PLAN_JSON
sys.exit(run_plan(PLAN_JSON.validate_json(sys.stdin.readline())))
"""
DEADLINE_S = 60.0 * busyness()  # everything here ends within a second of processor time


def plan(
    folder: Path,
    trainer: str,
    server: str = SERVER,
    wait_s: float = DEADLINE_S,
    guard: dict[str, int] | None = None,
    grace_s: float = 30.0,
) -> LaunchPlan:
    port, group = free_ports(2)

    def process(name: str, code: str) -> ProcessPlan:
        return ProcessPlan(name, (sys.executable, "-c", code, str(port)), {}, (), folder / f"{name}.log")

    return LaunchPlan(
        (ServerPlan(f"http://127.0.0.1:{port}", group, (port, group), process("server0", server)),),
        process("trainer", trainer),
        wait_s,
        guard,
        None,
        grace_s,
    )


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, text: str, log: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        path = self.folder / log
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {text!r} in {log}"
            time.sleep(0.05)

    def pid_of(self, word: str) -> int:
        for pid in descendants(self.process.pid):
            if word.encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                return pid
        raise AssertionError(f"no process with {word!r}")


@contextmanager
def launched(folder: Path, plan: LaunchPlan, stdout: IO[bytes] | None = None) -> Iterator[Running]:
    log = (folder / "launch.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdin=subprocess.PIPE,
        stdout=stdout or log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(PLAN_JSON.dump_json(plan).decode() + "\n")
    process.stdin.flush()
    try:
        yield Running(process, folder)
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("code", [0, 3])
def test_the_trainers_exit_code_is_returned(tmp_path: Path, code: int) -> None:
    trainer = f"import sys; print('trained', flush=True); sys.exit({code})"
    with launched(tmp_path, plan(tmp_path, trainer)) as running:
        assert running.process.wait(DEADLINE_S) == code
    shown = (tmp_path / "launch.log").read_text()
    assert "trained" in shown and f"exit code {code}" in shown
    assert (tmp_path / "trainer.log").read_text() == "trained\n"


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    lacking = plan(tmp_path, "")
    lacking = replace(lacking, trainer=replace(lacking.trainer, command=(str(tmp_path / "nothing"),)))
    with launched(tmp_path, lacking) as running:
        assert running.process.wait(DEADLINE_S) == 1
    shown = (tmp_path / "launch.log").read_text()
    assert "error: " in shown and f"{tmp_path}/nothing" in shown and "Traceback" not in shown


def test_a_launch_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """As in ``coordexp launch … | head``."""
    trainer = "import time\nfor _ in range(20): print('trained', flush=True); time.sleep(0.1)"
    reader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with launched(tmp_path, plan(tmp_path, trainer), stdout=reader.stdin) as running:
        assert reader.stdin is not None
        reader.stdin.close()
        assert running.process.wait(DEADLINE_S) == 0
    assert reader.wait() == 0 and (tmp_path / "trainer.log").read_text().count("trained") == 20
    assert (tmp_path / "launch.log").read_text() == ""


def test_a_launch_outlives_characters_that_its_terminal_cannot_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    trainer = r"import os, time; os.write(1, 'step 1 \u2501 \u2026\n'.encode()); time.sleep(1)"
    with launched(tmp_path, plan(tmp_path, trainer)) as running:
        assert running.process.wait(DEADLINE_S) == 0
    assert r"step 1 \u2501 \u2026" in (tmp_path / "launch.log").read_text()


def test_a_launch_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun removes neither its rendezvous nor its folder of logs."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    trainer = (
        "import os, tempfile\nopen(os.environ['PET_RDZV_ENDPOINT'], 'x')\n"
        "tempfile.mkdtemp(dir=os.environ['PET_LOG_DIR'])"
    )
    with launched(tmp_path, plan(tmp_path, trainer)) as running:
        assert running.process.wait(DEADLINE_S) == 0
    assert not [*temporary.iterdir()]


def test_a_signal_before_the_trainer_starts_promises_it_no_time(tmp_path: Path) -> None:
    with launched(
        tmp_path, plan(tmp_path, "", server="import time; print('up', flush=True); time.sleep(600)")
    ) as running:
        running.wait_for("up", "server0.log")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert "SIGTERM: no trainer has started; everything ends" in (tmp_path / "launch.log").read_text()


def test_a_restart_keeps_the_logs_of_earlier_starts(tmp_path: Path) -> None:
    for number in range(3):
        with launched(tmp_path, plan(tmp_path, f"print('start', {number})")) as running:
            assert running.process.wait(DEADLINE_S) == 0
    logs = [(tmp_path / name).read_text() for name in ("trainer.1.log", "trainer.2.log", "trainer.log")]
    assert logs == ["start 0\n", "start 1\n", "start 2\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_everything_ends(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path, plan(tmp_path, LONG_TRAINER)) as running:
        running.wait_for("child up", "trainer.log")
        everything = descendants(running.process.pid)
        assert len(everything) >= 5  # supervisor, server, its child, trainer, its child
        running.process.send_signal(number)
        assert running.process.wait(DEADLINE_S) == 128 + number
        assert all_gone(everything, DEADLINE_S)


def test_a_second_signal_ends_a_launch_at_once_whatever_came_in_between(tmp_path: Path) -> None:
    deaf = (
        "import signal, time\nfor n in (10, 15): signal.signal(n, signal.SIG_IGN)\nprint('up', flush=True)\n"
        "time.sleep(600)"
    )
    with launched(tmp_path, plan(tmp_path, deaf, grace_s=300.0)) as running:
        running.wait_for("up", "trainer.log")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("SIGTERM: the trainer has 300 s", "launch.log")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            running.process.send_signal(number)
            time.sleep(1.0)
        assert running.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_two_signals_while_output_is_written_end_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user whose terminal has stopped the output."""

    class Stopped(LaunchView):
        def pass_on(self, text: str) -> None:
            if text == "up\n":
                for _ in range(2):
                    launch._note_signal(signal.SIGINT, None)

    trainer = "import time; print('up', flush=True); time.sleep(600)"
    monkeypatch.setattr(supervisor, "end_descendants", lambda _grace_s: None)  # this process has others
    pipe = os.pipe()
    launch = Supervisor(replace(plan(tmp_path, trainer), servers=()), Stopped(sys.stdout), pipe[0])
    try:
        assert launch._run_and_end() == 130
    finally:
        launch._running["trainer"].kill()
        launch._running["trainer"].wait()
        for end in pipe:
            os.close(end)


def test_a_launch_that_a_signal_ends_says_so_whatever_torchrun_ends_with(tmp_path: Path) -> None:
    trainer = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); print('up', flush=True); "
        "time.sleep(60)"
    )
    with launched(tmp_path, plan(tmp_path, trainer)) as running:
        running.wait_for("up", "trainer.log")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(DEADLINE_S) == 143


def test_under_nohup_a_launch_outlives_its_terminal(tmp_path: Path) -> None:
    trainer = "import time; print('up', flush=True); time.sleep(3); print('trained', flush=True)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children inherit it
    try:
        with launched(tmp_path, plan(tmp_path, trainer)) as running:
            running.wait_for("up", "trainer.log")
            running.process.send_signal(signal.SIGHUP)
            assert running.process.wait(DEADLINE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "trained" in (tmp_path / "trainer.log").read_text()


@pytest.mark.parametrize("victim", ["launcher", "supervisor", "server", "trainer"])
def test_killing_any_process_ends_all_others(tmp_path: Path, victim: str) -> None:
    with launched(tmp_path, plan(tmp_path, LONG_TRAINER, grace_s=1.0)) as running:
        running.wait_for("child up", "trainer.log")
        everything = descendants(running.process.pid)
        word = {"supervisor": "coordexp.launch.supervisor", "server": "HTTPServer", "trainer": "import signal, sub"}
        pid = running.process.pid if victim == "launcher" else running.pid_of(word[victim])
        os.kill(pid, signal.SIGKILL)
        assert all_gone(everything, DEADLINE_S), f"left over after kill -9 of the {victim}"
        assert running.process.wait(DEADLINE_S) != 0


def test_a_trainer_that_loses_its_server_can_save_first(tmp_path: Path) -> None:
    with launched(tmp_path, plan(tmp_path, SAVING_TRAINER)) as running:
        running.wait_for("training", "trainer.log")
        everything = descendants(running.process.pid)
        os.kill(running.pid_of("HTTPServer"), signal.SIGKILL)
        assert running.process.wait(DEADLINE_S) == 1
        assert all_gone(everything, DEADLINE_S)
    assert "saved" in (tmp_path / "trainer.log").read_text()
    assert "server0 ended with exit code 137" in (tmp_path / "launch.log").read_text()


def test_settings_of_servers_in_the_shell_do_not_reach_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "COORDEXP_ENABLE_VLLM_REPEAT_TERMINATE_INJECTION",
        "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON",
        "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH",
        "COORDEXP_ENABLE_VLLM_CLOSED_NAMES",
        "COORDEXP_ROLLOUT_API_KEY",
    )
    for name in names:
        monkeypatch.setenv(name, "from the shell")
    monkeypatch.setenv("COORDEXP_OTHER", "from the shell")
    trainer = "import os; print(sorted(name for name in os.environ if os.environ[name] == 'from the shell'))"
    with launched(tmp_path, plan(tmp_path, trainer)) as running:
        assert running.process.wait(DEADLINE_S) == 0
    assert (tmp_path / "trainer.log").read_text() == "['COORDEXP_OTHER']\n"
    named = replace(plan(tmp_path, trainer), api_key_env="COORDEXP_ROLLOUT_API_KEY")  # the YAML may name this one
    with launched(tmp_path, named) as running:
        assert running.process.wait(DEADLINE_S) == 0
    assert (tmp_path / "trainer.log").read_text() == "['COORDEXP_OTHER', 'COORDEXP_ROLLOUT_API_KEY']\n"


def test_a_server_that_does_not_start_ends_the_launch_with_its_log(tmp_path: Path) -> None:
    failing = "print('no such model', flush=True); raise SystemExit(7)"
    with launched(tmp_path, plan(tmp_path, LONG_TRAINER, server=failing)) as running:
        assert running.process.wait(DEADLINE_S) == 1
    shown = (tmp_path / "launch.log").read_text()
    assert "server0 ended with exit code 7" in shown and "no such model" in shown
    assert not (tmp_path / "trainer.log").exists(), "the trainer must not have been started"


def test_a_server_that_never_answers_times_out(tmp_path: Path) -> None:
    with launched(tmp_path, plan(tmp_path, LONG_TRAINER, server="import time; time.sleep(600)", wait_s=2)) as running:
        everything = descendants(running.process.pid)
        assert running.process.wait(DEADLINE_S) == 1
        assert all_gone(everything, DEADLINE_S)
    assert "launch.wait_s" in (tmp_path / "launch.log").read_text()
    assert not (tmp_path / "trainer.log").exists()


def test_a_server_without_status_cannot_prove_its_guard(tmp_path: Path) -> None:
    guarded = plan(tmp_path, LONG_TRAINER, guard={"enabled": True})
    with launched(tmp_path, guarded) as running:
        assert running.process.wait(DEADLINE_S) == 1
    assert "external_plugins" in (tmp_path / "launch.log").read_text()
    assert not (tmp_path / "trainer.log").exists()
