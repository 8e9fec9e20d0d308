"""The output folder of a run, read without torch. Decides whether a start resumes, overwrites or is refused; and its
lock, which one run holds at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from coordexp import __version__, distributed
from coordexp.checkpoints.card import read_card
from coordexp.checkpoints.fingerprints import DATA, DEEPSPEED, MODEL, SEAL, inputs_of, is_same, with_bases
from coordexp.checkpoints.folder import RESOLVED_CONFIG, read_object
from coordexp.config import RunConfig, resolved_yaml
from coordexp.config.resume import ABSENT, FIXED, Change, changes
from coordexp.config.source import read_document
from coordexp.data.files import unwritable, write_atomically
from coordexp.errors import CheckpointError, ConfigError, RunFinished

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
_WEIGHT = re.compile(r" x [^ ]+")  # of a file, after its fingerprint


def checked_changes(config: RunConfig, checkpoint: Path | None) -> tuple[Change, ...]:
    """Check that a run may start in ``training.output_dir``, from ``checkpoint`` (None: from ``model.model``).

    Returns:
        The keys that differ from the checkpoint's configuration and are applied: harmless ones, and with
        ``training.resume_with_changes`` all.

    Raises:
        RunFinished: all steps are trained and the model is saved.
        ConfigError: other keys differ; or without a checkpoint, the folder has the results of another run; or it cannot
            be written to.
    """
    training = config.training
    for key, folder in (("training.output_dir", training.output_dir), ("training.logging_dir", training.logging_dir)):
        if folder is not None and (reason := unwritable(folder)) is not None:
            raise ConfigError(f"{key}: {folder}: {reason}; name another folder")
    applied = () if checkpoint is None else _checked_changes(config, checkpoint)
    if training.resume_from_checkpoint is True:
        try:
            state = read_object(training.output_dir, STATE, "trainer state")
        except CheckpointError as error:
            fix = "put it back" if checkpoint is None else f"remove it to continue from {checkpoint}, or put it back"
            raise CheckpointError(
                f"{training.output_dir / STATE}: cannot be read ({error.__cause__}); {fix}"
            ) from error
        if checkpoint is None and state:
            _checked_changes(config, training.output_dir)
        if _is_finished(config, state):
            if not any(training.output_dir.glob("*.safetensors")):
                if checkpoint is not None:
                    return applied  # nothing is left to train; its model is saved again
                raise ConfigError(
                    f"training.output_dir: {training.output_dir}: this run is finished ({STATE}), but its model is "
                    "gone: there is no *.safetensors and no checkpoint. Put the files back, or train again with "
                    "training.overwrite_output_dir: true or into another folder"
                )
            length = "max_steps" if training.max_steps > 0 else "num_train_epochs"
            trained, longer = f"{state['global_step']} steps are trained", f"Raise training.{length}"
            if _ended_by_callback(state):
                trained = f"a callback ended it after step {state['global_step']} of {state['max_steps']}"
                longer = f"Set training.resume_from_checkpoint to {checkpoint or 'the folder of a checkpoint'}"
            raise RunFinished(
                f"{training.output_dir}: this run is finished: {trained} and its model is saved; nothing was done. "
                f"{longer} to train longer, or name another training.output_dir to start again"
            )
    if checkpoint is not None and _is_own(checkpoint, training.output_dir):
        return applied
    found = results_in(training.output_dir)
    if found and training.resume_from_checkpoint is True and (found[0] / SEAL).is_file():
        return applied  # its checkpoints cannot be resumed from, and resolving them says why
    if found and not training.overwrite_output_dir:
        resumes = training.resume_from_checkpoint is True
        raise ConfigError(
            f"training.output_dir: {training.output_dir} has {_listed(found)} of an earlier run"
            + (" and no checkpoint to continue from" if resumes else "")
            + "; name another folder, "
            + ("" if resumes else "continue that run with training.resume_from_checkpoint: true, ")
            + "or replace it with training.overwrite_output_dir: true"
        )
    output_dir = training.output_dir.resolve()
    if found and any(one.resolve().is_relative_to(output_dir) for one in with_bases(Path(config.model.model))):
        raise ConfigError(
            f"training.overwrite_output_dir: would delete model.model, {config.model.model}, which is in "
            "training.output_dir; name another folder"
        )
    return applied


def newest_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means, by its name and seal alone: files are not
    checked."""
    resume = config.training.resume_from_checkpoint
    if resume is not True:
        return None if not resume else Path(resume)
    for folder in checkpoints_in(config.training.output_dir):
        with suppress(CheckpointError):  # a damaged one is skipped, which resolving it reports
            if read_object(folder, SEAL, "seal").get("resumable"):
                return folder
    return None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Checkpoint folders, of the most steps first."""
    folders = [folder for folder in output_dir.glob(f"{CHECKPOINT}-*")
               if folder.is_dir() and re.fullmatch(rf"{CHECKPOINT}-\d+", folder.name)]  # fmt: skip
    return sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True)


def results_in(output_dir: Path) -> list[Path]:
    """Results that a new run would replace: whole checkpoints and a model."""
    found = [folder for folder in checkpoints_in(output_dir) if (folder / SEAL).is_file()]
    return found + model_files_in(output_dir)


def model_files_in(output_dir: Path) -> list[Path]:
    """The files by which a folder has a final model."""
    return sorted(path for pattern in _MODEL_FILES for path in output_dir.glob(pattern))


def clear_results(config: RunConfig, checkpoint: Path | None) -> None:
    """With ``training.overwrite_output_dir``, delete the results of an earlier run, with its curves, records and
    evaluations, before a run writes its own: never before the run's own ``checkpoint``."""
    output_dir = config.training.output_dir
    if not config.training.overwrite_output_dir or (checkpoint is not None and _is_own(checkpoint, output_dir)):
        return
    for folder in (*checkpoints_in(output_dir), *(output_dir / name for name in (CURVES, RECORDS))):
        if folder.is_dir():
            shutil.rmtree(folder)
    for path in (*results_in(output_dir), output_dir / FIRST_EVALUATION, output_dir / LAST_EVALUATION):
        path.unlink(missing_ok=True)


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


