"""The carry buffer in a checkpoint: one file a rank.

It is JSON: token ids, roles and targets, exact to the bit. Images are not in it; on resume they are encoded again from
the dataset, by the same processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coordexp import distributed
from coordexp.errors import CheckpointError
from coordexp.files import write_atomically
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment, TrainingTarget

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
            "left_out_pred_idx": list(target.left_out_pred_idx),
            "soft_pred_idx": list(target.soft_pred_idx),
            "text_weight_T": None if target.text_weight_T is None else target.text_weight_T.tolist(),
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
    weights = target.get("text_weight_T")  # a checkpoint of an earlier version has none
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
            soft_pred_idx=tuple(target.get("soft_pred_idx", ())),
            text_weight_T=None if weights is None else np.array(weights, dtype=np.float64),
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
