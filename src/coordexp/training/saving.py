"""Writes a checkpoint of a run, and loads one back: weights, optimizer, schedule, progress, random states, and what is
pending between two steps (carry buffer, answers one step ahead, the log line under way)."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from coordexp import distributed
from coordexp.data.files import write_atomically
from coordexp.data.preparation import write_preparation
from coordexp.errors import CheckpointError
from coordexp.modeling.adapter import has_adapter, load_adapter, save_adapter
from coordexp.training.answers import SavedAnswers
from coordexp.training.checkpoint import checkpoint_folder, is_complete, readable, writing
from coordexp.training.offload import held_by
from coordexp.training.pending_state import save_answers, save_carry_buffer
from coordexp.training.seal import read_seal, seal_checkpoint
from coordexp.training.state import RunState, random_states, set_random_states

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"


def save_checkpoint(run: RunState, args: TrainingArguments, last_saved: str) -> Path:
    """Write the checkpoint of the finished steps, and seal it once all of it is on the disk. A collective call.

    Args:
        last_saved: a sentence about the newest checkpoint there is, for errors.

    Raises:
        CheckpointError: it cannot be written; on all ranks.
    """
    step = run.progress.global_step
    folder = checkpoint_folder(str(args.output_dir), step)
    answers = _answers_on_all_ranks(run)
    with distributed.raise_on_all_ranks(f"making room for {folder}"):
        if args.should_save and folder.exists():
            shutil.rmtree(folder)  # left unfinished, or of an earlier run: its files would mix with the new ones
    tensors = {id(one): one for one in (*run.loaded.model.parameters(), *held_by(run.optimizer))}
    needed_bytes = sum(one.numel() * one.element_size() for one in tensors.values())
    with writing(folder, needed_bytes, last_saved):
        with distributed.raise_on_all_ranks(f"saving to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if run.buffer is not None:
                save_carry_buffer(run.buffer, folder)
            if answers is not None:
                save_answers(answers, folder)
            write_atomically(_log_line(folder), json.dumps(run.sums.state_dict()))
        # Sharded ranks write in turns that one alone cannot leave; otherwise each writes its own.
        with nullcontext() if run.shards else distributed.raise_on_all_ranks(f"saving to {folder}"):
            save_model(run, folder, writes=args.should_save)
            if not args.save_only_model:
                _save_optimizer(run, folder, args)
                torch.save(random_states(), folder / _random_file())
            _note_best(run.progress, args, folder)
            if args.should_save:
                run.progress.save_to_json(str(folder / TRAINER_STATE_NAME))
        seal_checkpoint(
            folder,
            step,
            resumable=not args.save_only_model,
            writes=args.should_save,
            shared=not args.save_on_each_node,
        )
    return folder


def save_model(run: RunState, folder: Path, *, writes: bool) -> None:
    """The model, or its adapter, with its processor. A collective call if the model is sharded.

    ``writes``: whether this rank writes; of a sharded model every rank gives its part.
    """
    state_dict = None
    if run.is_fsdp:
        if "FULL_STATE_DICT" not in str(run.accelerator.state.fsdp_plugin.state_dict_type):
            return  # shards are written with the optimizer's
        state_dict = run.accelerator.get_state_dict(run.model)
    elif run.is_deepspeed:
        state_dict = run.accelerator.get_state_dict(run.model)
    if not writes:
        return
    model, processor = run.loaded.model, run.loaded.processor
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(model):
        save_adapter(model, folder, state_dict)
    else:
        if state_dict is not None and model.config.tie_word_embeddings:
            # Gathered from shards, a tied head is a tensor of its own, which no plain checkpoint holds.
            ties = model.all_tied_weights_keys or {}
            state_dict = {name: value for name, value in state_dict.items() if name not in ties}
        model.save_pretrained(folder, state_dict=state_dict)
    processor.save_pretrained(folder)
    write_preparation(run.loaded.preparation, folder)


def load_weights(run: RunState, folder: Path) -> None:
    """The weights, or the adapter, of a checkpoint into the run's model.

    Raises:
        CheckpointError: they are unreadable, or of another model.
    """
    with readable(folder, "config.json", SAFETENSORS):
        if (folder / "config.json").is_file():  # not needed here; but no checkpoint with a broken one is resumed from
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if run.is_fsdp:
            from accelerate.utils import load_fsdp_model

            load_fsdp_model(
                run.accelerator.state.fsdp_plugin, run.accelerator, run.model, str(folder), adapter_only=True
            )
        elif run.is_deepspeed:
            from transformers.integrations.deepspeed import deepspeed_load_checkpoint

            deepspeed_load_checkpoint(run.model, str(folder), load_module_strict=not has_adapter(run.loaded.model))
        elif has_adapter(run.loaded.model):
            load_adapter(run.loaded.model, folder)
        else:
            index = folder / SAFETENSORS_INDEX
            weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {"": SAFETENSORS}
            state_dict: dict[str, torch.Tensor] = {}
            for name in sorted(set(weight_map.values())):
                state_dict |= load_file(folder / name)
            result = run.loaded.model.load_state_dict(state_dict, strict=False)
            # No file holds a tied language head; a missing weight of any other name is a real gap.
            missing = sorted(set(result.missing_keys) - set(run.loaded.model.all_tied_weights_keys or {}))
            if missing or result.unexpected_keys:
                raise CheckpointError(
                    f"the checkpoint to resume from is of another model: {len(missing)} weights are missing "
                    f"{missing[:1]}, {len(result.unexpected_keys)} unknown {result.unexpected_keys[:1]}; resume with "
                    "the model.model that it was trained from"
                )


def load_progress(folder: Path) -> TrainerState:
    """Steps, log history and best metric of a checkpoint."""
    with readable(folder, TRAINER_STATE_NAME):
        progress = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    best = progress.best_model_checkpoint
    if best is not None and not Path(best).is_dir():
        progress.best_model_checkpoint = None
    return progress


def load_optimizer(run: RunState, folder: Path) -> None:
    """Optimizer, schedule and gradient scaler of a checkpoint into the run's prepared ones."""
    with readable(folder, OPTIMIZER_NAME, SCHEDULER_NAME):
        if run.is_fsdp:
            from accelerate.utils import load_fsdp_optimizer

            load_fsdp_optimizer(
                run.accelerator.state.fsdp_plugin,
                run.accelerator,
                run.optimizer,
                run.model,
                str(folder),
                adapter_only=True,
            )
        elif not run.is_deepspeed:  # whose engine loads its optimizer with the weights
            # On one device via main memory: on it, old and new state would need room at the same time.
            several = distributed.world_size() > 1 and run.accelerator.device.type != "cpu"
            device = run.accelerator.device if several else "cpu"
            state = torch.load(folder / OPTIMIZER_NAME, map_location=device, weights_only=True)
            run.optimizer.load_state_dict(state)
        run.scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        if (folder / SCALER_NAME).is_file() and run.accelerator.scaler is not None:
            run.accelerator.scaler.load_state_dict(torch.load(folder / SCALER_NAME, weights_only=True))


