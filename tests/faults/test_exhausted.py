"""Exhausted resources or a jumping clock: a run ends with a clear error and does not hang."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from coordexp.errors import CheckpointError, ServerTimeout
from coordexp.modeling.tiny import build_tiny_checkpoint
from coordexp.training import loop
from coordexp.training.checkpoint import check_contents, is_complete
from faults.test_lying_servers import CALLS, DEADLINE_S, client_of
from faults.test_stopped_runs import in_forward
from support.cli_runs import files_of_at_most, run_cli
from support.lying_server import lying
from support.tiny_run import SPEC, run_config, same_weights, tiny_checkpoint, train, weights

SAVING: dict[str, Any] = {"training__max_steps": 3, "training__save_strategy": "steps", "training__save_steps": 1}


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """The kernel gives this process ``most`` of ``what`` (``resource.RLIMIT_…``); its hard limit stays."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def descriptors_left(count: int) -> AbstractContextManager[None]:
    """Open files beyond ``count`` more are refused by the kernel."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    return limited(resource.RLIMIT_NOFILE, lowest_free + count)


def limited_from_step_2(limit: Callable[[], AbstractContextManager[None]]) -> Callable[[Any], None]:
    """``on_built`` of a trainer that first saves checkpoint-2 under ``limit``."""

    def prepare(trainer: Any) -> None:
        save = trainer.save_checkpoint

        def saved() -> None:
            if trainer.state.global_step == 2:
                with limit():
                    save()
            save()

        trainer.save_checkpoint = saved

    return prepare


@pytest.mark.parametrize("count", range(5))
def test_a_save_with_few_file_descriptors_is_complete_or_raises_a_clear_error(
    count: int, tmp_path: Path, seen: Callable[[object], None]
) -> None:
    """The required number depends on the number of reading threads."""
    run = tmp_path / "run"
    try:
        train(run_config(tmp_path, 1, **SAVING), on_built=limited_from_step_2(lambda: descriptors_left(count)))
    except (CheckpointError, OSError) as error:
        assert "checkpoint-2" in str(error) and "Too many open files" in str(error), error
        assert is_complete(run / "checkpoint-1") and not is_complete(run / "checkpoint-2")
        seen(error)
    else:
        assert count > 1
        for step in (1, 2, 3):
            check_contents(run / f"checkpoint-{step}")
        seen("enough file descriptors: every checkpoint is complete")


@pytest.mark.parametrize("size", [0, 1_000, 30_000, 100_000])
def test_a_save_to_a_full_disk_raises_and_keeps_the_last_checkpoint(
    size: int, tmp_path: Path, seen: Callable[[object], None]
) -> None:
    with pytest.raises(CheckpointError) as refused:
        train(run_config(tmp_path, 1, **SAVING), on_built=limited_from_step_2(lambda: files_of_at_most(size)))
    said = str(refused.value)
    # The disk has room here: the limit is of the process.
    assert "checkpoint-2 cannot be written: a quota, or a limit on the size of files (ulimit -f)" in said
    assert "MB free; a checkpoint takes about" in said and "checkpoint-1" in said
    assert is_complete(tmp_path / "run" / "checkpoint-1") and not is_complete(tmp_path / "run" / "checkpoint-2")
    seen(refused.value)


def test_an_error_is_not_lost_behind_the_full_disk_of_the_save_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_forward(monkeypatch, 3, lambda: 1 // 0)  # in step 3
    keys = SAVING | {"training__save_steps": 3}
    with pytest.raises(ZeroDivisionError):
        train(run_config(tmp_path, 1, **keys), on_built=limited_from_step_2(lambda: files_of_at_most(0)))
    assert "step 3 failed, and the 2 steps before it cannot be saved: " in caplog.text
    assert "checkpoint-2 cannot be written" in caplog.text and "Nothing of this run is saved" in caplog.text


@pytest.mark.parametrize("command", ["export", "expand-vocab"])
def test_a_checkpoint_for_which_the_disk_has_no_room_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_checkpoint()
    if command == "expand-vocab":
        source = build_tiny_checkpoint(tmp_path / "plain", spec=SPEC, coord_tokens=False)
    with files_of_at_most(30_000):
        code, _, said = run_cli(capsys, "model", command, source, tmp_path / "new")
    assert code == 2 and f"error: {tmp_path / 'new'}: File too large; raise the limit on a file's size" in said


@pytest.mark.parametrize("call", CALLS)
def test_a_call_without_file_descriptors_raises_a_clear_error(call: str, seen: Callable[[object], None]) -> None:
    with lying("hangs") as url:
        client = client_of(url)
        with descriptors_left(0), pytest.raises(Exception) as refused:
            CALLS[call](client)
    assert type(refused.value).__module__ == "coordexp.errors" and "Too many open files" in str(refused.value)
    seen(refused.value)


@pytest.mark.parametrize("what", ["processes", "threads"])
def test_a_full_process_table_ends_a_run(
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: Callable[[object], None],
) -> None:
    """As the kernel refuses it: processes that load data, and the thread that waits for signals."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            if what == "processes"
            else RuntimeError("can't start new thread")
        )

    run_config(tmp_path, 1, data__num_workers=2 if what == "processes" else 0)
    if what == "processes":
        monkeypatch.setattr(os, "fork", refuse)
    else:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        refused = run_cli(capsys, "train", tmp_path / "run.yaml")
        seen(refused.err.strip().splitlines()[-1])
        assert refused.code != 0
    except (OSError, RuntimeError) as error:  # a library's own words: no answer, no hang
        seen(error)
        assert "temporarily unavailable" in str(error) or "new thread" in str(error)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def jumping(hours: float) -> Callable[[], float]:
    """The wall clock, an hour off at every other look."""
    real, turn = time.time, itertools.count()
    return lambda: real() + (3600.0 * hours if next(turn) % 2 else 0.0)


