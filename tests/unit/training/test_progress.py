"""A bar on a terminal, lines at intervals in a file, nothing on other ranks; warnings of drift."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging as hf_logging

from coordexp.training.progress import RichProgress
from coordexp.training.watches import DriftWatch

NOTHING: Any = None


def state_at(step: int, of: int, **keys: Any) -> Any:
    most = {"is_world_process_zero": True, "best_model_checkpoint": None}
    return SimpleNamespace(**most | {"global_step": step, "max_steps": of} | keys)


def run(console: Console, steps: int = 3, first: int = 0, main: bool = True) -> RichProgress:
    progress = RichProgress(console, "stage 2")
    state = state_at(first, first + steps, is_world_process_zero=main)
    progress.on_train_begin(NOTHING, state, NOTHING)
    for step in range(steps):
        state.global_step += 1
        progress.on_step_end(NOTHING, state, SimpleNamespace(should_log=step > 0))
        logs = {"loss": 1.23456 + steps - step - 1, "rollout/match_rate": 0.5, "other": 9.0}
        progress.on_log(NOTHING, state, NOTHING, logs=logs)
    progress.on_train_end(NOTHING, state, NOTHING)
    return progress


def test_a_log_file_has_the_last_step_and_its_metrics() -> None:
    """Those of the last step itself: losses are 3.23, 2.23, 1.23."""
    file = io.StringIO()
    run(Console(file=file, width=200))
    (line,) = file.getvalue().splitlines()
    assert line.startswith("stage 2: step 3/3, eta 0 s") and "loss 1.23" in line and "match 0.5" in line
    assert "9" not in line


@pytest.mark.parametrize("terminal", [False, True])
def test_evaluations_show_their_progress_and_figures(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordexp.data.progress_bar.LINE_EVERY_S", 0.0)  # every move is a line
    file = io.StringIO()
    progress = RichProgress(Console(file=file, force_terminal=terminal, width=200), "stage 1")
    state = state_at(20, 20, best_metric=0.4156)
    args: Any = SimpleNamespace(metric_for_best_model="rollout/f1", load_best_model_at_end=True)
    progress.on_train_begin(args, state, None)
    for done in range(4):
        progress.answered(done, 3)
    progress.on_evaluate(args, state, None, metrics={"eval_rollout/f1": 0.4156, "eval_rollout/AP": 0.2})
    state.best_model_checkpoint = "run/checkpoint-20"
    progress.on_save(args, state, None)
    progress.on_train_end(args, state, None)
    text = file.getvalue()
    assert terminal or "evaluation, 2/3 images, eta" in text
    assert text.count("evaluation after step 20: F1 0.416  AP 0.200") == 2  # when it ends, and at the end of the run
    assert text.count("run/checkpoint-20, rollout/f1 0.416") == 2


def test_a_best_checkpoint_that_no_longer_counts_is_not_named_at_the_end() -> None:
    """A resumed run has other validation images: its earlier figures compare with nothing."""
    file = io.StringIO()
    progress = RichProgress(Console(file=file, width=200), "stage 1")
    state = state_at(20, 20, best_metric=0.5, best_model_checkpoint="run/checkpoint-10")
    args: Any = SimpleNamespace(metric_for_best_model="rollout/f1")
    progress.on_save(args, state, None)
    state.best_metric = state.best_model_checkpoint = None
    progress.on_train_end(args, state, None)
    assert file.getvalue() == "best checkpoint: run/checkpoint-10, rollout/f1 0.500\n"


def test_coordinate_errors_have_a_unit() -> None:
    file = io.StringIO()
    progress = RichProgress(Console(file=file, width=200), "stage 1")
    state = state_at(0, 1)
    progress.on_train_begin(NOTHING, state, NOTHING)
    state.global_step = 1
    progress.on_log(None, state, None, logs={"coord_diag/expected_bin_mae": 12.34})
    assert "coord diagnostic: error 12.3 bins" in file.getvalue()


def test_a_terminal_shows_a_bar_and_is_restored() -> None:
    file = io.StringIO()
    progress = run(Console(file=file, force_terminal=True, width=200))
    assert "3/3" in file.getvalue() and "stage 2" in file.getvalue()
    assert progress._progress is None
    progress.stop()  # again, as after an error


def test_log_lines_are_not_wrapped_and_a_resumed_run_continues_its_step_count() -> None:
    file = io.StringIO()
    run(Console(file=file, width=20), steps=2, first=40)
    (line,) = file.getvalue().splitlines()
    assert "step 42/42" in line


def test_transformers_bars_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_logging.enable_progress_bar()
    during = []
    monkeypatch.setattr(RichProgress, "on_log", lambda *_, **__: during.append(hf_logging.is_progress_bar_enabled()))
    run(Console(file=io.StringIO(), force_terminal=True, width=200))
    assert during == [False] * 3 and hf_logging.is_progress_bar_enabled()


def test_other_ranks_are_silent() -> None:
    file = io.StringIO()
    run(Console(file=file, width=200), main=False)
    assert file.getvalue() == ""


# -- DriftWatch warns once when truncated answers or duplicates rise, also in a resumed run ----------------------------

Line = dict[str, float]


def line(samples: int = 16, truncated: int = 0, duplicates: int = 0, predicted: int = 48, length: float = 60) -> Line:
    return {
        "rollout/samples_total": samples,
        "rollout/parse_truncated_total": truncated,
        "rollout/valid_pred_objects_total": predicted,
        "rollout/duplicates_total": duplicates,
        "rollout/gen_new_tokens_total": samples * length,
        "loss": 1.0,
    }


CALM = [line(truncated=i % 2) for i in range(8)]  # 128 answers, 3 % truncated: the first window


def observe(lines: list[Line]) -> list[dict[str, float]]:
    watch = DriftWatch()
    return [watch.observe(one, step) for step, one in enumerate(lines, start=1)]


@pytest.mark.parametrize(
    ("worse", "rate", "said"),
    [
        (line(truncated=6), "safeguard/truncated_rate", "answers are truncated, 3% at first"),
        (line(duplicates=8), "safeguard/duplicate_rate", "objects repeat an earlier one, 0% at first"),
    ],
)
def test_each_rise_warns_once(worse: Line, rate: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = observe([*CALM, *[worse] * 20])
    (warning,) = caplog.messages
    step = next(at for at, metrics in enumerate(seen, start=1) if metrics[rate] >= seen[7][rate] + 0.10)
    assert warning.startswith(f"step {step}: ") and said in warning


@pytest.mark.parametrize(
    "lines",
    [
        [line(truncated=i % 3, duplicates=i % 4) for i in range(40)],
        [line(length=300)] * 40,  # the demo's answers grow, which is their purpose
        [{"loss": 1.0}],
    ],
)
def test_noise_and_longer_answers_are_not_drift(lines: list[Line], caplog: pytest.LogCaptureFixture) -> None:
    observe([*CALM, *lines])
    assert not caplog.messages


def test_lines_without_rollouts_are_not_counted() -> None:
    mixed = [one for worse in [line(truncated=6)] * 9 for one in ({"loss": 1.0}, worse)]
    seen = observe([*CALM, *mixed])
    assert seen[8::2] == [{}] * 9
    assert [metrics for metrics in seen if metrics] == observe([*CALM, *[line(truncated=6)] * 9])


@pytest.mark.parametrize("step", range(0, 30, 3))
def test_drift_warnings_are_the_same_when_resumed_at_any_step(step: int, caplog: pytest.LogCaptureFixture) -> None:
    lines = [*CALM, *[line(truncated=min(16, i)) for i in range(12)], *CALM, {"eval_rollout/f1": 0.4}, line()]
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        whole = observe(lines)
        said = [one for one in caplog.messages if int(one.split()[1].rstrip(":")) > step]
        caplog.clear()
        resumed = DriftWatch()
        resumed.replay(lines[:step])
        assert [resumed.observe(one, at + 1) for at, one in enumerate(lines) if at >= step] == whole[step:]
    assert caplog.messages == said


def test_the_window_has_128_answers() -> None:
    seen = observe([*[line(truncated=16)] * 8, *[line()] * 8])
    assert seen[7]["safeguard/truncated_rate"] == 1.0
    assert [m["safeguard/truncated_rate"] for m in seen[8:]] == [k / 8 for k in range(7, -1, -1)]