def load_rank_state(run: RunState, folder: Path) -> None:
    """This rank's random states, and its metrics of the log line under way, which then covers all steps since the last
    one. Another number of processes cannot share them out: such a run starts both anew."""
    if read_seal(folder).world_size != distributed.world_size():
        return
    with readable(folder, _log_line(folder).name):
        run.sums.load_state_dict(json.loads(_log_line(folder).read_text(encoding="utf-8")))
    with readable(folder, _random_file()):
        set_random_states(torch.load(folder / _random_file(), weights_only=True))


def has_broken_weight(model: torch.nn.Module) -> bool:
    """Whether a weight is NaN or infinite; of a sharded one, this rank's part."""
    for weight in model.parameters():
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        if not bool(torch.isfinite(local).all()):
            return True
    return False


def _save_optimizer(run: RunState, folder: Path, args: TrainingArguments) -> None:
    if run.is_deepspeed:
        run.model.save_checkpoint(str(folder))
    elif run.is_fsdp:
        from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

        plugin, accelerator = run.accelerator.state.fsdp_plugin, run.accelerator
        save_fsdp_model(plugin, accelerator, run.model, str(folder), adapter_only=True)
        save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))
    elif args.should_save:
        torch.save(run.optimizer.state_dict(), folder / OPTIMIZER_NAME)
    if args.should_save:
        torch.save(run.scheduler.state_dict(), folder / SCHEDULER_NAME)
        if run.accelerator.scaler is not None:
            torch.save(run.accelerator.scaler.state_dict(), folder / SCALER_NAME)


def _note_best(progress: TrainerState, args: TrainingArguments, folder: Path) -> None:
    if progress.best_global_step:
        best = checkpoint_folder(str(args.output_dir), progress.best_global_step)
        if best == folder or is_complete(best):
            progress.best_model_checkpoint = str(best)


def _answers_on_all_ranks(run: RunState) -> SavedAnswers | None:
    """The answers for the next step, once they are there; None where any rank has none."""
    if run.queue is None or not run.queue.ahead:
        return None
    run.queue.wait()
    answers = run.queue.saved()
    none_on_a_rank = distributed.all_reduce([float(answers is None)], "max")[0]
    return None if none_on_a_rank else answers


def _log_line(folder: Path) -> Path:
    return folder / f"log_line_rank{distributed.rank()}.json"


def _random_file() -> str:
    return "rng_state.pth" if distributed.world_size() == 1 else f"rng_state_{distributed.rank()}.pth"
