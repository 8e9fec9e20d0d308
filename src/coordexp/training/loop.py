"""The loop around :mod:`coordexp.training.step`: steps and epochs, logs, evaluation, checkpoints, signals, errors."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from coordexp import distributed
from coordexp.checkpoints.run_folder import LAST_EVALUATION
from coordexp.config.rollout import EvalDetectionConfig
from coordexp.data.dataset import RecordDataset
from coordexp.errors import RunStopped, TrainingDiverged
from coordexp.evaluation.answers import ImageAnswer, answer_dataset, write_answers
from coordexp.evaluation.summary import COUNTS_ONLY, summarise, unknown_names
from coordexp.metrics import MetricsPayload
from coordexp.modeling.finite import broken_weight, check_finite
from coordexp.modeling.scores import TokenScorer
from coordexp.out_of_memory import is_out_of_memory, phase
from coordexp.rollouts import RolloutBackend, rollout_session
from coordexp.training.batches import StepBatches
from coordexp.training.best import BestStep, note_best
from coordexp.training.checkpoint import delete_old, read_seal
from coordexp.training.progress import LOG_WRITES_FAILED
from coordexp.training.rows import untrained_note
from coordexp.training.saving import (
    load_optimizer,
    load_progress,
    load_rank_state,
    load_weights,
    save_checkpoint,
    save_final_model,
)
from coordexp.training.state import RunState, act_together, callback_states, restore_callbacks
from coordexp.training.step import TrainStep
from coordexp.training.watches import DriftWatch, ReadingWatch, RunLedger

logger = logging.getLogger("coordexp")


@dataclass(eq=False, kw_only=True)
class CoordExpTrainer:
    """The training loop: optimizer steps until ``max_steps``, logs, evaluation, checkpoints.

    It calls transformers' callbacks at their usual events, and they may set its control flags. Loggers are callbacks.
    ``rollout_matching_cfg``: the resolved ``rollout_matching`` section, for plugins that read it. ``measured``: the
    figures that an evaluation computes; None: none. ``keep_checkpoints``: as ``training.save_total_limit``; None keeps
    all. ``on_answer``: gets the number of answers of an evaluation so far, and of all. ``failed_writes``: how often a
    logger could not write. ``on_note``: gets a sentence about an evaluation's answers. ``measures_anew``: the figures
    of a resumed run do not compare with earlier ones. ``asked_to_end``: number of a stop signal; ``stopped_by``: of one
    that ended the run before its last step.
    """

    run: RunState
    step: TrainStep
    batches: StepBatches
    backend: RolloutBackend
    args: TrainingArguments
    max_steps: InitVar[int]
    eval_dataset: RecordDataset | None
    rollout_matching_cfg: Mapping[str, Any]
    callbacks: InitVar[list[TrainerCallback]]
    measured: EvalDetectionConfig | None = COUNTS_ONLY
    scorer: TokenScorer | None = None
    keep_checkpoints: int | None = None
    on_answer: Callable[[int, int], None] = lambda done, total: None
    failed_writes: Callable[[], int] = lambda: 0
    on_note: Callable[[str], None] = lambda note: None
    measures_anew: bool = False
    stopped_by: int | None = field(default=None, init=False)
    asked_to_end: int | None = field(default=None, init=False)

    def __post_init__(self, max_steps: int, callbacks: list[TrainerCallback]) -> None:
        run, step, batches = self.run, self.step, self.batches
        self._drift = DriftWatch()
        self._ledger = RunLedger(Path(str(self.args.output_dir)), self.on_note)
        self._last_update: dict[str, Any] = {}
        self._saved: tuple[int, Path] | None = None  # step and folder of this run's last complete checkpoint
        self._resumable = True  # that checkpoint
        self._signal: Callable[[], int | None] = lambda: None
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback(), *callbacks], run.loaded.model, run.loaded.processor, run.optimizer, run.scheduler
        )
        on_cpu = run.accelerator.device.type == "cpu"
        self._reading = ReadingWatch(batches.num_workers, torch.get_num_threads() if on_cpu else 0)
        step.notify = self._notify
        step.last_step = max_steps
        self.state.max_steps = max_steps
        self.state.num_train_epochs = math.ceil(max_steps / batches.steps_per_epoch)
        self.state.compute_steps(self.args, max_steps)
        self._best = BestStep(run, self.args, self.measured, self.on_note)
        step.logging_steps = int(self.state.logging_steps or 1)
        self._notify("on_init_end")

    @property
    def model(self) -> Any:
        return self.run.loaded.model  # the bare one, sharded in place under FSDP

    @property
    def state(self) -> TrainerState:
        return self.run.progress

    def add_callback(self, callback: TrainerCallback) -> None:
        """Add a callback."""
        self.callback_handler.add_callback(callback)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, signal: Callable[[], int | None] | None = None) -> None:
        """Train up to ``max_steps``, from the start or from a complete checkpoint's folder.

        ``signal``: returns the number of a stop signal, None if there is none. After a signal the current step is
        finished and saved, and ``stopped_by`` is its number. Raises RunStopped for a signal during an evaluation;
        TrainingDiverged, and any error of a step, after the steps before it are saved.
        """
        self._signal = signal or self._signal
        first = self.state.global_step
        if resume_from_checkpoint is not None:
            first = self._resume(Path(resume_from_checkpoint))
        self.batches.start(first)
        self.run.loaded.model.zero_grad()
        started = time.perf_counter()
        self._notify("on_train_begin")
        if (self.args.eval_on_start and first == 0) or self._owes_evaluation(first):
            self._evaluate_and_note_best()
        if resume_from_checkpoint is not None:
            load_rank_state(self.run, Path(resume_from_checkpoint))

        is_ended = self.control.should_training_stop  # by a callback, after the evaluation above
        for step in range(first, first if is_ended else self.state.max_steps):
            if step % self.batches.steps_per_epoch == 0 or step == first:
                self._notify("on_epoch_begin")
            with self._saving_on_error(f"step {step + 1}"):
                self.step.accumulate(self.batches, step)
            self._last_update = self.step.update()
            self.state.global_step = step + 1
            self.state.epoch = self.batches.epoch_after(step + 1)
            self._notify("on_step_end")
            if self.state.global_step >= self.state.max_steps:
                self.control.should_log = True  # the last interval may be shorter than the others
            signal_number = int(distributed.all_reduce([self._signal() or 0], "max")[0])
            # On all ranks, if any of them got a signal.
            if signal_number and self.state.global_step < self.state.max_steps:
                self.stopped_by = signal_number
                self.control.should_save = self.control.should_training_stop = True
                self.control.should_evaluate = False
            self._log_evaluate_save()
            if self._ends_epoch() or self.control.should_training_stop or self.control.should_epoch_stop:
                self._notify("on_epoch_end")
                if self.stopped_by is not None:  # the code above has saved already
                    self.control.should_save = self.control.should_evaluate = False
                self._log_evaluate_save()
            if self.control.should_training_stop:
                break
            if self.control.should_epoch_stop:
                raise ValueError("a callback set should_epoch_stop, which would skip samples; use should_training_stop")

        if self.stopped_by is None:
            self._log_steps()  # if a callback ended the run between two lines
        seconds, steps = max(time.perf_counter() - started, 1e-9), self.state.global_step - first
        samples = self.batches.samples_before(self.state.global_step) - self.batches.samples_before(first)
        self._log(
            {
                "train_runtime": seconds,
                "train_samples_per_second": samples / seconds,
                "train_steps_per_second": steps / seconds,
                "train_loss": _mean_loss(self.state),
            }
        )
        read = self.batches.samples_before(self.state.global_step)
        if self.stopped_by is None and (note := untrained_note(self.run.buffer, read)) is not None:
            self.on_note(note)
        note_best(self.state, self.args)  # also if the last evaluation came after its checkpoint
        if self.args.load_best_model_at_end and self.stopped_by is None:
            if (best := self.state.best_model_checkpoint) is not None:
                load_weights(self.run, Path(best))
            self._best.say_loaded()
        self._notify("on_train_end")

    def _resume(self, checkpoint: Path) -> int:
        """Load everything but this rank's random states. Returns: the steps that are finished."""
        self._saved = (read_seal(checkpoint).step, checkpoint)
        progress, state = load_progress(checkpoint), self.state
        for name in ("global_step", "epoch", "log_history", "best_metric", "best_model_checkpoint", "best_global_step"):
            setattr(state, name, getattr(progress, name))
        self._drift.replay(state.log_history)
        restore_callbacks(self.callback_handler.callbacks, progress.stateful_callbacks)
        load_weights(self.run, checkpoint)
        with distributed.raise_on_all_ranks(f"loading {checkpoint}"):
            check_finite(self.model, checkpoint)
        load_optimizer(self.run, checkpoint)
        self._best.resume(measures_anew=self.measures_anew)
        return state.global_step

    def _owes_evaluation(self, step: int) -> bool:
        """Whether a checkpoint was written instead of the evaluation of its step: at a stop signal, or an error."""
        args, state = self.args, self.state
        if not step or self.eval_dataset is None or args.eval_strategy == "no":
            return False
        every = self.batches.steps_per_epoch if args.eval_strategy == "epoch" else int(state.eval_steps or 1)
        is_due = step % every == 0 or step == state.max_steps
        return is_due and not any("eval_time/runtime_s" in one and one.get("step") == step for one in state.log_history)

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save as the control flags say."""
        if self.control.should_log:
            self._log_steps()
        if self.control.should_evaluate:
            self._evaluate_and_note_best()
        if self.control.should_save:
            self.save_checkpoint()
            self._notify("on_save")

    def _notify(self, event: str, **details: Any) -> None:
        handler: Any = self.callback_handler
        with distributed.raise_on_all_ranks(f"callbacks of {event} after step {self.state.global_step}"):
            self.control = getattr(handler, event)(self.args, self.state, self.control, **details)
        act_together(self.control)

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _log_steps(self) -> None:
        """Log the steps since the last line, if there are any. A collective call."""
        if not self.run.sums.steps:
            return
        metrics = self.run.sums.take()
        metrics |= self._drift.observe(metrics, self.state.global_step)
        self._reading.observe(metrics, self.state.global_step)
        payload = MetricsPayload("train", self.state.global_step, metrics).metrics
        # Nothing if a callback ended a resumed run at once: these steps are of the process before.
        trainer: dict[str, float] = {}
        for name, value in self._last_update.items():
            if value is not None:
                trainer[name] = float(value)  # waits for the device
        if lost := self.failed_writes():
            trainer[LOG_WRITES_FAILED] = lost
        self._log({"loss": payload.get("loss", 0.0), **trainer, **payload})

    def _log(self, line: dict[str, float]) -> None:
        if self.state.epoch is not None:
            line["epoch"] = self.state.epoch
        self.state.log_history.append({**line, "step": self.state.global_step})
        self._notify("on_log", logs=line)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Rollouts on the validation set → ``eval_rollout/*``; no figures if ``rollout_matching.eval_detection`` is
        off. A collective call."""
        assert self.eval_dataset is not None, "evaluation without custom.val_jsonl"
        started = time.perf_counter()
        figures: dict[str, float] = {}
        answers: Sequence[ImageAnswer] = ()
        if self.measured is not None:
            where = f"evaluation after step {self.state.global_step}"
            if self.run.queue is not None:
                self.run.queue.wait()  # the answers in progress need the weights before this push
            with (
                self._saving_on_error(where),
                phase("evaluation", f"the {where}"),
                distributed.raise_on_all_ranks(where),
                rollout_session(self.backend, self.state.global_step),
            ):
                answers = answer_dataset(
                    self.eval_dataset,
                    self.backend,
                    self.run.loaded.vocab,
                    seed=self.args.seed,
                    scorer=self.scorer,
                    on_progress=self._end_evaluation_on_signal,
                    on_answer=self.on_answer,
                )
                figures = summarise(answers, self.measured).figures
                is_first = not any("eval_rollout/f1" in line for line in self.state.log_history)
                figures |= self._ledger.rates(answers, is_first=is_first)
                if self._ledger.has_other_images:  # figures of other images compare with nothing
                    self._best.forget()
                if self.args.should_save:
                    write_answers(answers, Path(str(self.args.output_dir)) / LAST_EVALUATION)
        metrics = {f"eval_rollout/{name}": value for name, value in figures.items()}
        metrics["eval_time/runtime_s"] = time.perf_counter() - started
        self._log(dict(MetricsPayload("eval", self.state.global_step, metrics).metrics))
        self._notify("on_evaluate", metrics=metrics)
        if answers and (unknown := unknown_names(answers)) is not None:
            self.on_note(f"{unknown}; F1 counts them as wrong, f1_any_desc looks at their boxes alone")
        return metrics

    def _evaluate_and_note_best(self) -> None:
        metrics, step = self.evaluate(), self.state.global_step
        if not step:  # the start is not a checkpoint of the run
            return
        saved = self._saved[1] if self._saved is not None and self._saved[0] == step else None
        ends = self._ends_epoch() or self.control.should_training_stop
        follows = self.control.should_save or (self.args.save_strategy == "epoch" and ends)
        self._best.observe(metrics, saved, follows=follows)

    def _ends_epoch(self) -> bool:
        """Whether the last finished step is the last of an epoch, or of the run."""
        step = self.state.global_step
        return step % self.batches.steps_per_epoch == 0 or step >= self.state.max_steps

    def _end_evaluation_on_signal(self, done: int, total: int) -> None:
        """Between two batches of an evaluation, which changes nothing. In one process only: ranks must leave it
        together."""
        self.on_answer(done, total)
        if distributed.world_size() == 1 and (number := self._signal()) is not None:
            raise RunStopped("asked to end during an evaluation", number)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_model(self) -> None:
        """Write the model, its processor and all that was logged to the run's folder. A collective call. Raises
        TrainingDiverged for weights that are NaN or infinite."""
        self._check_weights("the model at the end")
        folder = Path(str(self.args.output_dir))
        save_final_model(self.run, folder, writes=self.args.should_save, last_saved=self.last_saved())

    def last_saved(self) -> str:
        """A sentence about the newest checkpoint."""
        if self._saved is None:
            return "Nothing of this run is saved"
        return f"Saved are the first {self._saved[0]} steps, in {self._saved[1]}"

    def to_continue(self, checkpoint: str | Path = "true") -> str:
        """How to continue from the newest checkpoint. ``checkpoint``: value of ``training.resume_from_checkpoint``."""
        if self._saved is not None and not self._resumable:
            return (
                f"start a new run with model.model: {self._saved[1]}, which holds the model alone "
                "(training.save_only_model: true)"
            )
        return f"start again with training.resume_from_checkpoint: {checkpoint}"

    def save_checkpoint(self) -> None:
        """Write the checkpoint of the finished steps, and delete old ones. A collective call. Raises TrainingDiverged
        for weights that are NaN or infinite, before a good checkpoint is deleted."""
        self._check_weights("a checkpoint")
        self.state.stateful_callbacks = callback_states(self.callback_handler.callbacks)
        folder = save_checkpoint(self.run, self.args, self.last_saved())
        self._saved, self._resumable = (self.state.global_step, folder), not self.args.save_only_model
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            delete_old(folder.parent, self.keep_checkpoints, newest=folder, best=None if best is None else Path(best))

    @contextmanager
    def _saving_on_error(self, what: str) -> Iterator[None]:
        """An error within it ends the run, after the steps before ``what`` are saved. Raises TrainingDiverged instead
        of an error that weights which are NaN or infinite caused; they are not saved.

        Nothing within it may change the weights. Its other changes are undone, so that a resumed run repeats it. A save
        is a collective call, so it needs an error that all ranks raise.
        """
        restore = self.run.snapshot()
        try:
            yield
        except TrainingDiverged as error:
            error.args = (f"{error}. {self.last_saved()}",)
            raise
        except RunStopped:
            if self.state.global_step and (self._saved is None or self._saved[0] != self.state.global_step):
                self.save_checkpoint()
            raise
        except Exception as error:
            restore()
            self._save_after(what, error)
            raise

    def _save_after(self, what: str, error: Exception) -> None:
        step = self.state.global_step
        if is_out_of_memory(error):
            _release_memory_of(error)
        together = distributed.is_every_ranks(error)
        if together:
            self._check_weights(what, error)
        if not step:
            return
        if not together:
            logger.error("rank %d: the other processes cannot be reached, so nothing more is saved", distributed.rank())
        elif self._saved is None or self._saved[0] != step:
            try:
                self.save_checkpoint()
            except Exception as unsaved:  # a further problem: `error` ends the run
                if distributed.is_main() or not distributed.is_every_ranks(unsaved):
                    logger.error(f"{what} failed, and the {step} steps before it cannot be saved: {unsaved}")
        # The line on memory that ran out says where the checkpoint is.
        if self._saved is not None and distributed.is_main() and not is_out_of_memory(error):
            saved, folder = self._saved
            logger.error(
                f"{what} failed after {step} steps; the first {saved} are saved. To continue, fix the cause and "
                f"{self.to_continue(folder)}"
            )

    def _check_weights(self, what: str, error: Exception | None = None) -> None:
        """Raise TrainingDiverged for weights that are NaN or infinite on any rank. A collective call."""
        if distributed.all_reduce([broken_weight(self.model) is not None], "max")[0]:
            raise TrainingDiverged(
                f"{what}: the weights are NaN or infinite after {self.state.global_step} steps; "
                f"{TrainingDiverged.ADVICE}. {self.last_saved()}"
            ) from error

    def close(self) -> None:
        """End the loader processes and release the rollout engine."""
        self.batches.close()
        self.backend.close()


def _mean_loss(state: TrainerState) -> float:
    """The mean loss of the logged steps, those before a resume included."""
    total, covered = 0.0, 0
    for line in state.log_history:
        if "loss" in line:  # the mean of the steps since the line before
            total, covered = total + (line["step"] - covered) * line["loss"], int(line["step"])
    return total / max(1, covered)


def _release_memory_of(error: BaseException) -> None:
    """Let go of the activations that the frames of ``error`` hold: the save that follows may need that memory."""
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
