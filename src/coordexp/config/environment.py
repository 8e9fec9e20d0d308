"""Checks of a configuration against the machine: files, names and packages of transformers, number of processes. They
are no part of reading the YAML, so that a file is valid everywhere or nowhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from coordexp.config.schema import RunConfig
from coordexp.errors import ConfigError

_VLLM = "rollout_matching.vllm"
# How the names of optimizers start -> the package they need; transformers reports it only after the model is loaded.
_PACKAGES = {
    "galore_": "galore_torch", "apollo_": "apollo_torch", "schedule_free_": "schedulefree", "paged_": "bitsandbytes",
    "lion_": "bitsandbytes", "ademamix": "bitsandbytes", "adamw_bnb": "bitsandbytes", "adamw_8bit": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes", "adamw_torch_4bit": "torchao", "adamw_torch_8bit": "torchao",
    "lomo": "lomo_optim", "adalomo": "lomo_optim", "grokadamw": "grokadamw", "stable_adamw": "optimi",
}  # fmt: skip


def check_training_environment(config: RunConfig) -> None:
    """Names that only transformers knows (optimizer, schedule, loggers), and the packages that a run needs.

    Raises:
        ConfigError: with each that is unknown, or not installed here.
    """
    if problems := [f"training.{key}: {message}" for key, message in _environment_problems(config)]:
        raise ConfigError("\n".join(problems))


def _environment_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    training = config.training
    optimizers = [str(one.value) for one in OptimizerNames]
    schedules = [str(one.value) for one in SchedulerType]
    loggers = ["none", *INTEGRATION_TO_CALLBACK]
    given = [("optim", training.optim, optimizers), ("lr_scheduler_type", training.lr_scheduler_type, schedules)]
    for key, name, known in [*given, *(("report_to", name, loggers) for name in training.report_to)]:
        if name not in known:
            yield key, f"'{name}' is unknown; transformers has {', '.join(sorted(known))}"
    for name in training.report_to:
        if name in INTEGRATION_TO_CALLBACK and name not in (*get_available_reporting_integrations(), "kubeflow"):
            yield "report_to", f"'{name}' needs a package that is not installed here; install it, or write none"
    package = next((package for start, package in _PACKAGES.items() if training.optim.startswith(start)), None)
    if package is not None and importlib.util.find_spec(package) is None:
        yield (
            "optim",
            f"'{training.optim}' needs the package {package}, which is not installed here; install it, or write "
            "adamw_torch",
        )
    if training.packing and importlib.util.find_spec("binpacking") is None:
        yield "packing", "needs the package binpacking; pip install binpacking, or write false"


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Rules that depend on the number of trainer processes; call it once that number is known.

    Raises:
        ConfigError: with all of them, each with its dotted path.
    """
    if problems := [f"{path}: {message}" for path, message in _world_size_checks(config, world_size)]:
        raise ConfigError("\n".join(problems))


def _world_size_checks(config: RunConfig, world_size: int) -> Iterator[tuple[str, str]]:
    training, rollout = config.training, config.rollout_matching
    samples = training.per_device_train_batch_size * world_size
    if training.effective_batch_size is not None and training.effective_batch_size % samples:
        yield (
            "training.effective_batch_size",
            f"{training.effective_batch_size} is not a multiple of per_device_train_batch_size x processes "
            f"= {training.per_device_train_batch_size} x {world_size}",
        )
    if rollout is None or rollout.rollout_backend != "vllm":
        return
    vllm = rollout.vllm
    if vllm.mode == "colocate" and world_size % vllm.tensor_parallel_size:
        yield (
            f"{_VLLM}.tensor_parallel_size",
            f"a colocated engine spans {vllm.tensor_parallel_size} of the trainer's processes, and there are "
            f"{world_size}; write a divisor of {world_size}, start another number of processes, or write "
            "rollout_backend: hf",
        )
    if vllm.mode == "server" and world_size > 1 and vllm.sync.resolved(vllm.enable_lora) != "full":
        yield (
            f"{_VLLM}.sync.mode",
            f"'{vllm.sync.mode}' pushes adapters, which works from one trainer process only, not from "
            f"{world_size}; write sync.mode: full",
        )


def check_paths(folders: Mapping[str, str | Path], files: Mapping[str, Path | None] | None = None) -> None:
    """Look for what a command names on the disk before anything heavy is imported: key or option -> path (or None).

    Raises:
        ConfigError: with every one that is not there.
    """
    missing = []
    for key, path in folders.items():
        if not Path(path).is_dir():
            what = "is a file, not a folder" if Path(path).exists() else "no such folder; nothing is downloaded"
            missing.append(f"{key}: {path}: {what}")
    for key, path in (files or {}).items():
        if path is not None and not path.is_file():
            missing.append(f"{key}: {path}: {'is a folder, not a file' if path.exists() else 'file not found'}")
    if missing:
        raise ConfigError("\n".join(missing) + f"\n(relative paths start at the working directory, {Path.cwd()})")
