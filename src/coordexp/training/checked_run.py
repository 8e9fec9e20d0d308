"""Everything cheap about a run is checked before its model is loaded, and all mistakes are reported at once; then, that
all ranks will train the same thing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import coordexp
from coordexp import distributed
from coordexp.checkpoints.disk import checked_disk
from coordexp.checkpoints.fingerprints import DATA, MODEL, VALIDATION, fingerprint, inputs_of
from coordexp.checkpoints.folder import Checkpoint, check_lengths, length_advice
from coordexp.checkpoints.memory import check_memory
from coordexp.checkpoints.run_folder import PACKAGES
from coordexp.config import RunConfig, advice, check_world_size, resolved_rollout
from coordexp.config.base import dotted
from coordexp.config.datasets import TrainFile
from coordexp.config.environment import check_training_environment
from coordexp.config.resume import differing
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.data.class_list import unseen_note
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.dataset_check import objects_problem
from coordexp.data.joined import DataPart, JoinedRecords
from coordexp.data.preparation import preparation_of, several_rules_note, unprepared_note
from coordexp.engine.trainer.backends import check_backend
from coordexp.errors import ConfigError, CoordExpError, DataError, RunFinished
from coordexp.modeling.attention import check_attention
from coordexp.modeling.kernels import wants_fused
from coordexp.modeling.load import ProcessorAndVocab, load_processor_and_vocab
from coordexp.records import ImageRecord
from coordexp.runs.start import Start, decide_start
from coordexp.training.optimizer import check_schedule
from coordexp.training.parallel import check_parallel

# Paths, which may differ between machines; their files' content may not.
_PATHS = (MODEL, DATA, VALIDATION)


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A configuration with checked data, processor and backend. Nothing heavy is loaded."""

    config: RunConfig
    start: Start
    model: Checkpoint
    inputs: ProcessorAndVocab
    rollout: RolloutMatchingConfig
    train: Sequence[ImageRecord]
    val: Sequence[ImageRecord]


