"""Bad input ends with one clear error before weights are read; a bug ends with its traceback. Help and completion."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import coordexp
import coordexp.config.from_yaml
from coordexp.cli import main
from coordexp.cli.console import no_bars_in_log_files
from coordexp.data import convert
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.errors import ConfigError
from coordexp.evaluation.answers import write_answers
from support.cli_runs import Cli, small_checkpoint, write_run
from support.scored_answers import random_answers


@pytest.fixture(scope="module")
def checkpoints(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that are refused."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "other_family").mkdir()
    (folder / "other_family" / "config.json").write_text('{"model_type": "qwen2"}')
    (shutil.copytree(model, folder / "no_tokenizer") / "tokenizer.json").unlink()
    small_checkpoint(folder / "without_coords", coord_tokens=False)
    return folder


def break_third_line(run: Path) -> None:
    lines = (run.parent / "scenes.jsonl").read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2][:-9]
    (run.parent / "scenes.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


BAD_DATA: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing image": (lambda run: (run.parent / "images/000002.png").unlink(), ("scenes.jsonl:3", "image not found")),
    "broken JSON": (break_third_line, ("scenes.jsonl:3", "JSON")),
    "empty dataset": (lambda run: (run.parent / "scenes.jsonl").write_text(""), ("scenes.jsonl", "no records")),
}
BAD_CHECKPOINTS = {
    "without_coords": ("1000 coordinate tokens", "coordexp model expand-vocab"),
    "other_family": ("qwen2", "qwen3_vl"),
    "no_tokenizer": ("no tokenizer.json",),
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import coordexp.modeling.load
    import coordexp.training.run

    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights are read although the input is bad")

    for module in (coordexp.modeling.load, coordexp.training.run):
        monkeypatch.setattr(module, "load_model", load_model)


def expect_one_error(cli: Cli, run: Path, argv: list[object], texts: tuple[str, ...]) -> None:
    before = sorted(run.parent.iterdir())
    outcome = cli(*argv)
    assert outcome.code == 2
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err
    assert [text for text in texts if text not in outcome.err] == []
    assert sorted(run.parent.iterdir()) == before, "a run that cannot start leaves nothing behind"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("mistake", BAD_DATA)
def test_bad_data(tmp_path: Path, cli: Cli, model: Path, command: str, mistake: str) -> None:
    run = write_run(tmp_path, 1, model)
    spoil, texts = BAD_DATA[mistake]
    spoil(run)
    expect_one_error(cli, run, [command, run], texts)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("checkpoint", BAD_CHECKPOINTS)
def test_bad_checkpoint(tmp_path: Path, cli: Cli, checkpoints: Path, command: str, checkpoint: str) -> None:
    run = write_run(tmp_path, 1, checkpoints / checkpoint)
    expect_one_error(cli, run, [command, run], (str(checkpoints / checkpoint), *BAD_CHECKPOINTS[checkpoint]))


@pytest.mark.usefixtures("no_weights")
def test_evaluate_without_data_is_an_error(tmp_path: Path, cli: Cli, model: Path) -> None:
    run = write_run(tmp_path, 1, model, custom__val_jsonl=None)
    expect_one_error(cli, run, ["evaluate", run], ("custom.val_jsonl", "--data"))


def test_valid_input_reaches_the_weights(tmp_path: Path, cli: Cli, model: Path, no_weights: None) -> None:
    for command, stage in (("train", 1), ("train", 2), ("evaluate", 1)):
        with pytest.raises(AssertionError, match="weights are read"):
            cli(command, write_run(tmp_path, stage, model))


def test_debug_shows_the_traceback_of_its_own_command_only(tmp_path: Path, cli: Cli) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match="no such file"):
        main(["--debug", "config", "check", str(missing)])
    assert cli("config", "check", missing).code == 2


@pytest.mark.parametrize(
    ("number", "file", "says"),
    [
        (errno.ENOSPC, "out.jsonl", ("out.jsonl", "No space left", "free some space")),
        (errno.EADDRINUSE, None, ("Address already in use", "another port")),
        (errno.EIO, None, ("--debug",)),
    ],
)
def test_errors_of_the_operating_system_are_one_line(
    number: int, file: str | None, says: tuple[str, ...], cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr(coordexp.config.from_yaml, "explain_config", fails)
    outcome = cli("config", "check", "any.yaml")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert [part for part in says if part not in outcome.err] == []
    with pytest.raises(OSError, match=os.strerror(number)):
        main(["--debug", "config", "check", "any.yaml"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(coordexp.config.from_yaml, "explain_config", broken)
    with pytest.raises(ZeroDivisionError):
        main(["config", "check", "any.yaml"])


def test_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    fifo = tmp_path / "never_written.yaml"
    os.mkfifo(fifo)
    # Pipes are refused; opening this one without that check waits for a writer, as slow disks do.
    code = "import runpy, coordexp.reading as r; r.open_file = lambda path: path.open('rb'); "
    code += "runpy.run_module('coordexp', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "config", "check", fifo],
        stderr=subprocess.PIPE,
        text=True,
        # A suite started in a shell's background inherits an ignored SIGINT, and would hand it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # A writer can open the pipe without blocking only once the command waits in it for the YAML's text.
    deadline = time.monotonic() + 300  # a busy machine starts it late
    while True:
        try:
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    # A signal that lands just before the blocking read is noticed only by the next one, as a user would press again.
    while process.poll() is None and time.monotonic() < deadline + 30:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)  # a second signal during shutdown would kill the process
    _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 130
    assert err.strip() and "Traceback" not in err


class _Left:
    """Garbage in whose finalizer a signal is handled, as one that comes during a collection is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        sum(range(3))


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_signal_in_a_finalizer_is_not_lost_and_says_what_there_is(
    number: int, ended: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_voc(*_: object, **__: object) -> None:
        _Left(number)
        time.sleep(20)
        pytest.fail("the signal was lost")

    monkeypatch.setattr(convert, "convert_voc", convert_voc)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = cli("data", "convert", "voc", tmp_path, "--out", tmp_path / "out")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    said = f"{ended}: no JSONL was written; the same command starts again"
    assert (outcome.code, outcome.err.strip()) == (128 + number, said)


# --- usage, version and completion ---


@pytest.mark.parametrize("argv", ["unknown", "train", "train a.yaml --steps=3", "data scenes --out x", "--verbosity"])
def test_wrong_usage_exits_with_2(cli: Cli, argv: str) -> None:
    outcome = cli(*argv.split())
    assert outcome.code == 2
    assert "Usage" in outcome.err


def test_version(cli: Cli) -> None:
    assert cli("--version").out == cli("-V").out == f"coordexp {coordexp.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_commands(shell: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_COORDEXP_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "coordexp data con")
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "coordexp data con")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "convert" in cli().out


