"""A checked configuration → the model and its trainer; and a whole run, from the checks to the saved model."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import TrainerCallback, TrainerState, TrainingArguments, enable_full_determinism, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import align_special_tokens

from coordexp import distributed
from coordexp.checkpoints.card import card_of_run
from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.checkpoints.memory import advising, recomputed_every
from coordexp.checkpoints.run_folder import RECORDS, only_run_in, write_manifest
from coordexp.config import RunConfig, rollout_contract
from coordexp.config.resume import changes_figures
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.schema import TrainingConfig
from coordexp.data.class_list import choose_list
from coordexp.data.dataset import RecordDataset
from coordexp.data.epochs import describe_epoch, plan_epochs
from coordexp.data.preparation import preparation_of
from coordexp.data.progress_bar import say
from coordexp.engine.wire.engine_process import has_gpu
from coordexp.engine.wire.starting import SKIPPING
from coordexp.errors import ProcessesLost, RunStopped, first_line
from coordexp.modeling.adapter import tune
from coordexp.modeling.attention import recompute_layers
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.kernels import fuse_layers, liger_kernels, unfused_note, wants_fused
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.scores import TokenScorer
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.out_of_memory import is_out_of_memory, phase
from coordexp.recording.rollout_record import Settings
from coordexp.recording.writer import RolloutLog, RolloutPictures, RolloutRecorder
from coordexp.rollouts import RolloutBackend, build_backend
from coordexp.rollouts.backend import TrainerParts
from coordexp.runs.start import Start, clear_results
from coordexp.training.batches import StepBatches
from coordexp.training.checked_run import CheckedRun, check_agreement, check_run
from coordexp.training.checkpoint import check_resume, read_seal, resolve_resume, warn_of_checkpoints_ahead
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.offload import TrainerOffload, build_offload
from coordexp.training.optimizer import LearningRates, build_optimizer, build_scheduler
from coordexp.training.parallel import (
    build_accelerator,
    join_processes,
    lost_each_other,
    parallel_arguments,
    prepare,
    set_allocator,
)
from coordexp.training.progress import FailedWrites, RichProgress, set_up_loggers
from coordexp.training.rows import RowBuilder
from coordexp.training.saving import build_buffer, restore_answers
from coordexp.training.state import RunState
from coordexp.training.step import Task, TrainStep
from coordexp.training.stopping import StopSignals
from coordexp.training.tasks import build_tasks


def build_trainer(
    run: CheckedRun,
    console: Console,
    description: str = "train",
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    backend: RolloutBackend | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[CoordExpTrainer, Path | None]:
    """Load the model and build the trainer. ``console``: quiet on all ranks but the first. ``backend``: replaces the
    one that the configuration names. ``callbacks``: besides those of the configuration.

    Returns: the trainer, and the checkpoint folder to resume from (None for a new run).
    """
    config, rollout, training = run.config, run.rollout, run.config.training
    given = training.hf_arguments(distributed.world_size()) | parallel_arguments(config)
    # transformers refuses bf16 on a machine without a GPU unless use_cpu is set, and would compare shares of the
    # run with steps for the best model, which BestStep does when the run's length is known.
    given |= {"use_cpu": training.use_cpu or not torch.cuda.is_available(), "load_best_model_at_end": False}
    args: Any = TrainingArguments(**given)
    args.load_best_model_at_end = training.load_best_model_at_end
    accelerator = build_accelerator(args)
    start = _resume_point(run.start)
    resume = start.checkpoint
    _print_notes(console, config, rollout, start.applied)
    encoder = PromptEncoder(run.inputs.processor, config.template.prompt, config.template.system)
    ordering = config.custom.object_ordering
    train = RecordDataset(run.train, encoder.encode, ordering, training.seed, config.data.augment)
    val = RecordDataset(run.val, encoder.encode, ordering, training.seed) if run.val else None
    batches = _step_batches(run, args, train, console)
    by_epochs = math.ceil(round(args.num_train_epochs * batches.steps_per_epoch, 6))
    max_steps = args.max_steps if args.max_steps > 0 else by_epochs
    start.check_steps(max_steps)
    set_seed(training.seed)
    loaded = _tuned_model(run, accelerator, console)

    # Before the model is wrapped: a wrapper may expose other parameters during a forward.
    build_row = RowBuilder.from_model(loaded, accelerator.device)
    offload = build_offload(loaded.model, rollout)
    with phase("start", "placing the model and its optimizer"):
        every = _recomputed_every(run, console) if config.training.gradient_checkpointing else 0
        state = _prepared_state(training, args, accelerator, loaded, max_steps, every)
    if offload is not None:
        offload.optimizer = lambda: state.optimizer
    if backend is None:
        with phase("engine", "the start of the rollout engine"):
            backend = build_backend(rollout, _trainer_parts(loaded, offload))
    state.buffer = build_buffer(config, train, resume)
    tasks, schedule = build_tasks(config, rollout, loaded.vocab, backend, state.buffer)
    with_rollouts = next((task for task in tasks.values() if task.rollouts is not None), None)
    state.queue = None if with_rollouts is None else with_rollouts.rollouts
    restore_answers(state.queue, resume)
    step = TrainStep(
        state,
        tasks,
        schedule,
        build_row=build_row,
        max_grad_norm=training.max_grad_norm,
        rollout_log=RolloutLog(Path(training.output_dir), distributed.rank()),
        recorder=_recorder(run, with_rollouts),
    )
    detection = rollout.eval_detection
    with_scores = detection.score_mode == "confidence"
    progress, failed = RichProgress(console, description), FailedWrites(Path(training.output_dir))
    failed.tolerate(progress, "answered", "note")
    trainer = CoordExpTrainer(
        run=state,
        step=step,
        batches=batches,
        backend=backend,
        args=args,
        max_steps=max_steps,
        eval_dataset=val,
        rollout_matching_cfg=rollout_contract(config),
        callbacks=[*(one() for one in get_reporting_integration_callbacks(args.report_to)), *callbacks, progress],
        measured=detection if detection.enabled else None,
        scorer=TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id, trains=True) if with_scores else None,
        keep_checkpoints=training.save_total_limit,
        on_answer=progress.answered,
        failed_writes=lambda: failed.count,
        on_note=progress.note,
        measures_anew=bool(distributed.all_reduce([changes_figures(start.applied)], "max")[0]),
    )
    with distributed.raise_on_all_ranks("training.output_dir"):
        if distributed.is_main():  # after everything is built: a failed start does not change the folder
            clear_results(config, resume)
            write_manifest(config, config_path, overrides, None if resume is None else (resume, start.applied))
    loggers = set_up_loggers(trainer.callback_handler.callbacks, args, resume, failed)
    if rollout.monitor_dump.enabled and distributed.is_main():
        pictures = RolloutPictures(
            rollout.monitor_dump,
            outcomes=lambda: trainer.step.outcomes,
            writer=lambda: next((one.tb_writer for one in loggers), None),
        )
        failed.tolerate(pictures)
        trainer.add_callback(pictures)
    (enable_full_determinism if args.full_determinism else set_seed)(training.seed)
    return trainer, resume


def _step_batches(run: CheckedRun, args: Any, train: RecordDataset, console: Console) -> StepBatches:
    data, seed = run.config.data, run.config.training.seed
    plan = plan_epochs(run.train, data.repeat_threshold, seed)
    if plan is not None:
        for line in describe_epoch(run.train, plan, data.repeat_threshold):
            say(console, line)
    return StepBatches(
        train,
        batch_size=args.train_batch_size,
        accumulation_steps=args.gradient_accumulation_steps,
        seed=seed,
        num_workers=data.num_workers,
        plan=plan,
    )


def _print_notes(
    console: Console, config: RunConfig, rollout: RolloutMatchingConfig, applied: Sequence[object]
) -> None:
    for change in applied:
        say(console, f"applied to the resumed run: {change}")
    if config.custom.trainer_variant and rollout.rollout_backend == "hf" and rollout.skips_forced_tokens(has_gpu()):
        say(console, SKIPPING)  # vLLM's engines print it when they start


def _tuned_model(run: CheckedRun, accelerator: Accelerator, console: Console) -> LoadedModel:
    config = run.config
    with phase("start", "loading the model"):
        loaded = load_model(run.model, config.model.dtype, config.model.attn_implementation, run.inputs)
    card = card_of_run(config, preparation_of(run.train), tuple(choose_list(records=run.train)))
    if config.tuner.train_type == "lora":
        card = replace(card, base=fingerprint(Path(config.model.model), sealed=False))
    loaded = replace(loaded, card=card)
    tune(loaded.model, config.tuner, loaded.vocab.coord_token_ids)
    if wants_fused(config.model, accelerator.device.type):
        fuse_layers(loaded.model, liger_kernels())
        say(console, f"fused kernels: liger-kernel {version('liger-kernel')} (model.fused_kernels)")
    elif (note := unfused_note(config.model, accelerator.device.type)) is not None:
        say(console, note)
    align_special_tokens(loaded.model, loaded.processor)
    return loaded


def _trainer_parts(loaded: LoadedModel, offload: TrainerOffload | None) -> TrainerParts:
    if offload is None:
        return loaded.parts()
    return loaded.parts(weights=TrainerWeights(loaded.model, offload.current), offload=offload.away)


def _recomputed_every(run: CheckedRun, console: Console) -> int:
    on_cpu = run.config.training.use_cpu or not torch.cuda.is_available()
    own = 0 if on_cpu else torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    least = -distributed.all_reduce([-own], "max")[0]  # equal on all ranks, which may wait for each other in layers
    world_size, shapes = distributed.world_size(), weight_shapes(run.model)
    every = recomputed_every(run.config, run.model.config, shapes, world_size, least or None)
    if run.config.training.gradient_checkpointing_every == "auto" and not on_cpu:
        layers = {0: "no layer", 1: "all layers"}.get(every, f"every {every}. layer")
        say(console, f"activations of {layers} are recomputed (training.gradient_checkpointing_every)")
    return every


def _prepared_state(
    training: TrainingConfig,
    args: TrainingArguments,
    accelerator: Accelerator,
    loaded: LoadedModel,
    max_steps: int,
    every: int,
) -> RunState:
    recompute_layers(loaded.model, every)
    rates = LearningRates.of(training)
    master_weights = training.master_weights is not None
    model, optimizer, scheduler = prepare(
        accelerator,
        loaded.model,
        lambda: build_optimizer(loaded.model, args, rates, master_weights=master_weights),
        lambda optimizer: build_scheduler(optimizer, args, max_steps),
        args,
        max_steps,
    )
    progress = TrainerState(
        is_local_process_zero=args.local_process_index == 0,
        is_world_process_zero=args.process_index == 0,
        train_batch_size=args.train_batch_size,
    )
    return RunState(loaded, model, optimizer, scheduler, accelerator, progress)


def _resume_point(start: Start) -> Start:
    """``start`` from a checkpoint whose contents are whole. A collective call."""
    training = start.config.training
    resume = resolve_resume(training.output_dir, training.resume_from_checkpoint)
    if resume is not None:
        check_resume(resume, training)
    with distributed.raise_on_all_ranks("training.output_dir"):
        start = start.at(resume) if distributed.is_main() else replace(start, checkpoint=resume)
    if isinstance(training.resume_from_checkpoint, str) and resume is not None:
        warn_of_checkpoints_ahead(training.output_dir, read_seal(resume).step)
    return start


def _recorder(run: CheckedRun, task: Task | None) -> RolloutRecorder | None:
    dump = run.rollout.monitor_dump
    if task is None or task.rollouts is None or not dump.enabled or not distributed.is_main():
        return None
    matching, targets = task.rollouts.read.matching, task.targets
    settings = Settings(matching, targets.transport, targets.field_order, targets.policy, targets.weights)
    return RolloutRecorder(run.config.training.output_dir / RECORDS, settings, dump)


def run_training(
    config: RunConfig,
    console: Console,
    description: str = "train",
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    callbacks: Sequence[TrainerCallback] = (),
    start: Start | None = None,
) -> CoordExpTrainer:
    """Check, build, train, and save the final model with its processor to ``training.output_dir``. Returns the trainer.

    ``config_path`` and ``overrides`` (``key.path=value``) say in the manifest what ``config`` was loaded from;
    ``start``: its start, if that is decided already. Raises
    RunStopped if a signal ended the run, with everything saved (the trainer's ``asked_to_end`` has one that came in the
    last step), ProcessesLost if another process of torchrun is gone,
    RunFinished if all steps were trained before.
    """
    trainer: CoordExpTrainer | None = None
    saved = lambda: "Nothing of this run is saved" if trainer is None else trainer.last_saved()  # noqa: E731
    try:
        with advising(config, saved), phase("start", "the start of the run"):
            checked = check_run(config, start=start)
            set_allocator(checked.rollout)
            join_processes(config)
            check_agreement(config)
            with only_run_in(Path(config.training.output_dir)):
                trainer, resume = build_trainer(
                    checked, console, description, config_path, overrides, callbacks=callbacks
                )
                if resume is not None:
                    say(console, f"resuming from {resume}")
                _train(trainer, resume, config.training.stop_within_s)
                trainer.save_model()  # with everything that was logged, for the viewer's curves
    except RuntimeError as error:
        if is_out_of_memory(error) or not lost_each_other(error):
            raise
        raise ProcessesLost(
            f"rank {distributed.rank()}: another process of this run ended, or did not answer within "
            f"{config.training.ddp_timeout} s (training.ddp_timeout): {first_line(error)}. See its own "
            "lines above; to continue, start again with training.resume_from_checkpoint: true"
        ) from error
    return trainer


def _train(trainer: CoordExpTrainer, resume: Path | None, stop_within_s: float) -> None:
    signals = StopSignals(stop_within_s, trainer.last_saved)
    with signals:
        try:
            trainer.train(None if resume is None else str(resume), signal=lambda: signals.asked)
            stopped_by = trainer.stopped_by
        except RunStopped as stopped:
            stopped_by = stopped.signal
        finally:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, RichProgress):
                    callback.stop()
            trainer.close()
    trainer.asked_to_end = signals.asked
    if stopped_by is not None:
        raise RunStopped(
            f"stopped by {signal.Signals(stopped_by).name} after step {trainer.state.global_step} of "
            f"{trainer.state.max_steps}. {trainer.last_saved()}. To continue, {trainer.to_continue()}",
            stopped_by,
        )
