"""A progress bar with ETA on a terminal; a line now and then elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from coordexp.progress_bar import Lines, make_progress

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