def check_run(
    config: RunConfig, *, trainers: int | None = None, servers_are_up: bool = True, start: Start | None = None
) -> CheckedRun:
    """Read data and processor, query the rollout servers: report every mistake that can be found before the model
    loads.

    Args:
        trainers: number of trainer processes; None for this process's own world.
        servers_are_up: false before a launch, when no server runs yet.
        start: the run's start, if it is decided already.

    Raises: ConfigError, DataError, CheckpointError, VocabError, MissingDependency: a single mistake. ConfigError:
    several, one per line. RunFinished: nothing is left to do.
    """
    trainers = distributed.world_size() if trainers is None else trainers
    errors: list[CoordExpError] = []

    def attempt(act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except RunFinished:
            raise
        except CoordExpError as error:
            errors.append(error)

    start = start or attempt(decide_start, config)
    config = config if start is None else start.config
    rollout = resolved_rollout(config)
    attempt(check_world_size, config, trainers)
    if servers_are_up and not errors:
        check_backend(rollout)
    model = (None if start is None else start.model) or attempt(Checkpoint.open, config.model.model)
    for sentence in (*advice(config), *(() if model is None else length_advice(config, model))):
        distributed.warn(sentence)
    attempt(_check_device, config, trainers, model)
    attempt(check_parallel, config, trainers)
    attempt(check_training_environment, config)
    attempt(check_schedule, config.training)
    inputs: Any = None
    if model is not None:
        inputs = attempt(load_processor_and_vocab, model)
        attempt(check_lengths, config, model)
        attempt(checked_disk, config, model)
    custom, wait_s = config.custom, config.training.ddp_timeout
    read = partial(open_records, wait_s=wait_s)
    known = {} if start is None else start.records

    def opened_from(path: Path, limit: int | None) -> Any:
        return known[path, limit] if (path, limit) in known else attempt(partial(read, limit=limit), path)

    opened = [opened_from(file.path, custom.train_sample_limit) for file in custom.train_jsonl]
    train: Any = None if None in opened else _joined(custom.train_jsonl, opened)
    val: Any = []
    if custom.val_jsonl is not None:
        val = opened_from(custom.val_jsonl, custom.val_sample_limit)
    seen = {id(records) for records in known.values()}
    unseen = [records for records in (*opened, val) if records and id(records) not in seen]
    attempt(partial(check_images, wait_s=wait_s), *unseen)
    paths = ", ".join(str(file.path) for file in custom.train_jsonl)
    for key, path, records in (("train_jsonl", paths, train), ("val_jsonl", custom.val_jsonl, val)):
        if records and (problem := objects_problem(records)) is not None:
            errors.append(DataError(f"custom.{key}: {path}: {problem}; convert the annotations again"))
    messages = dict.fromkeys(map(str, errors))  # one broken checkpoint may fail several checks with the same message
    if len(messages) > 1:
        raise ConfigError("\n".join(messages))
    if errors:
        raise errors[0]
    assert start is not None and model is not None
    if (note := several_rules_note(train)) is not None:
        distributed.warn(f"custom.train_jsonl: {paths}: {note}")
    for note in (unprepared_note(preparation_of(train), val), unseen_note(train, val)):
        if note is not None:
            distributed.warn(f"custom.val_jsonl: {custom.val_jsonl}: {note}")
    return CheckedRun(config, start, model, inputs, rollout, train, val)


def _joined(files: Sequence[TrainFile], opened: Sequence[Sequence[ImageRecord]]) -> Sequence[ImageRecord]:
    if len(files) == 1 and files[0].weight == 1:
        return opened[0]
    return JoinedRecords(
        [DataPart(file.path, records, file.weight) for file, records in zip(files, opened, strict=True)]
    )


def check_driver() -> None:
    """Raises ConfigError if there are GPUs that torch cannot use, which would otherwise be a silent run on the CPU."""
    # NVML counts devices without initialising CUDA, which an older driver refuses.
    if (visible := torch.cuda.device_count()) and not torch.cuda.is_available():
        raise ConfigError(
            f"training.use_cpu: {visible} GPUs are visible, but torch {torch.__version__} (CUDA {torch.version.cuda}) "
            "cannot use them; update the NVIDIA driver (CUDA 13 needs 580 or newer), or set training.use_cpu: true"
        )


def _check_device(config: RunConfig, trainers: int, model: Checkpoint | None) -> None:
    """Raises ConfigError if training would silently take the CPU, or the GPU lacks the attention kernel or memory."""
    training = config.training
    on_cpu = training.use_cpu or not torch.cuda.is_available()
    if not training.use_cpu:
        check_driver()
    if on_cpu and training.bf16 and not training.use_cpu:  # as configured for a GPU
        distributed.warn("no GPU is visible: this run trains on the CPU; write training.use_cpu: true if that is meant")
    if on_cpu and training.fp16:
        raise ConfigError("training.fp16: needs a GPU, and this machine has none; remove it (bf16 works on CPUs)")
    if not on_cpu and model is not None:
        check_memory(config, trainers, torch.cuda.get_device_properties(0).total_memory, model)
    half = training.bf16 or training.fp16 or config.model.dtype != "float32"
    device = "cpu" if on_cpu else "cuda"
    check_attention(config.model.attn_implementation, device, half)
    wants_fused(config.model, device)


def check_agreement(config: RunConfig) -> None:
    """Compare inputs, configuration and versions over all ranks, before anything is loaded. A collective call.

    Ranks read files of their own machine and take every world_size-th batch of an order that depends on the number of
    samples. If one has other files, the ranks would train on different epochs of different data without an error.

    Raises: ConfigError on all ranks, with a line for each difference, with its name and both values.
    """
    if distributed.world_size() == 1:
        return
    with distributed.raise_on_all_ranks("comparing the ranks' inputs"):
        own = facts_of_rank(config)
    every = distributed.gather_json(own)
    problems = []
    for rank, other in enumerate(every[1:], start=1):
        for path, first, here in differing(every[0], other):
            section, *key = path
            name = dotted(tuple(key)) if section == "configuration" else str(key[0])
            if section != "configuration" or not name.startswith(_PATHS):
                problems.append(f"  {name}: {first} on rank 0, {here} on rank {rank}")
    if problems:
        shown = [*problems[:10], *([f"  and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        raise ConfigError(
            "the ranks of this run would not train the same thing:\n" + "\n".join(shown) + "\nGive every process the "
            "same files, configuration and packages, and start again; nothing was trained"
        )


def facts_of_rank(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What :func:`check_agreement` compares: fingerprints of this rank's inputs, its configuration, its versions."""
    inputs = inputs_of(config)
    if config.custom.val_jsonl is not None:
        inputs[VALIDATION] = fingerprint(config.custom.val_jsonl)
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "inputs": inputs,
        "configuration": config.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), "coordexp": coordexp.__version__, **versions},
    }
