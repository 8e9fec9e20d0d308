"""What TensorBoard, W&B and other loggers are told: names as this project writes them, and one curve across resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME

from coordexp import distributed

_TRAIN = "train/"  # transformers puts it before every name that is no evaluation's, before ours too


def set_up_loggers(trainer: Trainer, logging_dir: Path | None, resume: Path | None) -> list[TensorBoardCallback]:
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
