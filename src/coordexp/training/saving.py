"""Saves and loads checkpoints of a run: weights, optimizer, schedule, progress, random states, and the state between
two steps (carry buffer, answers for the next step, sums of the unfinished log line)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from coordexp import distributed
from coordexp.checkpoints.card import write_card
from coordexp.checkpoints.folder import MODEL_WEIGHTS, RESOLVED_CONFIG, weight_files
from coordexp.checkpoints.run_folder import MANIFEST, model_files_in
from coordexp.config import RunConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.files import flush_file, give_ordinary_mode, write_atomically
from coordexp.errors import CheckpointError, DataError
from coordexp.modeling.adapter import has_adapter, load_adapter, save_adapter
from coordexp.out_of_memory import phase
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment, TrainingTarget, from_json, to_json
from coordexp.training.best import note_best
from coordexp.training.checkpoint import checkpoint_folder, is_complete, read_seal, readable, seal_checkpoint, writing
from coordexp.training.offload import held_by
from coordexp.training.state import RunState, random_states, set_random_states
from coordexp.training.step_answers import RolloutQueue, SavedAnswers


@phase("saving", "saving a checkpoint")
def save_checkpoint(run: RunState, args: TrainingArguments, last_saved: str) -> Path:
    """Write the checkpoint of the finished steps, and seal it when everything is on the disk. A collective call.

    ``last_saved``: a sentence about the newest finished checkpoint, for error messages. Raises CheckpointError on all
    ranks."""
    step = run.progress.global_step
    folder = checkpoint_folder(str(args.output_dir), step)
    answers = _answers_on_all_ranks(run)
    with distributed.raise_on_all_ranks(f"making room for {folder}"):
        if args.should_save and folder.exists():
            shutil.rmtree(folder)  # left unfinished, or of an earlier run: its files would mix with the new ones
    with writing(folder, _bytes_of([*run.loaded.model.parameters(), *held_by(run.optimizer)]), last_saved):
        with distributed.raise_on_all_ranks(f"saving to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if run.buffer is not None:
                save_carry_buffer(run.buffer, folder)
            if answers is not None:
                save_answers(answers, folder)
            write_atomically(_rank_file(folder, "log_line"), json.dumps(run.sums.state_dict()))
        with run.together(f"saving to {folder}"):
            if args.save_only_model or not run.saves_shards:
                save_model(run, folder, writes=args.should_save)
            if not args.save_only_model:
                _save_optimizer(run, folder, args)
                torch.save(random_states(), folder / _random_file())
            note_best(run.progress, args, folder)
            if args.should_save:
                run.progress.save_to_json(str(folder / TRAINER_STATE_NAME))
                for name in (RESOLVED_CONFIG, MANIFEST):  # for a resume: a later start writes others there
                    if (written := folder.parent / name).is_file():
                        shutil.copyfile(written, folder / name)
        if run.shards:
            distributed.barrier()  # a rank that is not done has files under temporary names, which no seal may list
        seal_checkpoint(folder, step, resumable=not args.save_only_model, writes=args.should_save)
    return folder


def save_final_model(run: RunState, folder: Path, *, writes: bool, last_saved: str) -> None:
    """Write the model, its processor and all that was logged, to the run's folder. A collective call.

    ``last_saved``: a sentence about the newest checkpoint. Raises CheckpointError on all ranks if the disk is full or
    cannot be written; half a model is removed then, because the run would look finished, and a resumed run writes it.
    After a power loss, too, the model is whole, or the run is not finished.
    """
    model = run.loaded.model
    trained = [one for one in model.parameters() if one.requires_grad or not has_adapter(model)]
    where = f"saving the model to {folder}"
    with run.together(where), writing(folder, _bytes_of(trained), last_saved, "the model"):
        try:
            save_model(run, folder, writes=writes)
            if writes:
                # By the trainer state the run counts as finished, so it comes after the disk holds all others.
                for path in (*(one for one in folder.iterdir() if one.is_file()), folder):
                    flush_file(path)
                state = json.dumps(asdict(run.progress), indent=2, sort_keys=True)
                write_atomically(folder / TRAINER_STATE_NAME, state + "\n")
        except BaseException:
            for file in model_files_in(folder) if writes else ():
                file.unlink(missing_ok=True)
            raise


@phase("saving", "saving the model")
def save_model(run: RunState, folder: Path, *, writes: bool) -> None:
    """The model, or its adapter, with its processor and card. A collective call if the model is sharded: the rank that
    writes gathers it in main memory.

    ``writes``: whether this rank writes.
    """
    state_dict = None
    if run.shards:
        state_dict = run.accelerator.get_state_dict(run.model)
    if not writes:
        return
    model, processor = run.loaded.model, run.loaded.processor
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(model):
        save_adapter(model, folder, state_dict)
    else:
        if state_dict is not None and model.config.tie_word_embeddings:
            # A tied head gathered from shards is a separate tensor, which an ordinary checkpoint does not contain.
            ties = model.all_tied_weights_keys or {}
            state_dict = {name: value for name, value in state_dict.items() if name not in ties}
        model.save_pretrained(folder, state_dict=state_dict)
        give_ordinary_mode(folder)
    processor.save_pretrained(folder)
    write_card(run.loaded.card, folder)


def load_weights(run: RunState, folder: Path) -> None:
    """Load a checkpoint's weights or adapter into the model. Raises CheckpointError if they are unreadable, or of
    another model."""
    with readable(folder, MODEL_WEIGHTS):
        if run.is_fsdp:
            plugin = run.accelerator.state.fsdp_plugin
            load_fsdp_model(plugin, run.accelerator, run.model, str(folder), adapter_only=True)
        elif run.is_deepspeed:
            from transformers.integrations.deepspeed import deepspeed_load_checkpoint

            deepspeed_load_checkpoint(run.model, str(folder), load_module_strict=not has_adapter(run.loaded.model))
        elif has_adapter(run.loaded.model):
            load_adapter(run.loaded.model, folder)
        else:
            state_dict: dict[str, torch.Tensor] = {}
            for name in weight_files(folder):
                state_dict |= load_file(folder / name)
            result = run.loaded.model.load_state_dict(state_dict, strict=False)
            # A tied language head is in no file; any other missing weight is an error.
            missing = sorted(set(result.missing_keys) - set(run.loaded.model.all_tied_weights_keys or {}))
            if missing or result.unexpected_keys:
                raise CheckpointError(
                    f"the checkpoint to resume from is of another model: {len(missing)} weights are missing "
                    f"{missing[:1]}, {len(result.unexpected_keys)} unknown {result.unexpected_keys[:1]}; resume with "
                    "the model.model that it was trained from"
                )


def load_progress(folder: Path) -> TrainerState:
    """Steps, log history and best metric of a checkpoint, without a best checkpoint that is gone or incomplete."""
    with readable(folder, TRAINER_STATE_NAME):
        progress = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    best = progress.best_model_checkpoint
    if best is not None and not is_complete(Path(best)):
        progress.best_model_checkpoint = None
    return progress


# Attributes of schedules by a metric that the configuration sets; a checkpoint has them too.
_SCHEDULE_SETTINGS = (
    *("mode", "mode_worse", "factor", "patience", "threshold", "threshold_mode", "cooldown", "warmup", "eps"),
    *("min_lrs", "max_lrs", "smooth", "reset_start_original", "_init_lrs"),
)


def load_optimizer(run: RunState, folder: Path) -> None:
    """Load a checkpoint's optimizer, schedule and gradient scaler into those of the run. Learning rates and other
    settings of parameter groups stay as configured: a run may be resumed with other values."""
    configured = [dict(group, params=None) for group in run.optimizer.param_groups]
    base_lrs = list(getattr(run.scheduler, "base_lrs", ()))
    settings = {name: value for name, value in vars(run.scheduler).items() if name in _SCHEDULE_SETTINGS}
    with readable(folder, OPTIMIZER_NAME, SCHEDULER_NAME):
        if run.is_fsdp:
            plugin, accelerator = run.accelerator.state.fsdp_plugin, run.accelerator
            load_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder), adapter_only=True)
        elif not run.is_deepspeed:  # load_weights has loaded DeepSpeed's optimizer too
            # On a single device, load via main memory: the device has no room for the old and the new state at once.
            several = distributed.world_size() > 1 and run.accelerator.device.type != "cpu"
            device = run.accelerator.device if several else "cpu"
            state = torch.load(folder / OPTIMIZER_NAME, map_location=device, weights_only=True)
            run.optimizer.load_state_dict(state)
        run.scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        vars(run.scheduler).update(settings)
        if (folder / SCALER_NAME).is_file() and run.accelerator.scaler is not None:
            run.accelerator.scaler.load_state_dict(torch.load(folder / SCALER_NAME, weights_only=True))
    if not run.is_deepspeed:
        for group, wanted in zip(run.optimizer.param_groups, configured, strict=True):
            # A rate is its peak times the schedule's factor, which is kept: scale the rate by new peak / saved peak.
            saved, peak = group.get("initial_lr"), wanted.get("initial_lr")
            if saved is not None and peak is not None and saved != peak:
                group["lr"], group["initial_lr"] = (group["lr"] / saved * peak if saved else peak), peak
            group |= {name: wanted[name] for name in ("betas", "eps", "weight_decay") if name in wanted}
        if base_lrs:
            run.scheduler.base_lrs = base_lrs
        # A longer run has another schedule: its next step has that schedule's rate, not the one that was saved.
        if isinstance(run.scheduler, LambdaLR):
            for group, factor in zip(run.optimizer.param_groups, run.scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(run.scheduler.last_epoch)


def load_rank_state(run: RunState, folder: Path) -> None:
    """This rank's random states, and its metrics of the unfinished log line. With another number of processes both
    are reset."""
    if read_seal(folder).world_size != distributed.world_size():
        return
    with readable(folder, _rank_file(folder, "log_line").name):
        run.sums.load_state_dict(json.loads(_rank_file(folder, "log_line").read_text(encoding="utf-8")))
    with readable(folder, _random_file()):
        set_random_states(torch.load(folder / _random_file(), weights_only=True))


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    distinct = {id(one): one for one in tensors}  # tied weights count once
    return sum(one.numel() * one.element_size() for one in distinct.values())


def _save_optimizer(run: RunState, folder: Path, args: TrainingArguments) -> None:
    if run.is_deepspeed:
        run.model.save_checkpoint(str(folder))
    elif run.is_fsdp:
        plugin, accelerator = run.accelerator.state.fsdp_plugin, run.accelerator
        save_fsdp_model(plugin, accelerator, run.model, str(folder), adapter_only=True)
        save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))
    elif args.should_save:
        torch.save(run.optimizer.state_dict(), folder / OPTIMIZER_NAME)
    if args.should_save:
        torch.save(run.scheduler.state_dict(), folder / SCHEDULER_NAME)
        if run.accelerator.scaler is not None:
            torch.save(run.accelerator.scaler.state_dict(), folder / SCALER_NAME)


def _answers_on_all_ranks(run: RunState) -> SavedAnswers | None:
    if run.queue is None or not run.queue.ahead:
        return None
    run.queue.wait()
    answers = run.queue.saved()
    none_on_a_rank = distributed.all_reduce([answers is None], "max")[0]
    return None if none_on_a_rank else answers


def _rank_file(folder: Path, content: str) -> Path:
    return folder / f"{content}_rank{distributed.rank()}.json"


def _random_file() -> str:
    return "rng_state.pth" if distributed.world_size() == 1 else f"rng_state_{distributed.rank()}.pth"


# Fields of a target that are arrays: number type, shape.
_ARRAYS = {
    "roles_T": (np.uint8, (-1,)),
    "coord_pos_K": (np.int64, (-1,)),
    "coord_bin_K": (np.float64, (-1,)),
    "box_pos_M4": (np.int64, (-1, 4)),
    "box_bin_M4": (np.float64, (-1, 4)),
}


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """A segment without its image tensors; floats survive JSON exactly."""
    saved = {"sample_id": segment.sample_id, "prompt_token_ids": segment.prompt_token_ids, "target": segment.target}
    return json.loads(to_json(saved | {"shades": _shades(segment.model_inputs)}))


def segment_from_json(data: Mapping[str, Any], encode: Callable[[str], RolloutRequest]) -> Segment:
    """Rebuild a segment; ``encode`` returns the prompt and image tensors of a sample id. Raises CheckpointError if the
    prompt or the image differs from the saved one."""
    target, request = data["target"], encode(data["sample_id"])
    if list(request.prompt_token_ids) != data["prompt_token_ids"]:
        raise CheckpointError(
            f"{data['sample_id']}: its prompt changed since the checkpoint was written; resume with the same data, "
            "template and processor, or start a new run"
        )
    now = _shades(request.model_inputs)
    saved = data.get("shades", now)  # an earlier version saved none
    if len(saved) != len(now) or any(abs(one - other) > _SAME for one, other in zip(saved, now, strict=True)):
        raise CheckpointError(
            f"{data['sample_id']}: its image changed since the checkpoint was written; resume with the same data and "
            "images, or start a new run"
        )
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in target.items()}
    for name, (dtype, shape) in _ARRAYS.items():
        read[name] = np.array(target[name], dtype=dtype).reshape(shape)
    read["weights"] = {term: np.array(values, dtype=np.float32) for term, values in target["weights"].items()}
    prompt_token_ids = tuple(data["prompt_token_ids"])
    return Segment(data["sample_id"], prompt_token_ids, TrainingTarget(**read), request.model_inputs)


_SAME = 2.0  # grey levels: another version of a library may resize by one level differently


def _shades(inputs: Mapping[str, Any]) -> list[float]:
    """The mean of each of up to sixteen parts of a segment's image, 0 to 255, by which it is known again: other images
    of its size have the same prompt."""
    pixels = inputs.get("pixel_values")
    return [] if pixels is None else [round(float(part.float().mean()), 2) for part in pixels.chunk(16)]


def save_carry_buffer(buffer: CarryBuffer, folder: Path) -> None:
    """Write this rank's waiting segments to a checkpoint folder."""
    write_atomically(_rank_file(folder, "carry_buffer"), json.dumps([segment_to_json(s) for s in buffer.segments]))


