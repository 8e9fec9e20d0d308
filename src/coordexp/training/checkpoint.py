"""What a checkpoint must hold beside weights and optimizer: the carry buffer, and what made the run.

The buffer is JSON: token ids, roles and targets, exact to the bit. Images are not in it; on resume they are encoded
again from the dataset, by the same processor.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import coordexp
from coordexp import distributed
from coordexp.config import RunConfig, resolved_yaml
from coordexp.errors import CheckpointError
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment, TrainingTarget

logger = logging.getLogger("coordexp")

MANIFEST = "run_manifest.json"
RESOLVED_CONFIG = "resolved_config.yaml"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "numpy", "scipy")
_ARRAYS = {
    "roles_T": np.uint8,
    "coord_pos_K": np.int64,
    "coord_bin_K": np.float64,
    "box_pos_M4": np.int64,
    "box_bin_M4": np.float64,
}
_PROVENANCE = ("matched_pred_idx", "matched_gt_idx", "appended_gt_idx", "appended_object_index")


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """A segment without its image tensors; floats survive JSON exactly."""
    target = segment.target
    return {
        "sample_id": segment.sample_id,
        "prompt_token_ids": list(segment.prompt_token_ids),
        "target": {
            "token_ids": list(target.token_ids),
            **{name: getattr(target, name).tolist() for name in _ARRAYS},
            "context": target.context,
            "prefix_len": target.prefix_len,
            **{name: list(getattr(target, name)) for name in _PROVENANCE},
        },
    }


def segment_from_json(data: Mapping[str, Any], encode: Callable[[str], RolloutRequest]) -> Segment:
    """Rebuild a segment; ``encode`` gives the sample's prompt and image tensors by its id.

    Raises:
        CheckpointError: the sample's prompt is no longer the one that was saved.
    """
    target = data["target"]
    request = encode(data["sample_id"])
    if list(request.prompt_token_ids) != data["prompt_token_ids"]:
        raise CheckpointError(
            f"{data['sample_id']}: its prompt changed since the checkpoint was written; resume with the same data, "
            "template and processor, or start anew"
        )
    arrays: dict[str, Any] = {name: np.array(target[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
    provenance: dict[str, Any] = {name: tuple(target[name]) for name in _PROVENANCE}
    for name in ("box_pos_M4", "box_bin_M4"):
        arrays[name] = arrays[name].reshape(-1, 4)
    return Segment(
        data["sample_id"],
        tuple(data["prompt_token_ids"]),
        TrainingTarget(
            sample_id=data["sample_id"],
            token_ids=tuple(target["token_ids"]),
            context=target["context"],
            prefix_len=target["prefix_len"],
            **arrays,
            **provenance,
        ),
        request.model_inputs,
    )


def save_carry_buffer(buffer: CarryBuffer, folder: Path) -> None:
    """Write this rank's waiting segments to a checkpoint folder. A collective call.

    Call it before the rest of the checkpoint is written: a folder with a ``trainer_state.json`` then has every rank's
    buffer, whenever the run is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(_buffer_path(folder), json.dumps([segment_to_json(s) for s in buffer.segments]))
    distributed.barrier()


def load_carry_buffer(buffer: CarryBuffer, checkpoint: Path, encode: Callable[[str], RolloutRequest]) -> None:
    """Fill ``buffer`` as it was when ``checkpoint`` was written.

    Raises:
        CheckpointError: the checkpoint holds no buffer for this rank, or an unreadable one. DataError: a waiting sample
            is no longer in the dataset.
    """
    path = _buffer_path(checkpoint)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing; this checkpoint was written with training.packing: false or by fewer processes. Resume "
            "with the configuration and number of processes that wrote it"
        )
    try:
        segments = [segment_from_json(data, encode) for data in json.loads(path.read_text(encoding="utf-8"))]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a carry buffer ({error!r}); resume from an older checkpoint") from error
    buffer.load_state_dict({"segments": segments})


def check_carry_buffers(checkpoint: Path, packing: bool) -> None:
    """Refuse to resume where segments that wait in ``checkpoint`` would never be trained on.

    Raises:
        CheckpointError: packing is off now, or more processes wrote the checkpoint than run now.
    """
    written = len(list(checkpoint.glob("carry_buffer_rank*.json")))
    if not packing and written:
        raise CheckpointError(
            f"{checkpoint}: holds segments that wait for a packed row, but training.packing is false; resume with "
            "training.packing: true, or start anew"
        )
    if packing and written > distributed.world_size():
        raise CheckpointError(
            f"{checkpoint}: written by {written} processes, resumed by {distributed.world_size()}: waiting segments "
            f"of the others would be lost. Resume with {written} processes, or start anew"
        )


def resolve_resume(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """The checkpoint that ``training.resume_from_checkpoint`` means; None to start anew.

    ``True`` takes the newest complete checkpoint and passes over those that a kill left unfinished; without a complete
    one it starts anew, so that one YAML serves the first start and every restart. A named folder must be complete.

    Raises:
        CheckpointError: the named folder is none, or unfinished.
    """
    if not resume:
        return None
    if resume is True:
        for folder in _checkpoints(Path(output_dir)):
            if is_complete(folder):
                return folder
            logger.warning("%s is unfinished; passing over it", folder)
        return None
    if not is_complete(Path(resume)):
        raise CheckpointError(
            f"training.resume_from_checkpoint: {resume} holds no readable trainer_state.json; name a checkpoint-N "
            "folder that was written to its end"
        )
    return Path(resume)


def _checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [(int(match[1]), folder) for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
             if folder.is_dir() and (match := re.fullmatch(r".*-(\d+)", folder.name))]  # fmt: skip
    return [folder for _, folder in sorted(found, reverse=True)]


def is_complete(folder: Path) -> bool:
    """The trainer's state is the last file of a checkpoint; half of it is no JSON."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return True


def write_manifest(config: RunConfig, config_path: str | Path | None, output_dir: Path) -> None:
    """Write what determines the run, before its first step: resolved configuration, versions, commit, seeds."""
    if not distributed.is_main():
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_atomically(output_dir / RESOLVED_CONFIG, resolved_yaml(config))
    manifest = {
        "schema_version": 1,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "config_path": None if config_path is None else str(Path(config_path).resolve()),
        "resolved_config": RESOLVED_CONFIG,
        "seed": config.training.seed,
        "world_size": distributed.world_size(),
        "coordexp": coordexp.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: _version(name) for name in ("torch", "transformers", "accelerate", "peft", "numpy", "scipy")
        },
    }
    _write_atomically(output_dir / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _buffer_path(folder: Path) -> Path:
    return folder / f"carry_buffer_rank{distributed.rank()}.json"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the source tree this package runs from; None for an installed wheel or without git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Inside somebody else's repository (a venv below it) the commit would be theirs, not ours.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
