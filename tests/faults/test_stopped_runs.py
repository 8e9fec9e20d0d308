"""A run that is stopped or fails in a step saves a checkpoint, and resumes as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from as_shipped.starting import started
from coordexp.checkpoints.run_folder import LOCK, only_run_in
from coordexp.errors import ConfigError, RunStopped, TrainingDiverged
from coordexp.objective import RowTensors
from coordexp.training.checkpoint import is_complete
from coordexp.training.run import run_training
from coordexp.training.stopping import StopSignals
from faults.runs import DEADLINE_S, train_slowly
from support.cli_runs import run_cli
from support.forked import Handle, forked
from support.tiny_run import figures, run_config, same_weights, train, weights

# Segments wait from the first step on; two micro-steps a step, three steps to a log line.
KEYS: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 3,
    "training__gradient_accumulation_steps": 2,
    "training__max_steps": 4,
    "training__logging_steps": 3,
}


def in_forward(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do ``act`` before the ``number``-th forward of the run: the even ones are a step's second."""
    to, seen = RowTensors.to, 0

    def act_and_forward(self: RowTensors, device: Any) -> RowTensors:
        nonlocal seen
        seen += 1
        if seen == number:
            act()
        return to(self, device)

    monkeypatch.setattr(RowTensors, "to", act_and_forward)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(run_config(tmp_path_factory.mktemp("whole"), 1, **KEYS, training__save_strategy="epoch"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    number: signal.Signals, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    in_forward(monkeypatch, 3, lambda: signal.raise_signal(number))
    config = run_config(tmp_path, 1, **KEYS, training__resume_from_checkpoint=True)
    before = signal.getsignal(number)
    with pytest.raises(RunStopped, match=rf"stopped by {number.name} after step 2 of 4.*resume_from_checkpoint: true"):
        run_training(config, Console(quiet=True))
    assert signal.getsignal(number) is before
    assert "the step under way is finished and saved" in capfd.readouterr().err
    assert is_complete(tmp_path / "run" / "checkpoint-2")
    assert not (tmp_path / "run" / "model.safetensors").exists(), "an unfinished run must not look finished"
    monkeypatch.undo()
    resumed = train(config)
    assert same_weights(weights(resumed.model), weights(whole.model)) and figures(resumed) == figures(whole)


@pytest.mark.parametrize("end", [lambda: signal.raise_signal(signal.SIGTERM), lambda: 1 // 0], ids=["signal", "error"])
def test_a_model_alone_is_not_said_to_be_resumable(
    end: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_forward(monkeypatch, 2, end)
    config = run_config(tmp_path, 1, training__max_steps=3, training__save_only_model=True)
    with pytest.raises((RunStopped, ZeroDivisionError)) as ended:
        run_training(config, Console(quiet=True))
    said = f"{ended.value} {caplog.text}"
    assert re.search(r"start a new run with model\.model: \S+checkpoint-\d, which holds the model alone", said)
    assert "resume_from_checkpoint" not in said


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_forward(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGTERM))
    trainer = run_training(run_config(tmp_path, 1), Console(quiet=True))
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (trainer.stopped_by, trainer.asked_to_end) == (None, signal.SIGTERM), "a caller with more to do is told"


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicting, batches = sys.modules["coordexp.evaluation.answers"], 0
    predict = predicting.answer_samples

    def predict_and_signal(*arguments: Any, **options: Any) -> Any:
        nonlocal batches
        batches += 1
        signal.raise_signal(signal.SIGINT)
        return predict(*arguments, **options)

    monkeypatch.setattr(predicting, "answer_samples", predict_and_signal)
    keys = {"training__eval_strategy": "steps", "training__eval_steps": 1, "rollout_matching__decode_batch_size": 1}
    with pytest.raises(RunStopped, match="stopped by SIGINT after step 1 of 2"):
        run_training(run_config(tmp_path, 1, **keys), Console(quiet=True))
    assert batches == 1 and is_complete(tmp_path / "run" / "checkpoint-1")


def test_a_second_ctrl_c_ends_at_once(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), StopSignals(60.0, lambda: "Saved is this much") as signals:
        signal.raise_signal(signal.SIGUSR1)  # a batch system's warning, and the signal after it
        signal.raise_signal(signal.SIGINT)
        assert signals.asked == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line.partition(":")[0] for line in said] == ["SIGUSR1", "SIGINT", "SIGINT again"]
    assert ["Once more ends it at once" in line for line in said] == [False, True, False]


def test_a_child_that_outlives_the_run_does_not_hold_up_its_end() -> None:
    """Loader processes are forked while signals are read, and live as long as the trainer."""
    with StopSignals(60.0, lambda: "Saved is this much"):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        ended = threading.Timer(20.0, os.kill, (child, signal.SIGKILL))
        ended.start()
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended only with its child"
    ended.cancel()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_inside_a_step_the_resumed_run_is_the_same(
    where: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second micro-step of step 3: the first has taken rows from the buffer, and added to the log line."""

    def fail() -> None:
        torch.rand(3)  # as dropout would
        raise torch.OutOfMemoryError("no memory is left")

    if where == "forward":
        in_forward(monkeypatch, 6, fail)
    else:
        in_forward(monkeypatch, 6, lambda: monkeypatch.setattr(torch.Tensor, "backward", lambda *_, **__: fail()))
    config = run_config(tmp_path, 1, **KEYS, training__resume_from_checkpoint=True)
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        train(config)
    assert is_complete(tmp_path / "run" / "checkpoint-2")
    monkeypatch.undo()
    resumed = train(config)
    assert same_weights(weights(resumed.model), weights(whole.model)) and figures(resumed) == figures(whole)


@pytest.mark.parametrize("stage", [1, 2])
def test_nan_weights_are_reported_and_not_saved(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling from NaN is an error of a library, which says nothing of training."""

    class Spoil(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                next(kwargs["model"].parameters()).fill_(float("nan"))

    config = run_config(tmp_path, stage, rollout_matching__decoding={"temperature": 1.0}, training__max_steps=3)
    with pytest.raises(TrainingDiverged, match=r"NaN(,| or) infinite"):
        train(config, on_built=lambda trainer: trainer.add_callback(Spoil()))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(("broken_in", "save_strategy", "left"), [(2, "steps", ["checkpoint-1"]), (3, "no", [])])
def test_weights_that_break_in_the_step_before_a_save_replace_nothing(
    broken_in: int, save_strategy: str, left: list[str], tmp_path: Path
) -> None:
    """No forward computes with them before the checkpoint, or the model at the end, is due."""

    class Spoil(TrainerCallback):
        def on_optimizer_step(self, _: Any, state: Any, *__: Any, **kwargs: Any) -> None:
            if state.global_step == broken_in - 1:
                with torch.no_grad():
                    next(kwargs["model"].parameters())[0].fill_(float("inf"))

    keys: dict[str, Any] = {"max_steps": 3, "save_strategy": save_strategy, "save_steps": 1, "save_total_limit": 1}
    config = run_config(tmp_path, 1, **{f"training__{key}": value for key, value in keys.items()})
    with pytest.raises(TrainingDiverged, match=f"NaN or infinite after {broken_in} steps"):
        run_training(config, Console(quiet=True), callbacks=[Spoil()])
    saved = [path.parent.name for path in (tmp_path / "run").rglob("model.safetensors")]
    assert saved == left and all(is_complete(tmp_path / "run" / name) for name in left)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is another process, and it is killed: the lock that it leaves does not count."""
    run_config(tmp_path, 1)
    hold = "import sys, pathlib; from coordexp.checkpoints.run_folder import only_run_in\n" \
           "with only_run_in(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"  # fmt: skip
    command = [sys.executable, "-c", hold, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2 and f'"pid": {holder.pid}' in refused.err and "another run trains into" in refused.err
    holder.kill()
    holder.wait()
    with only_run_in(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="from within"), only_run_in(tmp_path):
            raise ConfigError("from within")


def start(folder: Path, pause_s: float, **keys: Any) -> Handle:
    """A run in its second step, which pauses in each forward."""
    run_config(folder, 1, training__max_steps=50, training__resume_from_checkpoint=True, **keys)
    log = folder / "log"
    process = Handle(forked(train_slowly, str(folder / "run.yaml"), pause_s, log=log, err=folder / "err"))
    deadline = time.monotonic() + DEADLINE_S
    while "forward of step 2" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "err").read_text()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)])
def test_a_signal_to_the_process_group_saves(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C in a terminal, or a batch system: processes that load data get it too. The command as a shell starts it;
    tests/as_shipped interrupts shipped configurations."""
    run_config(tmp_path, 1, training__max_steps=5000, training__save_strategy="steps", training__save_steps=2,
               training__save_total_limit=1, training__resume_from_checkpoint=True, data__num_workers=1)  # fmt: skip
    run = started(["coordexp", "train", "run.yaml"], tmp_path)
    try:
        run.until(lambda: is_complete(tmp_path / "run" / "checkpoint-2"), DEADLINE_S, "a checkpoint")
        os.killpg(run.process.pid, number)
        assert run.end(10.0, number.name) == 128 + number, run.output
        run.nothing_is_left()
    finally:
        run.kill()
    (step,) = re.findall(rf"stopped by {number.name} after step (\d+) of 5000", run.output)
    assert "Traceback" not in run.output
    assert is_complete(tmp_path / "run" / f"checkpoint-{step}")
    assert load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")


def test_a_hanging_step_ends_at_its_timeout_or_a_second_signal(tmp_path: Path) -> None:
    hangs = start(tmp_path, 1.0, training__stop_within_s=1.0, training__gradient_accumulation_steps=40)
    os.kill(hangs.pid, signal.SIGTERM)
    code, err = hangs.wait(60), (tmp_path / "err").read_text()
    assert code == 143 and "the step was not finished 1 s after SIGTERM" in err, err
    again = start(tmp_path, 1.0, training__gradient_accumulation_steps=40)
    for _ in range(2):
        os.kill(again.pid, signal.SIGTERM)
        time.sleep(0.5)
    code, err = again.wait(60), (tmp_path / "err").read_text()
    assert code == 143 and "SIGTERM again: ending at once" in err, err
