"""Whether the disk of ``training.output_dir`` has room for what a run writes: checkpoints and the final model."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from coordexp import distributed
from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.folder import Checkpoint
from coordexp.checkpoints.memory import ADAMW, trained_numbers
from coordexp.checkpoints.run_folder import checkpoints_in
from coordexp.config import RunConfig
from coordexp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Bytes. ``where``: the deepest folder that exists; ``checkpoint``: of one, 0 if none is saved; ``model``: of the
    final one; ``checkpoints``: this number is on the disk at once, besides those that are there already."""

    where: Path
    free: int
    checkpoint: int
    model: int
    checkpoints: int

    @property
    def least(self) -> int:
        """Bytes that a run needs to end: a checkpoint and the final model."""
        return self.checkpoint + self.model

    @property
    def most(self) -> int:
        """Bytes with all checkpoints that it keeps."""
        return self.checkpoint * self.checkpoints + self.model

    def __str__(self) -> str:
        return (
            f"{_size(self.free)} free at {self.where}, about {_size(self.least)} for "
            f"{'a checkpoint and ' if self.checkpoint else ''}the final model"
        )


def checked_disk(config: RunConfig, checkpoint: Checkpoint | None = None) -> DiskSpace:
    """Estimate what this run will write, and compare it with the free space. Warns if the space is too small for all
    checkpoints that ``training.save_total_limit`` keeps. ``checkpoint``: ``model.model``, if it is open.

    Raises:
        ConfigError: one checkpoint and the final model do not fit.
        CheckpointError: ``model.model`` is not a readable checkpoint.
    """
    training = config.training
    space = _estimate(config, Checkpoint.open(checkpoint or config.model.model))
    if space.free < space.least:
        raise ConfigError(
            f"training.output_dir: {space.where} has {_size(space.free)} left, and "
            f"{'a checkpoint and ' if space.checkpoint else ''}the final model need about {_size(space.least)}; "
            "free some, or choose another folder"
        )
    if space.free < space.most:
        kept = "all are kept" if training.save_total_limit is None else f"{training.save_total_limit} and a new one"
        distributed.warn(
            f"training.save_total_limit: {space.checkpoints} checkpoints ({kept}) and the final model need about "
            f"{_size(space.most)}, and {space.where} has {_size(space.free)} left; lower it, or free some"
        )
    return space


def _estimate(config: RunConfig, checkpoint: Checkpoint) -> DiskSpace:
    training = config.training
    shapes = weight_shapes(checkpoint)
    trained = trained_numbers(config, checkpoint.config, shapes)
    lora = config.tuner.train_type == "lora"
    stored = 4 if config.model.dtype == "float32" or config.fsdp.enabled else 2
    total = sum(map(math.prod, shapes.values()))
    model = trained * 4 if lora else total * stored
    moments = 2 if training.optim in ADAMW else 0  # other optimizers count as if they had no state
    per_number = 4 * moments + 4 if training.master_weights is not None else moments * (4 if lora else stored)
    state = trained * per_number
    if config.fsdp.enabled:  # a resume reads all weights, frozen ones too, from a file next to the model or from shards
        state += total * (4 if config.model.dtype == "float32" else 2) if lora else 0
        state += model if config.fsdp.state_dict_type == "FULL_STATE_DICT" else 0
    one = 0 if training.save_strategy == "no" else model + (0 if training.save_only_model else state)
    folder = Path(training.output_dir).absolute()
    where = next(parent for parent in (folder, *folder.parents) if parent.exists())
    limit, planned = training.save_total_limit, 1
    if training.save_strategy == "steps" and training.max_steps > 0 and training.save_steps >= 1:
        planned = math.ceil(training.max_steps / training.save_steps)
    most = planned if limit is None else min(planned, limit + 1)  # an old one is deleted after a new one is complete
    further = max(1, most - len(checkpoints_in(folder)))
    return DiskSpace(where, shutil.disk_usage(where).free, one, model, further)


def _size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
