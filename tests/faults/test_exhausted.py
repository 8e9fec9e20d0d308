"""Exhausted resources or a jumping clock: a run ends with a clear error and does not hang."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordexp.errors import CheckpointError, ServerTimeout
from coordexp.training.checkpoint import check_contents, is_complete
from faults.test_lying_servers import CALLS, DEADLINE_S, client_of
from support.cli_runs import run_cli
from support.lying_server import lying
from support.tiny_run import run_config, same_weights, train, weights

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


def files_end_at(size: int) -> AbstractContextManager[None]:
    """No file of this process grows beyond ``size`` bytes: writing fails as on a full disk, which needs no root."""
    return limited(resource.RLIMIT_FSIZE, size)


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
        train(run_config(tmp_path, 1, **SAVING), on_built=limited_from_step_2(lambda: files_end_at(size)))
    said = str(refused.value)
    assert "checkpoint-2 cannot be written: its disk is full" in said and "MB free; a checkpoint takes about" in said
    assert "checkpoint-1" in said and "save_total_limit" in said
    assert is_complete(tmp_path / "run" / "checkpoint-1") and not is_complete(tmp_path / "run" / "checkpoint-2")
    seen(refused.value)


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
