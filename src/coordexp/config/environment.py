"""Checks of a configuration against the machine: files, names and packages of transformers, number of processes.
Reading the YAML does not make them, so that a file is valid everywhere or nowhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
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
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    training, problems = config.training, []
    optimizers = [str(one.value) for one in OptimizerNames]
    schedules = [str(one.value) for one in SchedulerType]
    loggers = ["none", *INTEGRATION_TO_CALLBACK]
    given = [("optim", training.optim, optimizers), ("lr_scheduler_type", training.lr_scheduler_type, schedules)]
    for key, name, known in [*given, *(("report_to", name, loggers) for name in training.report_to)]:
        if name not in known:
            problems.append(f"training.{key}: '{name}' is unknown; transformers has {', '.join(sorted(known))}")
    for name in training.report_to:
        if name in INTEGRATION_TO_CALLBACK and name not in (*get_available_reporting_integrations(), "kubeflow"):
            problems.append(
                f"training.report_to: '{name}' needs a package that is not installed here; install it, or write none"
            )
    package = next((package for start, package in _PACKAGES.items() if training.optim.startswith(start)), None)
    if package is not None and importlib.util.find_spec(package) is None:
        problems.append(
            f"training.optim: '{training.optim}' needs the package {package}, which is not installed here; install it, "
            "or write adamw_torch"
        )
    if training.packing and importlib.util.find_spec("binpacking") is None:
        problems.append("training.packing: needs the package binpacking; pip install binpacking, or write false")
    if problems:
        raise ConfigError("\n".join(problems))


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Rules that depend on the number of trainer processes; call it once that number is known.

    Raises:
        ConfigError: with all of them, each with its dotted path.
    """
    training, rollout = config.training, config.rollout_matching
    problems = []
    samples = training.per_device_train_batch_size * world_size
    if training.effective_batch_size is not None and training.effective_batch_size % samples:
        problems.append(
            f"training.effective_batch_size: {training.effective_batch_size} is not a multiple of "
            f"per_device_train_batch_size x processes = {training.per_device_train_batch_size} x {world_size}"
        )
    vllm = rollout.vllm if rollout is not None and rollout.rollout_backend == "vllm" else None
    if vllm is not None and vllm.mode == "colocate" and world_size % vllm.tensor_parallel_size:
        problems.append(
            f"{_VLLM}.tensor_parallel_size: a colocated engine spans {vllm.tensor_parallel_size} of the trainer's "
            f"processes, and there are {world_size}; write a divisor of {world_size}, start another number of "
            "processes, or write rollout_backend: hf"
        )
    if vllm is not None and vllm.mode == "server" and world_size > 1 and vllm.sync.resolved(vllm.enable_lora) != "full":
        problems.append(
            f"{_VLLM}.sync.mode: '{vllm.sync.mode}' pushes adapters, which works from one trainer process only, not "
            f"from {world_size}; write sync.mode: full"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_paths(folders: Mapping[str, str | Path], files: Mapping[str, Path | None] | None = None) -> None:
    """Check that folders and files exist before anything heavy is imported: key or option -> path (or None).

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