def _checked_changes(config: RunConfig, source: Path) -> tuple[Change, ...]:
    earlier = settings_of_run(source)
    if not earlier:
        return (Change(RESOLVED_CONFIG, "missing", "no key is compared", harmless=True),)
    manifest = read_manifest(source)
    found = [*_by_content(changes(earlier, config), config, manifest)]
    found += [*_other_code(manifest), *_other_packages(manifest)]
    if not manifest:
        found.append(Change(MANIFEST, "missing", "model and data are compared by path alone", harmless=True))
    refused = [one for one in found if not one.harmless]
    fixed = [one.key for one in refused if one.key in FIXED]
    if not fixed and (not refused or config.training.resume_with_changes):
        return tuple(found)
    lines = "\n".join(f"  {one}" for one in refused)
    overrides = manifest.get("overrides") or []
    started = f"\nIt was started with {' '.join(overrides)}" if overrides else ""
    kind = next((one for one in refused if one.key == "tuner.train_type"), None)
    if kind is not None and kind.was == "lora":
        further = (
            f"Adapters cannot be continued as full training: merge them with coordexp model merge {source} FOLDER, and "
            "start a new run from model.model: FOLDER"
        )
    elif fixed:
        what = "All weights cannot be continued as adapters" if kind is not None else f"{fixed[0]} stays as it is"
        further = f"{what}: start a new run from model.model: {source}"
    else:
        further = "To continue it with these changes on purpose, write training.resume_with_changes: true"
    raise ConfigError(
        f"training.resume_from_checkpoint: {source} was trained with another configuration\n{lines}{started}\n"
        "To continue that run, restore these values. To start again, name another training.output_dir, without "
        f"training.resume_from_checkpoint. {further}"
    )


def settings_of_run(folder: Path) -> Mapping[str, Any]:
    """The configuration of the run that wrote ``folder``, there or one folder above; empty without one."""
    for place in (folder, folder.absolute().parent):
        if (place / RESOLVED_CONFIG).is_file():
            return read_document(place / RESOLVED_CONFIG).data
    return {}


def _by_content(found: Iterable[Change], config: RunConfig, manifest: Mapping[str, Any]) -> Iterator[Change]:
    """``found``, with model, data and DeepSpeed's file by what they hold: a moved file is harmless, other content is
    not. And the packages of other versions than those that the run was started with."""
    recorded: Mapping[str, str] = manifest.get("inputs") or {}
    inputs = inputs_of(config) if recorded else {}
    by_key = {one.key: one for one in found}
    data = ", ".join(str(file.path) for file in config.custom.train_jsonl)
    paths = {MODEL: config.model.model, DATA: data, DEEPSPEED: str(config.deepspeed.config)}
    for key, path in paths.items():
        moved = by_key.pop(key, None)
        if key in recorded and key in inputs:
            if not is_same(recorded[key], inputs[key]):
                was, now = (path, path) if moved is None else (moved.was, moved.now)
                same_files = _WEIGHT.sub("", recorded[key]) == _WEIGHT.sub("", inputs[key])
                what = "other weights" if same_files else "other content"
                yield Change(key, f"{was} ({recorded[key]})", f"{now} ({inputs[key]}: {what})", False)
            elif moved is not None:
                yield replace(moved, harmless=True)
        elif moved is not None:
            yield replace(moved, harmless=Path(moved.was).resolve() == Path(moved.now).resolve())
    yield from by_key.values()


def _other_code(manifest: Mapping[str, Any]) -> Iterator[Change]:
    if "coordexp" not in manifest:
        return
    was, now = (
        str(version) if not git else f"{version}, commit {git['commit'][:8]}{' with changes' if git['dirty'] else ''}"
        for version, git in ((manifest["coordexp"], manifest.get("git")), (__version__, git_state()))
    )
    if was != now:
        yield Change("version of coordexp", was, now, harmless=True)


def _other_packages(manifest: Mapping[str, Any]) -> Iterator[Change]:
    for name, was in (manifest.get("packages") or {}).items():
        try:
            now = metadata.version(name)
        except metadata.PackageNotFoundError:
            now = ABSENT
        if now != was:
            yield Change(f"package {name}", was, now, harmless=True)


def _is_finished(config: RunConfig, state: Mapping[str, Any]) -> bool:
    if not state:
        return False
    if _ended_by_callback(state):
        return True
    training = config.training
    if training.max_steps > 0:
        return state["global_step"] >= training.max_steps
    return (state.get("epoch") or 0) >= training.num_train_epochs


def _ended_by_callback(state: Mapping[str, Any]) -> bool:
    """Whether the state next to a final model is of a run that ended before its last step, e.g. by early stopping."""
    return state["global_step"] < state.get("max_steps", 0)


def _listed(found: list[Path], most: int = 3) -> str:
    names = [path.name for path in found]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_own(checkpoint: Path, output_dir: Path) -> bool:
    return checkpoint.absolute().parent.resolve() == output_dir.resolve()


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