@pytest.mark.parametrize("hours", [-1.0, 1.0, 1e5], ids=["back an hour", "on an hour", "on eleven years"])
@pytest.mark.parametrize("behaviour", ["drips", "hangs"])
def test_timeouts_hold_when_the_clock_jumps(behaviour: str, hours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", jumping(hours))
    with lying(behaviour) as url:
        started = time.monotonic()
        with pytest.raises(ServerTimeout):
            CALLS["infer"](client_of(url))
        assert DEADLINE_S - 0.2 < time.monotonic() - started < DEADLINE_S + 10


@pytest.mark.parametrize("hours", [-1.0, 1e5], ids=["back an hour", "on eleven years"])
def test_a_run_is_unchanged_when_the_clock_jumps(hours: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = train(run_config(tmp_path / "straight", 1, **SAVING))
    monkeypatch.setattr(time, "time", jumping(hours))
    jumped = train(run_config(tmp_path / "jumped", 1, **SAVING))
    assert same_weights(weights(jumped.model), weights(straight.model))
    assert all(is_complete(tmp_path / "jumped" / "run" / f"checkpoint-{step}") for step in (1, 2, 3))


def test_a_full_disk_at_the_end_keeps_the_last_checkpoint_and_the_next_start_writes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    """Half of the final model is on the disk when it is full."""
    run_config(tmp_path, 1, **SAVING, training__resume_from_checkpoint=True)
    final = loop.save_final_model

    def save_to_full_disk(*arguments: Any, **options: Any) -> None:
        with files_of_at_most(100_000):
            final(*arguments, **options)

    monkeypatch.setattr(loop, "save_final_model", save_to_full_disk)
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2 and "Traceback" not in refused.err
    assert re.search(
        r"error: \S+/run cannot be written: a quota, or a limit on the size of files \(ulimit -f\), is reached "
        r"\([\d,.]+ MB of [\d,.]+ MB free; the model takes about "
        r"[\d,.]+ MB\)\. Saved are the first 3 steps, in \S+checkpoint-3\.",
        refused.err,
    ), refused.err
    run = tmp_path / "run"
    assert is_complete(run / "checkpoint-3")
    assert not list(run.glob("*.safetensors")) and not (run / "trainer_state.json").exists(), "it looks finished"
    monkeypatch.undo()
    assert run_cli(capsys, "train", tmp_path / "run.yaml").code == 0
    assert (run / "model.safetensors").read_bytes() == (run / "checkpoint-3" / "model.safetensors").read_bytes()
    seen(refused.err.strip().splitlines()[-1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loggers_on_a_full_disk_warn_once_are_counted_and_recover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: Callable[[object], None]
) -> None:
    """TensorBoard, whose thread writes: no room in the second and third of five steps."""

    pytest.importorskip("tensorboard")
    with ExitStack() as full:

        class FullInStep2(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 1:
                    full.enter_context(files_of_at_most(0))

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 3:
                    full.close()

        keys = {"training__max_steps": 5, "training__logging_steps": 1, "training__report_to": "tensorboard"}
        trainer = train(run_config(tmp_path, 1, **keys), on_built=lambda built: built.add_callback(FullInStep2()))
    warned = [one.getMessage() for one in caplog.records if "cannot write its log" in one.getMessage()]
    assert len(warned) == 1 and "MB are free" in warned[0]
    assert warned[0].startswith("TensorBoard cannot write its log (")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 5 and "train/log_writes_failed" not in lines[0] and lines[-1]["train/log_writes_failed"] > 0
    last = max((tmp_path / "run" / "runs").glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    assert last.stat().st_size > 1000, "curves continue when the disk has space again"
    seen(warned[0])


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    """It needs 0.4 MB of weights and twice that for AdamW, and again the weights for the final model."""
    total = sum(path.stat().st_size for path in tiny_checkpoint().glob("*.safetensors"))
    run_config(tmp_path, 1, **SAVING)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(3.5 * total)))
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2 and "MB left, and a checkpoint and the final model need about" in refused.err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(4.5 * total)))
    assert run_cli(capsys, "train", tmp_path / "run.yaml").code == 0
    seen(refused.err.strip().splitlines()[-1])
