"""Which step of a run is the best, by ``training.metric_for_best_model``, and which checkpoint is of that step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from coordexp.config.rollout import EvalDetectionConfig
from coordexp.errors import ConfigError
from coordexp.metrics.table import SECTIONS, find_metric
from coordexp.training.checkpoint import checkpoint_folder, is_complete
from coordexp.training.optimizer import needs_metric
from coordexp.training.state import RunState


class BestStep:
    """The best figure so far and its step, in ``run.progress``, which checkpoints contain; ``note`` gets sentences for
    the user. Raises ConfigError for a figure that no evaluation has, or that a checkpoint would lack."""

    def __init__(
        self,
        run: RunState,
        args: TrainingArguments,
        measured: EvalDetectionConfig | None,
        note: Callable[[str], None],
    ) -> None:
        _check(args, run.progress, measured)
        self._run, self._args, self._note = run, args, note
        given = args.metric_for_best_model
        self._name = None if given is None else _figure(given)

    def observe(self, metrics: Mapping[str, float], saved: Path | None, *, follows: bool) -> None:
        """Take the figure of an evaluation. ``saved``: the checkpoint of its step, None without one yet; ``follows``:
        one is written after it."""
        if self._name is None:
            return
        if self._name not in metrics:  # objects lost since the first evaluation, or large ones in a set without any
            self._note(
                f"no step is the best by this evaluation: it has no {self._name} (training.metric_for_best_model)"
            )
            return
        value, sign = metrics[self._name], 1 if self._args.greater_is_better else -1
        if needs_metric(self._run.scheduler):
            self._run.scheduler.step(value)
        if self._args.save_strategy != "no" and saved is None and not follows:
            return  # without checkpoints the best is a figure alone
        state = self._run.progress
        if state.best_metric is None or sign * value > sign * state.best_metric:
            state.best_metric, state.best_global_step = value, state.global_step
            # Of the folder that a run resumes from, which may be another one than its own; or until one is written.
            state.best_model_checkpoint = None if saved is None else str(saved)

    def forget(self) -> None:
        """Start anew with the next evaluation."""
        state, scheduler = self._run.progress, self._run.scheduler
        state.best_metric = state.best_model_checkpoint = None
        state.best_global_step = 0
        if needs_metric(scheduler):  # it lowers the rate if a figure is no better than its own best one
            scheduler.best = math.inf if scheduler.mode == "min" else -math.inf

    def resume(self, measures_anew: bool) -> None:
        """Go on from the figure of a loaded checkpoint, unless that of the best step is gone or incomplete, or
        ``measures_anew``: figures do not compare."""
        state = self._run.progress
        note_best(state, self._args)
        is_gone = self._args.save_strategy != "no" and state.best_model_checkpoint is None
        if state.best_metric is not None and (measures_anew or is_gone):
            self.forget()
            lost = "the best checkpoint is gone or incomplete"
            why = "the keys of evaluations were changed" if measures_anew else lost
            self._note(f"{why}; the best checkpoint is chosen from the next evaluation on")

    def say_loaded(self) -> None:
        """Note whose model is kept with ``training.load_best_model_at_end``."""
        best = self._run.progress.best_model_checkpoint
        self._note(
            f"the model is that of {best} (training.load_best_model_at_end)"
            if best is not None
            else "training.load_best_model_at_end: no checkpoint of this run was evaluated by "
            f"{self._args.metric_for_best_model}, so the model is that of the last step"
        )


def note_best(progress: TrainerState, args: TrainingArguments, folder: Path | None = None) -> None:
    """Name the best checkpoint by the step of the best figure, if it is complete or is ``folder``, which is written."""
    if progress.best_global_step:
        best = checkpoint_folder(str(args.output_dir), progress.best_global_step)
        if best == folder or is_complete(best):
            progress.best_model_checkpoint = str(best)


def _check(args: TrainingArguments, state: TrainerState, measured: EvalDetectionConfig | None) -> None:
    """Raises ConfigError for a best model by a figure that no evaluation has, or that a checkpoint would lack.
    Intervals may be shares of a run, so its steps must be known."""
    if args.metric_for_best_model is not None and args.eval_strategy != "no":
        name = _figure(args.metric_for_best_model)
        if find_metric(name) not in SECTIONS["evaluation"]:
            near = difflib.get_close_matches(name, [metric.name for metric in SECTIONS["evaluation"]], 1)
            raise ConfigError(
                f"training.metric_for_best_model: no evaluation has a figure {name}"
                + (f"; did you mean {near[0]}?" if near else "; docs/metrics.md lists them")
            )
        if (setting := _left_out(name, measured)) is not None:
            raise ConfigError(f"training.metric_for_best_model: {name} needs rollout_matching.eval_detection.{setting}")
    if args.load_best_model_at_end and args.eval_strategy == "steps" and state.save_steps % int(state.eval_steps or 1):
        raise ConfigError(
            f"training.save_steps: {args.save_steps:g} is every {state.save_steps} of {state.max_steps} steps, and "
            f"eval_steps every {state.eval_steps}: no multiple, so load_best_model_at_end would find checkpoints "
            "without figures"
        )


def _left_out(name: str, measured: EvalDetectionConfig | None) -> str | None:
    """The setting of ``rollout_matching.eval_detection`` without which evaluations have no figure ``name``."""
    section, _, figure = name.partition("/")
    if section != "eval_rollout":
        return None
    if measured is None:
        return "enabled: true"
    if measured.metrics == "f1ish" and figure.startswith(("AP", "AR", "segm_")):
        return "metrics: both"
    if figure.startswith("segm_") and not measured.use_segm:
        return "use_segm: true"
    _, _, threshold = figure.partition("@")
    if threshold and threshold not in [f"{one:g}" for one in measured.f1ish_iou_thrs[1:]]:
        return f"f1ish_iou_thrs with {threshold} after its first"
    return None


def _figure(name: str) -> str:
    return f"eval_{name.removeprefix('eval_')}"
