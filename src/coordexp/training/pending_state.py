"""What is pending between two steps, as a checkpoint stores it: segments in the carry buffer, answers one step ahead.
One JSON file per rank, exact to the bit.

Images are not stored: on resume the processor encodes them again from the dataset. Nor are targets of answers, which
are built again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.files import write_atomically
from coordexp.errors import CheckpointError, DataError
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment, TrainingTarget
from coordexp.records_json import from_json, to_json
from coordexp.training.answers import RolloutQueue, SavedAnswers
from coordexp.training.seal import read_seal

logger = logging.getLogger("coordexp")

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
    saved = {"sample_id": segment.sample_id, "prompt_token_ids": segment.prompt_token_ids, "target": segment.target}
    return json.loads(to_json(saved))


def segment_from_json(data: Mapping[str, Any], encode: Callable[[str], RolloutRequest]) -> Segment:
    """Rebuild a segment; ``encode`` gives the sample's prompt and image tensors by its id.

    Raises:
        CheckpointError: the sample's prompt is no longer the one that was saved, or an earlier version of CoordExp
            saved it.
    """
    target = data["target"]
    if "weights" not in target:
        raise CheckpointError(
            f"{data['sample_id']}: a segment without weights, so an earlier version of CoordExp wrote this checkpoint; "
            "resume with that version, or start a new run from the checkpoint's model"
        )
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
            left_out_pred_idx=tuple(target.get("left_out_pred_idx", ())),
            weights={term: np.array(values, dtype=np.float32) for term, values in target["weights"].items()},
        ),
        request.model_inputs,
    )


def save_carry_buffer(buffer: CarryBuffer, folder: Path) -> None:
    """Write this rank's waiting segments to a checkpoint folder."""
    write_atomically(_buffer_path(folder), json.dumps([segment_to_json(s) for s in buffer.segments]))


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
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a carry buffer ({error!r}); resume from an older checkpoint") from error
    buffer.load_state_dict({"segments": segments})


def holds_carry_buffers(checkpoint: Path) -> bool:
    """Whether the checkpoint was written with packing."""
    return any(checkpoint.glob("carry_buffer_rank*.json"))


def _buffer_path(folder: Path) -> Path:
    return folder / f"carry_buffer_rank{distributed.rank()}.json"


def save_answers(answers: SavedAnswers, folder: Path) -> None:
    """Write this rank's waiting answers to a checkpoint folder."""
    write_atomically(_path(folder), to_json(answers).decode())


def load_answers(checkpoint: Path, step: int) -> SavedAnswers | None:
    """This rank's answers for the step after ``checkpoint``, which was written after ``step`` steps; None if it holds
    none.

    Raises:
        CheckpointError: the file is unreadable, or of another step.
    """
    path = _path(checkpoint)
    if not path.is_file():
        return None
    try:
        answers = from_json(SavedAnswers, path.read_bytes(), "a step's answers", path=path)
    except DataError as error:
        raise CheckpointError(f"{error}; resume from an older checkpoint") from error
    if (answers.step, answers.version) != (step, step - 1):
        raise CheckpointError(
            f"{path}: answers of weights {answers.version} for the step after {answers.step}, in a checkpoint of "
            f"{step} steps; resume from an older checkpoint"
        )
    return answers


def _path(folder: Path) -> Path:
    return folder / f"waiting_answers_rank{distributed.rank()}.json"


def build_buffer(config: RunConfig, train: RecordDataset, resume: Path | None) -> CarryBuffer | None:
    """The carry buffer, filled as the checkpoint ``resume`` left it; None without packing.

    Raises:
        CheckpointError: the checkpoint holds no buffer for this rank, or an unreadable one. DataError: a waiting sample
            is no longer in ``train``.
    """
    if not config.training.packing:
        return None
    buffer = CarryBuffer(config.global_max_length, config.training.packing_buffer)
    if resume is not None:
        load_carry_buffer(buffer, resume, train.request_of)
    return buffer


def restore_answers(queue: RolloutQueue | None, resume: Path | None) -> None:
    """Give ``queue`` the answers that the checkpoint ``resume`` holds for its next step. A warning if they are unused
    because ``rollout_matching.rollouts_ahead`` is 0 now.

    Raises:
        CheckpointError: the file of answers is unreadable, or of another step.
    """
    if resume is None:
        return
    seal = read_seal(resume)
    answers = load_answers(resume, seal.step) if seal.world_size == distributed.world_size() else None
    if queue is not None and queue.ahead:
        queue.content = answers
    elif answers is not None and distributed.is_main():
        logger.warning(
            "%s holds answers for its next step, which stay unused because rollout_matching.rollouts_ahead is 0 now",
            resume,
        )
