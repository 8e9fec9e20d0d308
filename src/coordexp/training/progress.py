"""What a run shows: a progress bar (lines, if not on a terminal), and loggers such as TensorBoard and W&B, with the
same metric names and one curve across resumes. One that cannot write does not end a run: what it loses is counted."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from coordexp import distributed
from coordexp.checkpoints.run_folder import CURVES
from coordexp.data.progress_bar import Lines, make_progress, say
from coordexp.training.checkpoint import read_seal

logger = logging.getLogger("coordexp")

LOG_WRITES_FAILED = "train/log_writes_failed"
_TRAIN = "train/"  # transformers' loggers add it to every name that is not an evaluation's


def set_up_loggers(
    callbacks: Sequence[TrainerCallback], args: TrainingArguments, resume: Path | None, failed: FailedWrites
) -> list[TensorBoardCallback]:
    """Prepare the loggers among a trainer's callbacks, before it trains, and return TensorBoard's: its files of one run
    are in one folder, ``runs`` in the output folder, also after a resume, which purges the events after its checkpoint.
    ``failed`` counts what they cannot write."""
    names = args.report_to or []
    reporting = tuple(get_reporting_integration_callbacks([names] if isinstance(names, str) else names))
    for one in callbacks:
        if isinstance(one, reporting):
            _keep_our_names(one)
            failed.tolerate(one)
    boards = [one for one in callbacks if isinstance(one, TensorBoardCallback)]
    for board in boards:
        # transformers takes the folder from the environment (TENSORBOARD_LOGGING_DIR), else one by the clock for every
        # start.
        if board.logging_dir is None:
            board.logging_dir = str(Path(str(args.output_dir)) / CURVES)
        if resume is not None and distributed.is_main():
            from torch.utils.tensorboard import SummaryWriter

            board.tb_writer = SummaryWriter(log_dir=os.fspath(board.logging_dir), purge_step=read_seal(resume).step + 1)
    return boards


def _keep_our_names(callback: TrainerCallback) -> None:
    # `train/samples_total` under that name, not as `train/train/samples_total`.
    original = callback.on_log

    def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        named = None if logs is None else {name.removeprefix(_TRAIN): value for name, value in logs.items()}
        return original(args, state, control, logs=named, **kwargs)

    callback.on_log = on_log  # pyright: ignore[reportAttributeAccessIssue]


class FailedWrites:
    """Counts what loggers could not write, on this rank, since the start."""

    def __init__(self, output_dir: Path) -> None:
        self.count = 0
        self._output_dir = output_dir
        self._warned: set[str] = set()

    def tolerate(self, callback: TrainerCallback, *others: str) -> None:
        """From now on an error of the system in one of ``callback``'s events, or in a method of ``others``, such as a
        full disk, is a warning (once) and is counted. TensorBoard then begins another file with the next line that is
        logged."""
        for event in dir(callback):
            if event.startswith("on_") or event in others:
                setattr(callback, event, self._guarded(callback, getattr(callback, event)))

    def _guarded(self, callback: TrainerCallback, act: Callable[..., Any]) -> Callable[..., Any]:
        def act_or_count(*arguments: Any, **options: Any) -> Any:
            try:
                return act(*arguments, **options)
            except OSError as error:
                self._lose(callback, error)
                return None

        return act_or_count

    def _lose(self, callback: TrainerCallback, error: OSError) -> None:
        self.count += 1
        if isinstance(callback, TensorBoardCallback):
            callback.tb_writer = None  # its thread has ended; the next line opens another file
        name = type(callback).__name__.removesuffix("Callback")
        if name in self._warned:
            return
        self._warned.add(name)
        where = next(one for one in (self._output_dir, *self._output_dir.absolute().parents) if one.exists())
        free = f"{shutil.disk_usage(where).free / 1e6:.1f} MB are free at {where}"
        lost = f"the run continues, and {LOG_WRITES_FAILED} counts what is lost"
        logger.warning(f"{name} cannot write its log ({error}; {free}); {lost}")


# Metric → label, unit.
_SHOWN = (
    ("loss", "loss", ""),
    ("rollout/match_rate", "match", ""),
    ("rollout/parse_truncated_rate", "truncated", ""),
    ("coord_diag/expected_bin_mae", "coord diagnostic: error", " bins"),
)
_EVALUATED = (
    *(("f1", "F1"), ("f1_any_desc", "F1 of boxes alone"), ("precision", "precision"), ("recall", "recall")),
    *(("AP", "AP"), ("AP50", "AP50")),
    *(("lost_rate", "lost"), ("gained_rate", "gained"), ("truncated_rate", "truncated")),
)


def _with_interval(found: Mapping[str, float], name: str) -> str:
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    return f"{found[name]:.3f}" if low is None or high is None else f"{found[name]:.3f} ({low:.3f} to {high:.3f})"


class RichProgress(TrainerCallback):
    """A progress bar of the optimizer steps with the main figures, one of a running evaluation, and a line with each
    evaluation's figures."""

    def __init__(self, console: Console, description: str) -> None:
        self._console = console
        self._description = description
        self._progress: Progress | None = None
        self._task: Any = None
        self._note = ""
        self._lines: Lines | None = None
        self._evaluation_lines: Lines | None = None
        self._first = 0
        self._other_bars = False
        self._evaluation: Any = None  # the bar of an evaluation under way
        self._evaluated = ""  # the figures of the last one
        self._best: str | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._first = state.global_step
        self._lines = Lines(self._console)
        if self._console.is_terminal:
            self._progress = make_progress(self._console)
            self._task = self._progress.add_task(
                self._description, total=state.max_steps, completed=state.global_step, first=state.global_step, note=""
            )
            # transformers' bar of each checkpoint would be drawn into this one.
            self._other_bars = is_progress_bar_enabled()
            disable_progress_bar()
            self._progress.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        shown = [f"{label} {logs[name]:.3g}{unit}" for name, label, unit in _SHOWN if logs and name in logs]
        if shown:
            self._note = "  ".join(shown)
            self._show(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not (control.should_log or state.global_step >= state.max_steps):  # on_log has its figures
            self._show(state)

    def _show(self, state: TrainerState) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step, note=self._note)
        elif self._lines is not None:
            text = f"{self._description}: step {state.global_step}/{state.max_steps}"
            done, total = state.global_step - self._first, state.max_steps - self._first
            self._lines.tell(text, done, total, self._note, always=done == total)

    def answered(self, done: int, total: int) -> None:
        """Show that an evaluation has ``done`` of this rank's ``total`` answers."""
        if self._progress is not None:
            if self._evaluation is None:
                self._evaluation = self._progress.add_task("evaluation", total=total, note="images")
            self._progress.update(self._evaluation, completed=done, total=total)
        elif self._lines is not None:
            if done == 0 or self._evaluation_lines is None:
                self._evaluation_lines = Lines(self._console)  # its time left follows from this evaluation alone
            self._evaluation_lines.tell(f"{self._description}: evaluation, {done}/{total} images", done, total)

    def note(self, text: str) -> None:
        """Print a sentence about the evaluation."""
        self._print(f"note: {text}")

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if self._progress is not None and self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None
        if self._lines is not None:
            # The time left follows from steps alone.
            self._lines, self._first = Lines(self._console), state.global_step
        found = {name.removeprefix("eval_rollout/"): value for name, value in (metrics or {}).items()}
        figures = [f"{label} {_with_interval(found, name)}" for name, label in _EVALUATED if name in found]
        if figures and self._lines is not None:
            self._evaluated = f"evaluation after step {state.global_step}: {'  '.join(figures)}"
            self._print(self._evaluated)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.best_model_checkpoint not in (None, self._best):
            self._best = state.best_model_checkpoint
            self._print(self._best_line(args, state))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.stop()
        if self._evaluated:
            self._print(f"last {self._evaluated}")
        if state.best_model_checkpoint is not None:
            self._print(self._best_line(args, state))

    def _best_line(self, args: Any, state: TrainerState) -> str:
        return f"best checkpoint: {state.best_model_checkpoint}, {args.metric_for_best_model} {state.best_metric:.3f}"

    def _print(self, text: str) -> None:
        if distributed.is_main():  # also before the training begins, of what a resumed run goes on from
            say(self._console, text)

    def stop(self) -> None:
        """Release the terminal, also after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            if self._other_bars:
                enable_progress_bar()
