"""Names and packages of transformers that training needs: optimizers, schedules, loggers. Read by ``config check`` and
before training, both without importing transformers, which takes seconds. A test compares the tables with its own.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coordexp.addresses import split_url
from coordexp.config.schema import RunConfig
from coordexp.errors import ConfigError

# Name -> package that transformers imports for it only after the model is loaded; None: torch suffices. Not among them
# are those that change weights in each backward pass, before the step's gradient is summed and clipped (lomo, adalomo,
# galore_*_layerwise, apollo_adamw_layerwise), that train other weights than those that answers and checkpoints are to
# have (schedule_free_*), and that need transformers' optim_target_modules (galore_*, apollo_adamw).
OPTIMIZERS: dict[str, str | None] = {
    **dict.fromkeys(("adafactor", "adagrad", "adamw_torch", "adamw_torch_fused", "rmsprop", "sgd")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit"),
                    "bitsandbytes"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit",
                     "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"),
                    "bitsandbytes"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    "adamw_anyprecision": "torchdistx", "adamw_torch_npu_fused": "torch_npu", "adamw_torch_xla": "torch_xla",
    "grokadamw": "grokadamw", "stable_adamw": "optimi",
}  # fmt: skip
SCHEDULES = (
    "constant", "constant_with_warmup", "cosine", "cosine_warmup_with_min_lr", "cosine_with_min_lr",
    "cosine_with_restarts", "greedy", "inverse_sqrt", "linear", "polynomial", "reduce_lr_on_plateau",
    "warmup_stable_decay",
)  # fmt: skip
# Those that need lr_scheduler_kwargs, and those that step after evaluations, by their metric.
SCHEDULES_WITH_ARGUMENTS = ("cosine_warmup_with_min_lr", "cosine_with_min_lr", "warmup_stable_decay")
SCHEDULES_BY_METRIC = ("greedy", "reduce_lr_on_plateau")
SCHEDULES_WITHOUT_WARMUP = ("constant", *SCHEDULES_BY_METRIC)
# Name -> packages of which it needs one; (): none.
LOGGERS: dict[str, tuple[str, ...]] = {
    "azure_ml": ("azureml",), "clearml": ("clearml",), "codecarbon": ("codecarbon",), "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",), "dvclive": ("dvclive",), "flyte": ("flytekit",), "kubeflow": (), "mlflow": ("mlflow",),
    "neptune": ("neptune",), "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip

_LONGEST_SOCKET = 107  # bytes of a socket's path in Linux
_LONGEST_TEMPORARY = _LONGEST_SOCKET - len("/pymp-12345678/listener-12345678")  # multiprocessing's names


def unknown_names(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of each name of ``training`` that transformers does not have, or training cannot use."""
    training = config.training
    named = [("optim", training.optim, OPTIMIZERS), ("lr_scheduler_type", training.lr_scheduler_type, SCHEDULES)]
    named += [("report_to", name, ("none", *LOGGERS)) for name in training.report_to]
    for key, name, known in named:
        if name not in known:
            yield f"training.{key}", f"'{name}' cannot be used here; write one of {', '.join(sorted(known))}"


def check_training_environment(config: RunConfig) -> None:
    """Check that the packages of the optimizer, the loggers and packing are installed, that W&B has a login, that
    loader processes can make sockets, and that no variable of accelerate contradicts a key. Raises ConfigError with all
    problems."""
    training, problems = config.training, list(_overruled(config))
    for name in training.report_to:
        packages = LOGGERS.get(name, ())
        if packages and not any(map(_is_installed, packages)):
            problems.append(
                f"training.report_to: '{name}' needs a package that is not installed here, {' or '.join(packages)}; "
                "install it, or write none"
            )
    if "kubeflow" in training.report_to and "KUBEFLOW_TRAINER_SERVER_URL" not in os.environ:
        problems.append(
            "training.report_to: kubeflow needs the environment of a Kubeflow TrainJob (KUBEFLOW_TRAINER_SERVER_URL), "
            "which is not set here; write none"
        )
    if "wandb" in training.report_to and _is_installed("wandb") and not _can_use_wandb():
        problems.append(
            "training.report_to: wandb has no login on this machine; run wandb login, set WANDB_API_KEY, set "
            "WANDB_MODE=offline to log into files, or write none"
        )
    package = OPTIMIZERS.get(training.optim)
    if package is not None and not _is_installed(package):
        problems.append(
            f"training.optim: '{training.optim}' needs the package {package}, which is not installed here; install it, "
            "or write adamw_torch"
        )
    if training.packing and not _is_installed("binpacking"):
        problems.append("training.packing: needs the package binpacking; pip install binpacking, or write false")
    temporary = os.fsencode(tempfile.gettempdir())
    if config.data.num_workers and len(temporary) > _LONGEST_TEMPORARY:
        problems.append(
            f"data.num_workers: loader processes make sockets in {os.fsdecode(temporary)}, whose name has "
            f"{len(temporary)} bytes, and a socket's may have {_LONGEST_SOCKET}; set TMPDIR to a folder with at most "
            f"{_LONGEST_TEMPORARY}, or write 0"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _overruled(config: RunConfig) -> Iterator[str]:
    """Variables of accelerate, as ``accelerate launch`` or an image sets them, that would decide in place of keys."""
    training = config.training
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "no"
    for variable, key, wanted in (
        ("ACCELERATE_MIXED_PRECISION", "training.bf16", precision),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "training.effective_batch_size", "1"),
        ("ACCELERATE_USE_CPU", "training.use_cpu", str(training.use_cpu).lower()),
        ("ACCELERATE_USE_FSDP", "fsdp.enabled", str(config.fsdp.enabled).lower()),
        ("ACCELERATE_USE_DEEPSPEED", "deepspeed.enabled", str(config.deepspeed.enabled).lower()),
        ("ACCELERATE_DYNAMO_BACKEND", "this program, which compiles no model,", "no"),
    ):
        value = os.environ.get(variable, "").lower()
        if value not in ("", "no", "false", "0", wanted, *(["1"] if wanted == "true" else [])):
            yield f"the environment variable {variable} is {value!r}, and {key} decides that; unset {variable}"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _can_use_wandb() -> bool:
    """Whether W&B has a key, or needs none. Without one its run would fail after the model is loaded."""
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DISABLED")
    if any(os.environ.get(name) for name in keys) or os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return True
    import wandb

    try:
        hosts = {
            split_url(url).hostname for url in (os.environ.get("WANDB_BASE_URL"), wandb.Settings().base_url) if url
        }
    except ConfigError as error:
        raise ConfigError(f"WANDB_BASE_URL: {error}") from error
    places = (os.environ.get("NETRC"), "~/.netrc", "~/_netrc", "wandb/settings", "~/.config/wandb/settings")
    for path in (Path(place).expanduser() for place in places if place):
        with suppress(OSError, netrc.NetrcParseError):
            if path.name == "settings" and re.search(
                r"^(api_key|mode) *= *(?!online)\S", path.read_text(), re.MULTILINE
            ):
                return True  # wandb offline, or a key in its own file
            if path.name != "settings" and hosts & netrc.netrc(path).hosts.keys():
                return True
    return False