def load_carry_buffer(buffer: CarryBuffer, checkpoint: Path, encode: Callable[[str], RolloutRequest]) -> None:
    """Restore ``buffer`` from ``checkpoint``. Raises CheckpointError if it has no readable buffer for this rank;
    DataError if a waiting sample is no longer in the dataset."""
    path = _rank_file(checkpoint, "carry_buffer")
    with readable(checkpoint, path.name):
        segments = [segment_from_json(data, encode) for data in json.loads(path.read_text(encoding="utf-8"))]
    buffer.load_state_dict({"segments": segments})


def save_answers(answers: SavedAnswers, folder: Path) -> None:
    """Write this rank's waiting answers to a checkpoint folder."""
    write_atomically(_rank_file(folder, "waiting_answers"), to_json(answers).decode())


def load_answers(checkpoint: Path) -> SavedAnswers | None:
    """This rank's answers for the step after ``checkpoint``; None if it has none. Raises CheckpointError if the file is
    unreadable."""
    path = _rank_file(checkpoint, "waiting_answers")
    if not path.is_file():
        return None
    try:
        return from_json(SavedAnswers, path.read_bytes(), "a step's answers", path=path)
    except DataError as error:
        raise CheckpointError(f"{error}; resume from an older checkpoint") from error


def build_buffer(config: RunConfig, train: RecordDataset, resume: Path | None) -> CarryBuffer | None:
    """The carry buffer as ``resume`` left it; None without packing. Raises as :func:`load_carry_buffer`."""
    if not config.training.packing:
        return None
    buffer = CarryBuffer(config.global_max_length, config.training.packing_buffer)
    if resume is not None:
        load_carry_buffer(buffer, resume, train.request_of)
    return buffer


def restore_answers(queue: RolloutQueue | None, resume: Path | None) -> None:
    """Give ``queue`` the answers that the checkpoint ``resume`` has for its next step. Warns if they are unused because
    ``rollout_matching.rollouts_ahead`` is 0 now. Raises as :func:`load_answers`."""
    if resume is None or read_seal(resume).world_size != distributed.world_size():
        return
    answers = load_answers(resume)
    if queue is not None and queue.ahead:
        queue.content = answers
    elif answers is not None:
        distributed.warn(
            f"{resume} has answers for its next step, which stay unused: rollout_matching.rollouts_ahead is 0 now"
        )
