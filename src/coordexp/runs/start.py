"""The start of a run, and whether it may start: decided once, without torch, and passed on as :class:`Start`.

Checkpoints are chosen by their names and seals here. Before one is loaded, all ranks read its contents
(:func:`coordexp.training.checkpoint.resolve_resume`); :meth:`Start.at` decides for an older one if they are damaged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from coordexp import __version__
from coordexp.checkpoints.card import with_own_template
from coordexp.checkpoints.fingerprints import DATA, DEEPSPEED, MODEL, inputs_of, is_same, with_bases
from coordexp.checkpoints.folder import RESOLVED_CONFIG, Checkpoint, read_object
from coordexp.checkpoints.run_folder import (
    CURVES,
    FIRST_EVALUATION,
    LAST_EVALUATION,
    MANIFEST,
    RECORDS,
    SEAL,
    STATE,
    checkpoints_in,
    git_state,
    model_files_in,
    read_manifest,
    settings_of_run,
)
from coordexp.config import RunConfig
from coordexp.config.resume import ABSENT, FIXED, Change, changes
from coordexp.data.files import unwritable
from coordexp.errors import CheckpointError, ConfigError, RunFinished
from coordexp.records import ImageRecord

_WEIGHT = re.compile(r" x [^ ]+")  # of a file, after its fingerprint
_SCHEDULE = ("training.max_steps", "training.num_train_epochs")


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """``config``: with the prompt of its checkpoint. ``checkpoint``: from which the run resumes, by its name and seal;
    None for a new run. ``applied``: the keys that differ from that checkpoint's configuration. ``records``: datasets
    that were read and whose images were checked, by file and limit. ``model``: the checkpoint of ``model.model``, if
    it was opened already."""

    config: RunConfig
    checkpoint: Path | None
    applied: tuple[Change, ...]
    records: Mapping[tuple[Path, int | None], Sequence[ImageRecord]] = field(default_factory=dict)
    model: Checkpoint | None = None

    def at(self, checkpoint: Path | None) -> Start:
        """This start from ``checkpoint``, which is decided again only if it is another one: the newest is damaged."""
        if checkpoint == self.checkpoint:
            return self
        return replace(self, checkpoint=checkpoint, applied=checked_changes(self.config, checkpoint))

    def check_steps(self, max_steps: int) -> None:
        """Raise ConfigError if the run ends at ``max_steps``, before the steps that its checkpoint has trained, or at
        them but earlier than was planned: other data, batches or numbers of processes make epochs of fewer steps."""
        if self.checkpoint is None:
            return
        state = _state_of(self.checkpoint)
        step, planned = int(state.get("global_step") or 0), int(state.get("max_steps") or 0)
        if step >= max_steps and planned not in (0, max_steps):
            epochs = float(state.get("epoch") or 0.0)
            changed = [one for one in self.applied if not one.harmless or one.key in _SCHEDULE]
            listed = "".join(f"\n  {one}" for one in changed) or "\n  the number of processes or samples"
            raise ConfigError(
                f"training.resume_from_checkpoint: {self.checkpoint} has trained {step} of {planned} steps "
                f"({epochs:.4g} epochs), and the run ends after {max_steps} now{listed}\nTo continue, restore these "
                f"values, on the command line too. To keep the model of step {step} as it is: coordexp model export "
                f"{self.checkpoint} FOLDER"
            )


def decide_start(
    config: RunConfig,
    records: Mapping[tuple[Path, int | None], Sequence[ImageRecord]] | None = None,
    model: Checkpoint | None = None,
) -> Start:
    """Decide what the run of ``config`` starts from.

    Raises:
        RunFinished: all steps are trained and the model is saved.
        ConfigError: the run may not start so: other settings than the checkpoint's, ``training.max_steps`` that it has
            trained already, results of another run in its folder, or a folder that cannot be written.
    """
    config = with_own_template(config)
    checkpoint = newest_checkpoint(config)
    start = Start(config, checkpoint, checked_changes(config, checkpoint), records or {}, model)
    # The steps of epochs follow from the data.
    if config.training.max_steps > 0 and any(one.key in _SCHEDULE for one in start.applied):
        start.check_steps(config.training.max_steps)
    return start


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
    if (reason := unwritable(training.output_dir)) is not None:
        raise ConfigError(f"training.output_dir: {training.output_dir}: {reason}; name another folder")
    applied = () if checkpoint is None else _compared(config, checkpoint)
    if training.resume_from_checkpoint is True:
        _check_unfinished(config, checkpoint)
    if checkpoint is None or not _is_own(checkpoint, training.output_dir):
        _check_results(config)
    return applied


def _check_unfinished(config: RunConfig, checkpoint: Path | None) -> None:
    """Raise RunFinished if nothing is left to do in ``training.output_dir``; ConfigError if its model is gone then."""
    training = config.training
    fix = "put it back" if checkpoint is None else f"remove it to continue from {checkpoint}, or put it back"
    state = _state_of(training.output_dir, fix)
    if checkpoint is None and state:
        _compared(config, training.output_dir)
    if not _is_finished(config, state):
        return
    if not any(training.output_dir.glob("*.safetensors")):
        if checkpoint is not None:
            return  # nothing is left to train; its model is saved again
        raise ConfigError(
            f"training.output_dir: {training.output_dir}: this run is finished ({STATE}), but its model is gone: there "
            "is no *.safetensors and no checkpoint. Put the files back, or train again with "
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


def _check_results(config: RunConfig) -> None:
    """Raise ConfigError if ``training.output_dir`` has results of another run, which ``training.overwrite_output_dir``
    does not replace, or among which is the model to start from."""
    training = config.training
    found, resumes = results_in(training.output_dir), training.resume_from_checkpoint is True
    if not found or (resumes and (found[0] / SEAL).is_file()):
        return  # checkpoints that cannot be resumed from: resolving them says why
    if not training.overwrite_output_dir:
        raise ConfigError(
            f"training.output_dir: {training.output_dir} has {_listed(found)} of an earlier run"
            + (" and no checkpoint to continue from" if resumes else "")
            + "; name another folder, "
            + ("" if resumes else "continue that run with training.resume_from_checkpoint: true, ")
            + "or replace it with training.overwrite_output_dir: true"
        )
    output_dir = training.output_dir.resolve()
    if any(one.resolve().is_relative_to(output_dir) for one in with_bases(Path(config.model.model))):
        raise ConfigError(
            f"training.overwrite_output_dir: would delete model.model, {config.model.model}, which is in "
            "training.output_dir; name another folder"
        )


def _state_of(folder: Path, fix: str = "resume from an older checkpoint") -> Mapping[str, Any]:
    try:
        return read_object(folder, STATE, "trainer state")
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {STATE} cannot be read ({error.__cause__}); {fix}") from error


def _compared(config: RunConfig, source: Path) -> tuple[Change, ...]:
    """The changes since the run that wrote ``source``. Raises ConfigError for those that are not applied."""
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
    further = "To continue it with these changes on purpose, write training.resume_with_changes: true"
    if fixed:
        further = (
            f"{fixed[0]} stays as it is: start a new run from model.model: {source}, or, to train all weights "
            f"of a LoRA run, from the FOLDER of coordexp model merge {source} FOLDER"
        )
    raise ConfigError(
        f"training.resume_from_checkpoint: {source} was trained with another configuration\n{lines}{started}\n"
        "To continue that run, restore these values. To start again, name another training.output_dir, without "
        f"training.resume_from_checkpoint. {further}"
    )


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


def results_in(output_dir: Path) -> list[Path]:
    """Results that a new run would replace: whole checkpoints and a model."""
    found = [folder for folder in checkpoints_in(output_dir) if (folder / SEAL).is_file()]
    return found + model_files_in(output_dir)


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


def _listed(found: list[Path], most: int = 3) -> str:
    names = [path.name for path in found]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _is_own(checkpoint: Path, output_dir: Path) -> bool:
    return checkpoint.absolute().parent.resolve() == output_dir.resolve()
