"""What a run shows: a progress bar with ETA on a terminal, a line now and then elsewhere; and what TensorBoard, W&B and
other loggers are told, by our names and in one curve across resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from coordexp import distributed
from coordexp.data.progress_bar import Lines, make_progress

if TYPE_CHECKING:
    from coordexp.training.loop import CoordExpTrainer

_TRAIN = "train/"  # transformers puts it before every name that is no evaluation's, before ours too


def set_up_loggers(
    trainer: CoordExpTrainer, logging_dir: Path | None, resume: Path | None
) -> list[TensorBoardCallback]:
    """Prepare the loggers that the trainer has; call before it trains.

    TensorBoard's files of one run stand in one folder, ``logging_dir`` or ``runs`` in the output folder, also after a
    resume; what an interrupted run wrote behind the checkpoint that it goes on from is taken back. Returns:
    TensorBoard's loggers.
    """
    names = trainer.args.report_to or []
    reporting = tuple(get_reporting_integration_callbacks([names] if isinstance(names, str) else names))
    callbacks = trainer.callback_handler.callbacks
    for one in callbacks:
        if isinstance(one, reporting):
            _with_our_names(one)
    boards = [one for one in callbacks if isinstance(one, TensorBoardCallback)]
    for board in boards:
        # transformers would take the folder from the environment alone, else one by the clock for every start.
        if logging_dir is not None or board.logging_dir is None:
            board.logging_dir = str(logging_dir or Path(str(trainer.args.output_dir)) / "runs")
        if resume is not None and distributed.is_main():
            from torch.utils.tensorboard import SummaryWriter

            board.tb_writer = SummaryWriter(log_dir=os.fspath(board.logging_dir), purge_step=_step_of(resume) + 1)
    return boards


def _with_our_names(logger: TrainerCallback) -> None:
    """``train/samples_total`` stays that, and is no ``train/train/samples_total``."""
    told = logger.on_log

    def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        named = None if logs is None else {name.removeprefix(_TRAIN): value for name, value in logs.items()}
        return told(args, state, control, logs=named, **kwargs)

    logger.on_log = on_log  # pyright: ignore[reportAttributeAccessIssue]


def _step_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])


_SHOWN = (
    ("loss", "loss"),
    ("rollout/match_rate", "match"),
    ("rollout/parse_truncated_rate", "truncated"),
    ("coord_diag/expected_bin_mae", "coord error"),
)


class RichProgress(TrainerCallback):
    """One bar over the optimizer steps, with the figures one watches."""

    def __init__(self, console: Console, description: str) -> None:
        self._console = console
        self._description = description
        self._progress: Progress | None = None
        self._task: Any = None
        self._note = ""
        self._lines: Lines | None = None
        self._first = 0
        self._other_bars = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the bar on a terminal; elsewhere lines come now and then."""
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
            self._other_bars = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            self._progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take over the figures that are shown beside the bar."""
        shown = [f"{label} {logs[name]:.3g}" for name, label in _SHOWN if logs and name in logs]
        if shown:
            self._note = "  ".join(shown)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar on, or print a line if one is due."""
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step, note=self._note)
        elif self._lines is not None:
            text = f"{self._description}: step {state.global_step}/{state.max_steps}"
            done, total = state.global_step - self._first, state.max_steps - self._first
            self._lines.tell(text, done, total, self._note, always=done == total)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        self.stop()

    def stop(self) -> None:
        """Give the terminal back, also after an error."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            if self._other_bars:
                logging.enable_progress_bar()
