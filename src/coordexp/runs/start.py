"""The start of a run, and whether it may start: decided once, without torch, and passed on as :class:`Start`.

Checkpoints are chosen by their names and seals here. Before one is loaded, all ranks read its contents
(:func:`coordexp.training.checkpoint.resolve_resume`); :meth:`Start.at` decides for an older one if they are damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordexp.checkpoints.card import with_own_template
from coordexp.checkpoints.folder import Checkpoint, read_object
from coordexp.checkpoints.run_folder import STATE, checked_changes, newest_checkpoint
from coordexp.config import RunConfig
from coordexp.config.resume import Change
from coordexp.errors import CheckpointError, ConfigError
from coordexp.records import ImageRecord

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
        return replace(self, checkpoint=checkpoint, applied=_applied(self.config, checkpoint))

    def check_steps(self, max_steps: int) -> None:
        """Raise ConfigError if the run ends at ``max_steps``, before the steps that its checkpoint has trained, or at
        them but earlier than was planned: other data, batches or numbers of processes make epochs of fewer steps."""
        if self.checkpoint is None:
            return
        state = _state_of(self.checkpoint)
        step, planned = int(state.get("global_step") or 0), int(state.get("max_steps") or 0)
        if step >= max_steps and planned not in (0, max_steps):
            changed = [one for one in self.applied if not one.harmless or one.key in _SCHEDULE]
            raise _ended(self.checkpoint, state, changed, f"the run ends after {max_steps} now")


def decide_start(
    config: RunConfig,
    records: Mapping[tuple[Path, int | None], Sequence[ImageRecord]] | None = None,
    model: Checkpoint | None = None,
) -> Start:
    """Decide what the run of ``config`` starts from.

    Raises:
        RunFinished: all steps are trained and the model is saved.
        ConfigError: the run may not start so: other settings than the checkpoint's, a schedule that ends before the
            steps that it has trained, results of another run in its folder, or a folder that cannot be written.
    """
    config = with_own_template(config)
    checkpoint = newest_checkpoint(config)
    return Start(config, checkpoint, _applied(config, checkpoint), records or {}, model)


def _applied(config: RunConfig, checkpoint: Path | None) -> tuple[Change, ...]:
    applied = checked_changes(config, checkpoint)
    if checkpoint is not None:
        _check_schedule(config, checkpoint, applied)
    return applied


def _check_schedule(config: RunConfig, checkpoint: Path, applied: Sequence[Change]) -> None:
    """Raise ConfigError if the schedule was changed and ends at or before the checkpoint's step: nothing would be
    trained, and a model whose learning rate never decayed would count as finished."""
    changed = [one for one in applied if one.key in _SCHEDULE]
    if not changed:
        return
    state = _state_of(checkpoint)
    if not state:
        return
    training = config.training
    step, epoch = int(state.get("global_step") or 0), float(state.get("epoch") or 0.0)
    ended = step >= training.max_steps if training.max_steps > 0 else epoch >= training.num_train_epochs
    if ended:
        raise _ended(checkpoint, state, changed, "this schedule ends before that")


def _state_of(checkpoint: Path) -> Mapping[str, Any]:
    try:
        return read_object(checkpoint, STATE, "trainer state")
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint}: {STATE} cannot be read ({error.__cause__}); resume from an older checkpoint"
        ) from error


def _ended(checkpoint: Path, state: Mapping[str, Any], changed: Sequence[Change], now: str) -> ConfigError:
    step, epoch = int(state.get("global_step") or 0), float(state.get("epoch") or 0.0)
    listed = "".join(f"\n  {one}" for one in changed) or "\n  the number of processes or samples"
    return ConfigError(
        f"training.resume_from_checkpoint: {checkpoint} has trained {step} of {int(state.get('max_steps') or step)} "
        f"steps ({epoch:.4g} epochs), and {now}{listed}\nTo continue, restore these values, on the command line too. "
        f"To keep the model of step {step} as it is: coordexp model export {checkpoint} FOLDER"
    )