INTERRUPTED_IMPORT = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from coordexp.cli import main
main(["--version"])
"""


def test_ctrl_c_while_commands_are_imported_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigterm_unwinds_a_command(tmp_path: Path) -> None:
    """With an exit code of its own: a process that the signal kills leaves its temporary folders."""
    write_answers(random_answers(3, 1), tmp_path / "predictions.jsonl")
    argv = [sys.executable, "-m", "coordexp", "view", str(tmp_path), "--serve"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None and "until Ctrl-C" in serving.stdout.readline()
        serving.terminate()
        assert serving.wait(60) == 128 + signal.SIGTERM


def test_a_sigterm_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    during = []
    monkeypatch.setattr(
        "coordexp.cli.commands.whole_command", lambda: lambda **_: during.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        main(["--version"])
        assert during == [signal.SIG_IGN] == [signal.getsignal(signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGTERM, before)


LATIN_1 = "caf\udce9"  # how Python reads the bytes of "café" in Latin-1


def test_a_name_that_is_not_utf_8_is_an_error_that_shows_it(tmp_path: Path, model: Path, cli: Cli) -> None:
    """No JSON or YAML can hold it."""
    write_scenes(tmp_path / LATIN_1, 2, SPECS["sparse"], 5)
    data = tmp_path / LATIN_1 / "scenes.jsonl"
    for argv in (
        ("export", "coco", data, "--out", tmp_path / "coco"),
        ("init", data, "--model", model, "--out", tmp_path / "stage1.yaml"),
        ("predict", data, "--model", model, "--out", tmp_path / "predicted", "rollout_matching.max_new_tokens=8"),
    ):
        shown = cli(*argv)
        assert shown.code == 2 and "error: " in shown.err and "Traceback" not in shown.err
        assert "/caf\\udce9/" in shown.err and "a name that is not UTF-8" in shown.err
    assert not (tmp_path / "stage1.yaml").exists()


def test_a_rank_that_an_earlier_job_left_is_no_rank(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without WORLD_SIZE a process is alone: as rank 1 it would print nothing, and leave out its answers."""
    write_answers(random_answers(3, 1), tmp_path / "predictions.jsonl")
    monkeypatch.setenv("RANK", "1")
    assert "3 images with" in cli("evaluate", tmp_path).out
    monkeypatch.setenv("WORLD_SIZE", "")
    assert "3 images with" in cli("evaluate", tmp_path).out


OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CURE = "env -u RANK -u WORLD_SIZE coordexp"


@pytest.mark.parametrize(
    ("variables", "said", "cure"),
    [
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE is 'two', not a number", CURE),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2", CURE),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT", CURE),
        # accelerate cannot read them, and raised ValueError in the middle of joining the other processes
        *((OF_TWO | {"OMP_NUM_THREADS": threads}, f"OMP_NUM_THREADS is {threads!r}; ",
           "for several processes on a CPU write one number") for threads in ("", "4,2", "all")),
    ],
)  # fmt: skip
def test_variables_that_torchrun_would_not_set_are_refused(
    variables: dict[str, str], said: str, cure: str, tmp_path: Path, model: Path, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in (*OF_TWO, "COORDEXP_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = cli("train", write_run(tmp_path, 1, model))
    assert shown.code == 2 and said in shown.err and cure in shown.err


def test_a_run_goes_on_when_nobody_reads_its_output(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: `coordexp train … | head` trained until the next line, and saved nothing more."""
    reader, output = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(output, "w", buffering=1) as unread:  # as it is closed
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit):
            main(["train", str(write_run(tmp_path, 1, model))])
    assert "Broken pipe" in caplog.text and "the run continues" in caplog.text
    assert (tmp_path / "out1" / "model.safetensors").is_file()


def test_a_command_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # Python's value for a stream that was closed
    no_bars_in_log_files()


def test_descriptors_that_the_caller_closed_are_given_to_no_file(tmp_path: Path) -> None:
    """``coordexp … >&-``: what libraries print to descriptor 1 or 2 went into the file or pipe that was opened next."""
    code = (
        "from coordexp.cli import main\n"
        "try:\n    main(['--version'])\n"
        "except SystemExit as end:\n    print(end.code, file=(out := open('out', 'w')), end=' ')\n"
        "print(out.fileno() > 2, file=out, end=' ', flush=True)\n"
        "import subprocess; print(subprocess.run('echo from a child; echo and; cat').returncode, file=out)\n"
    ).replace("subprocess.run(", "subprocess.run(shell=True, args=")
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "out").read_text() == "0 True 0\n"
