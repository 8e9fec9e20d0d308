"""Saving and resuming: the part of the trainer that writes checkpoints and goes on from them."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from coordexp import distributed
from coordexp.data.files import write_atomically
from coordexp.data.preparation import write_preparation
from coordexp.errors import CheckpointError, RunStopped, TrainingDiverged
from coordexp.metrics import MetricSums
from coordexp.modeling.adapter import has_adapter, load_adapter, save_adapter
from coordexp.modeling.load import LoadedModel
from coordexp.packing import CarryBuffer
from coordexp.training.ahead import AskedWindow, RolloutsAhead
from coordexp.training.checkpoint import checkpoint_folder, delete_old, readable, writing
from coordexp.training.offload import held_by
from coordexp.training.seal import read_seal, seal_checkpoint
from coordexp.training.waiting_files import WaitingRollouts, save_answers, save_carry_buffer


@dataclass(frozen=True, slots=True)
class StepStart:
    """Segments and answers that wait, the log line under way, and random states, as a step found them."""

    buffer: dict[str, Any] | None
    sums: dict[str, Any]
    loss: torch.Tensor | None
    python_state: Any
    numpy_state: Any
    torch_state: torch.Tensor
    device_state: torch.Tensor | None
    window: AskedWindow | WaitingRollouts | None = None

    @staticmethod
    def snapshot(
        buffer: CarryBuffer | None, sums: MetricSums, loss: torch.Tensor | None, ahead: RolloutsAhead | None
    ) -> StepStart:
        """What a step changes before it is finished, as it is now: copies, not views."""
        return StepStart(
            None if buffer is None else buffer.state_dict(),
            sums.state_dict(),
            None if loss is None else loss.detach().clone(),
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            None if ahead is None else ahead.window,
        )

    def restore(
        self, buffer: CarryBuffer | None, sums: MetricSums, loss: torch.Tensor | None, ahead: RolloutsAhead | None
    ) -> None:
        """Put everything back; ``loss`` is written to in place."""
        if buffer is not None and self.buffer is not None:
            buffer.load_state_dict(self.buffer)
        if ahead is not None:
            ahead.window = self.window
        sums.load_state_dict(self.sums)
        if loss is not None and self.loss is not None:
            loss.detach().copy_(self.loss)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(self.torch_state)
        if self.device_state is not None:
            torch.cuda.set_rng_state(self.device_state)


logger = logging.getLogger("coordexp")


class SavingTrainer(Trainer):
    """transformers' Trainer, whose checkpoints hold what waits on every rank (segments for a packed row, answers for
    the next step, figures for a log line), count once they are whole, and are written too when an error ends the run.

    ``sums``: what this rank has to say about the steps of the log line under way.
    """

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        buffer: CarryBuffer | None,
        ahead: RolloutsAhead | None = None,
        keep_checkpoints: int | None = None,
        **kwargs: Any,
    ) -> None:
        """``keep_checkpoints``: as ``training.save_total_limit``, which transformers would apply before the new
        checkpoint is whole; None keeps all."""
        super().__init__(model=loaded.model, **kwargs)
        self.sums = MetricSums()
        self._loaded = loaded
        self._buffer = buffer
        self._ahead = ahead
        self._keep_checkpoints = keep_checkpoints
        self._resumes_from: Path | None = None
        self._step_start: StepStart | None = None
        self._saved: tuple[int, Path] | None = None  # the last whole checkpoint of this run: its step and folder

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As transformers' own; ``resume_from_checkpoint`` is a whole checkpoint's folder."""
        if resume_from_checkpoint is not None:
            self._resumes_from = Path(resume_from_checkpoint)
            self._saved = (read_seal(self._resumes_from).step, self._resumes_from)
            with readable(self._resumes_from, TRAINER_STATE_NAME):  # transformers reads it twice, and late
                TrainerState.load_from_json(str(self._resumes_from / TRAINER_STATE_NAME))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    # -- saving --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note what the step changes before it changes the weights."""
        self._step_start = StepStart.snapshot(self._buffer, self.sums, self._loss_of_line(), self._ahead)

    @contextmanager
    def saving_before_giving_up(self, what: str) -> Iterator[None]:
        """An error within it ends the run, and what was learned before ``what`` is saved first.

        Nothing of ``what`` may have changed the weights. What else the step changed becomes again what it was: a resume
        does the same step again. A save is a collective call, so it takes an error that every rank has alike; what may
        fail within must stand in :func:`distributed.raise_on_all_ranks`.

        Raises:
            TrainingDiverged: in place of what a library says of weights that are NaN or infinite, which are not saved.
        """
        try:
            yield
        except TrainingDiverged:
            raise
        except RunStopped:
            if self.state.global_step and (self._saved is None or self._saved[0] != self.state.global_step):
                self._save_checkpoint(self._loaded.model, None)
            raise
        except Exception as error:
            if self._step_start is not None:
                self._step_start.restore(self._buffer, self.sums, self._loss_of_line(), self._ahead)
            self._loaded.model.zero_grad(set_to_none=True)  # a save may need the memory
            self._save_what_was_learned(what, error)
            raise

    def _save_what_was_learned(self, what: str, error: Exception) -> None:
        step = self.state.global_step
        together = distributed.is_every_ranks(error)
        if together and distributed.all_reduce([float(_is_broken(self._loaded.model))], "max")[0]:
            raise TrainingDiverged(
                f"{what}: the weights are NaN or infinite after {step} steps; {TrainingDiverged.ADVICE}. "
                f"{self.last_saved()}"
            ) from error
        if not step:
            return
        if together:
            if self._saved is None or self._saved[0] != step:
                self._save_checkpoint(self._loaded.model, None)
        else:
            logger.error("rank %d: the processes have lost each other, so nothing more is saved", distributed.rank())
        if self._saved is not None and distributed.is_main():
            logger.error(
                "%s failed after %d steps; the first %d are saved. To go on, mend the cause and start again with "
                "training.resume_from_checkpoint: %s",
                what,
                step,
                *self._saved,
            )

    def last_saved(self) -> str:
        """A sentence about what is on the disk."""
        if self._saved is None:
            return "Nothing of this run is saved"
        return f"Saved are the first {self._saved[0]} steps, in {self._saved[1]}"

    def _loss_of_line(self) -> torch.Tensor | None:
        return getattr(self, "_tr_loss", None)  # transformers makes it with the first step

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step = self.state.global_step
        folder = checkpoint_folder(str(self.args.output_dir), step)
        answers = self._waiting_answers()
        with distributed.raise_on_all_ranks(f"making room for {folder}"):
            if self.args.should_save and folder.exists():
                shutil.rmtree(folder)  # left unfinished, or of an earlier run: its files would mix with the new ones
        with self._told_of_the_disk(folder):
            with distributed.raise_on_all_ranks(f"saving to {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                if self._buffer is not None:
                    save_carry_buffer(self._buffer, folder)
                if answers is not None:
                    save_answers(answers, folder)
                self._save_log_line(folder)
            # Sharded, all ranks write in turns that one alone cannot leave; otherwise each writes its own.
            sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            with nullcontext() if sharded else distributed.raise_on_all_ranks(f"saving to {folder}"):
                super()._save_checkpoint(model, trial)
            seal_checkpoint(
                folder,
                step,
                resumable=not self.args.save_only_model,
                writes=self.args.should_save,
                shared=not self.args.save_on_each_node,
            )
        self._saved = (step, folder)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            delete_old(folder.parent, self._keep_checkpoints, newest=folder, best=None if best is None else Path(best))

    def _waiting_answers(self) -> WaitingRollouts | None:
        """The answers for the next step, once they are there; None where any rank has none."""
        if self._ahead is None:
            return None
        self._ahead.finish()
        answers = self._ahead.waiting()
        none_on_a_rank = distributed.all_reduce([float(answers is None)], "max")[0]
        return None if none_on_a_rank else answers

    def _told_of_the_disk(self, folder: Path) -> AbstractContextManager[None]:
        tensors = {id(one): one for one in (*self._loaded.model.parameters(), *held_by(self.optimizer))}
        needed = sum(one.numel() * one.element_size() for one in tensors.values())
        return writing(folder, needed, self.last_saved())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if not has_adapter(self._loaded.model):
            if state_dict is not None and self._loaded.model.config.tie_word_embeddings:
                # Gathered from shards, a tied head is a tensor of its own, which no plain checkpoint holds.
                ties = self._loaded.model.all_tied_weights_keys or {}
                state_dict = {name: value for name, value in state_dict.items() if name not in ties}
            super()._save(output_dir, state_dict)
            write_preparation(self._loaded.preparation, folder)
            return
        save_adapter(self._loaded.model, folder, state_dict)
        self._loaded.processor.save_pretrained(folder)
        write_preparation(self._loaded.preparation, folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    # -- the log line under way ----------------------------------------------------------------------------------------

    def _save_log_line(self, folder: Path) -> None:
        loss: Any = self._tr_loss
        line = {
            **self.sums.state_dict(),
            "loss": loss.item(),
            "last_logged_step": self._globalstep_last_logged,
        }
        write_atomically(_log_line_path(folder), json.dumps(line))

    def restore_log_line(self) -> None:
        """After a resume, before the first step: the next line covers all steps since the last one, as it would have.

        transformers starts its own sum anew, and only just before the first step. Written by another number of
        processes, the line cannot be shared out, and covers the steps since the resume.
        """
        checkpoint, self._resumes_from = self._resumes_from, None
        if checkpoint is None or read_seal(checkpoint).world_size != distributed.world_size():
            return
        with readable(checkpoint, _log_line_path(checkpoint).name):
            line = json.loads(_log_line_path(checkpoint).read_text(encoding="utf-8"))
            self._tr_loss += line.pop("loss")
            self._globalstep_last_logged = line.pop("last_logged_step")
            self.sums.load_state_dict(line)

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with readable(folder, "config.json", "model.safetensors"):
            if has_adapter(self._loaded.model) and not self.is_fsdp_enabled:  # FSDP saves and loads all, sharded
                load_adapter(self._loaded.model, folder)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable(Path(checkpoint or "."), "optimizer.pt", "scheduler.pt"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable(Path(checkpoint or "."), "rng_state.pth"):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if has_adapter(self._loaded.model) and not self.is_fsdp_enabled:
            load_adapter(self._loaded.model, Path(str(self.state.best_model_checkpoint)))
        else:
            super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """transformers warns of a tied language head, which no file holds, and no more than warns of a real gap."""
        missing = sorted(set(load_result.missing_keys) - set(self._loaded.model.all_tied_weights_keys or {}))
        if missing or load_result.unexpected_keys:
            raise CheckpointError(
                f"the checkpoint to resume from is of another model: {len(missing)} weights are missing "
                f"{missing[:1]}, {len(load_result.unexpected_keys)} unknown {load_result.unexpected_keys[:1]}; resume "
                "with the model.model that it was trained from"
            )


def _is_broken(model: torch.nn.Module) -> bool:
    """Whether a weight that is here is NaN or infinite; of a sharded one, this rank's part."""
    for weight in model.parameters():
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        if not bool(torch.isfinite(local).all()):
            return True
    return False


def _log_line_path(folder: Path) -> Path:
    return folder / f"log_line_rank{distributed.rank()}.json"
