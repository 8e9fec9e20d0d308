"""Loggers that cannot write do not end a run: their losses are counted, and reported once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

logger = logging.getLogger("coordexp")
LOG_WRITES_FAILED = "train/log_writes_failed"


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
        logger.warning(
            "%s cannot write its log (%s; %.1f MB are free at %s); the run continues, and %s counts what is lost",
            name,
            error,
            shutil.disk_usage(where).free / 1e6,
            where,
            LOG_WRITES_FAILED,
        )
