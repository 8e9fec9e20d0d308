"""The output folder of a run, read without torch: its checkpoints, its manifest, and its lock, which one run holds at a
time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from coordexp import __version__, distributed
from coordexp.checkpoints.card import read_card
from coordexp.checkpoints.fingerprints import SEAL, inputs_of
from coordexp.checkpoints.folder import RESOLVED_CONFIG, read_object
from coordexp.config import RunConfig, resolved_yaml
from coordexp.config.resume import Change
from coordexp.config.source import read_document
from coordexp.data.files import write_atomically
from coordexp.errors import ConfigError

logger = logging.getLogger("coordexp")

MANIFEST = "run_manifest.json"
STATE = "trainer_state.json"  # next to a final model: the steps of a finished run
CURVES, RECORDS = "runs", "rollout_records"  # folders of TensorBoard's files and of rollout records
# The answers of the first and of the last evaluation while a run trained.
FIRST_EVALUATION, LAST_EVALUATION = "first_evaluation.jsonl", "last_evaluation.jsonl"
CHECKPOINT = "checkpoint"  # N steps are in checkpoint-N, as transformers names it
LOCK = "run.lock"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "numpy", "scipy")
"""Whose versions change what is learned; the run's manifest lists them."""
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", STATE)


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Checkpoint folders, of the most steps first."""
    folders = [folder for folder in output_dir.glob(f"{CHECKPOINT}-*")
               if folder.is_dir() and re.fullmatch(rf"{CHECKPOINT}-\d+", folder.name)]  # fmt: skip
    return sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True)


def model_files_in(output_dir: Path) -> list[Path]:
    """The files by which a folder has a final model."""
    return sorted(path for pattern in _MODEL_FILES for path in output_dir.glob(pattern))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run that wrote ``folder``, there or one folder above; empty without one."""
    for place in (folder, folder.absolute().parent):
        if (place / MANIFEST).is_file():
            return read_object(place, MANIFEST, "manifest")
    return {}


def write_manifest(
    config: RunConfig,
    config_path: str | Path | None,
    overrides: Sequence[str] = (),
    resumed: tuple[Path, Sequence[Change]] | None = None,
) -> None:
    """Write the resolved configuration, and a manifest with versions, commit, seed and fingerprints of model and data,
    into ``training.output_dir``. ``resumed``: the checkpoint, and the keys that differ from its configuration; the
    manifest lists every such resume."""
    output_dir, now = config.training.output_dir, datetime.now(UTC).isoformat(timespec="seconds")
    output_dir.mkdir(parents=True, exist_ok=True)
    resumes: list[dict[str, Any]] = []
    if resumed is not None:
        checkpoint, applied = resumed
        run = checkpoint.absolute().parent  # lists starts that saved no checkpoint too
        earlier = read_manifest(run if (run / MANIFEST).is_file() else checkpoint)
        changed = {one.key: {"was": one.was, "now": one.now} for one in applied}
        step = read_object(checkpoint, SEAL, "seal")["step"]
        this = {"at": now, "checkpoint": str(checkpoint), "step": step, "changes": changed}
        resumes = [*(earlier.get("resumes") or []), this]
    write_atomically(output_dir / RESOLVED_CONFIG, resolved_yaml(config))
    manifest = {
        "schema_version": 1,
        "created_at": now,
        "command": sys.argv,
        "config_path": None if config_path is None else str(Path(config_path).resolve()),
        "overrides": list(overrides),
        "resolved_config": RESOLVED_CONFIG,
        "inputs": inputs_of(config),
        "model_source": read_card(config.model.model).source,
        "resumes": resumes,
        "seed": config.training.seed,
        "world_size": distributed.world_size(),
        "coordexp": __version__,
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }
    write_atomically(output_dir / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def git_state() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from; None for an installed wheel or without git."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Inside somebody else's repository (a venv below it) the commit would be theirs, not ours.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None or (commit := git("rev-parse", "HEAD")) is None:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def last_step_of(folder: Path, state: Mapping[str, Any]) -> float:
    """The optimizer step after which the weights in ``folder`` were saved, by its ``trainer_state.json``: the last, or
    the best checkpoint's in a finished run with ``training.load_best_model_at_end``. Infinite if unknown."""
    best = state.get("best_global_step") if state.get("best_model_checkpoint") else None
    training = settings_of_run(folder).get("training") or {}
    if best and training.get("load_best_model_at_end") and not (folder / SEAL).is_file():
        return float(best)
    return float(state.get("global_step") or math.inf)


def settings_of_run(folder: Path) -> Mapping[str, Any]:
    """The configuration of the run that wrote ``folder``, there or one folder above; empty without one."""
    for place in (folder, folder.absolute().parent):
        if (place / RESOLVED_CONFIG).is_file():
            return read_document(place / RESOLVED_CONFIG).data
    return {}


@contextmanager
def only_run_in(output_dir: Path) -> Iterator[None]:
    """Lock ``output_dir`` for this run. A collective call; raises ConfigError if another process trains into the
    folder. A left-over lock file locks nothing."""
    with ExitStack() as held:
        with distributed.raise_on_all_ranks("training.output_dir"):
            if distributed.is_main():
                output_dir.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(output_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
                held.callback(os.close, descriptor)
                if (reason := _take_lock(descriptor, output_dir)) is not None:
                    logger.warning("%s cannot be locked (%s): let no second run train into it", output_dir, reason)
                os.ftruncate(descriptor, 0)
                since = datetime.now(UTC).isoformat(timespec="seconds")
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
                os.write(descriptor, json.dumps(holder).encode())
        yield


def _take_lock(descriptor: int, output_dir: Path) -> str | None:
    """Lock an open lock file for this process. Raises ConfigError if another run holds it. Returns: None, or why it is
    not locked, on file systems without locks (Lustre's noflock, NFS without its lock daemon).

    The lock belongs to the process, not to the open file: loader processes do not inherit it, network file systems
    support it, and the kernel releases it however the process ends."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return str(error)
        holder = os.read(descriptor, 1024).decode(errors="replace").strip() or "unknown process"
        raise ConfigError(
            f"training.output_dir: another run trains into {output_dir} ({holder}); end it, or choose another folder"
        ) from error
    return None


def check_not_running(output_dir: Path) -> None:
    """Raise ConfigError if another process trains into the folder now; :func:`only_run_in` decides later."""
    if not (output_dir / LOCK).is_file():
        return
    descriptor = os.open(output_dir / LOCK, os.O_RDWR)
    try:
        _take_lock(descriptor, output_dir)
    finally:
        os.close(descriptor)
