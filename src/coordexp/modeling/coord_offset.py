"""A trainable offset on the 1000 coordinate rows of a frozen embedding and language head.

LoRA leaves both tables frozen, although coordinates are the main thing to learn. Whole tables have 150 times as many
rows, and peft's trainable token indices rebuild the full table in every forward and its dense gradient in every
backward. Here a float32 ``(1000, H)`` parameter, zero at first, is added to the embeddings of coordinate tokens and to
the 1000 coordinate columns of the logits. Only those rows ever have a gradient.

The parameter is registered on ``embed_tokens`` and on ``lm_head``; with a tied head it is one parameter with two names,
like the table. The hooks that apply it are plain functions, so that a copied model applies its own offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from coordexp.checkpoints.folder import OFFSET

_IDS, _ROW_OF_ID = "coord_offset_ids", "coord_offset_row_of_id"


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """Logits are ``h @ weight_VH.T``, plus ``h @ offset_BH.T`` on the coordinate columns if there is an offset."""

    weight_VH: torch.Tensor
    offset_BH: torch.Tensor | None


def output_head(model: Any) -> OutputHead:
    """The head of a bare Qwen3-VL model. Call it inside the model's forward, where FSDP has gathered the weights."""
    head = unit = model.get_output_embeddings()
    # FSDP2 shards an untied head as a unit of its own, gathered by the head's forward, which is never called when the
    # loss multiplies by the weight itself. The backward pass shards it again.
    if isinstance(unit, FSDPModule):
        unit.unshard()
    return OutputHead(head.weight, getattr(head, OFFSET, None))


def add_coord_offset(model: Any, coord_ids: Sequence[int]) -> None:
    """Give ``model`` a zero offset on the rows ``coord_ids`` of its embedding and head. Freezes neither."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    offset = _register(embedding, coord_ids, None)
    _register(head, coord_ids, offset if head.weight is embedding.weight else None)
    embedding.register_forward_hook(_offset_embeddings)
    head.register_forward_hook(_offset_logits)


def is_offset(name: str) -> bool:
    """Whether a parameter of this name is an offset."""
    return name.rpartition(".")[2] == OFFSET


def offset_of(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``(coord_ids_B, offset_BH)`` of an embedding or head; None without one."""
    offset = getattr(module, OFFSET, None)
    return None if offset is None else (getattr(module, _IDS), offset)


def add_offset(weight_VH: torch.Tensor, coord_ids_B: torch.Tensor, offset_BH: torch.Tensor) -> torch.Tensor:
    """A copy of the table with the offset added to its coordinate rows in the wider of the two dtypes."""
    coord_ids_B = coord_ids_B.to(weight_VH.device)  # offload moves weights to main memory, but not buffers
    wide = torch.promote_types(weight_VH.dtype, offset_BH.dtype)
    rows_BH = weight_VH[coord_ids_B].to(wide) + offset_BH.to(wide)
    return weight_VH.index_copy(0, coord_ids_B, rows_BH.to(weight_VH.dtype))


def _register(layer: Any, coord_ids: Sequence[int], shared: torch.nn.Parameter | None) -> torch.nn.Parameter:
    weight_VH = layer.weight
    ids_B = torch.tensor(list(coord_ids), device=weight_VH.device)
    row_of_id_V = torch.full((weight_VH.shape[0],), len(ids_B), device=weight_VH.device)
    row_of_id_V[ids_B] = torch.arange(len(ids_B), device=weight_VH.device)
    zeros_BH = torch.zeros(len(ids_B), weight_VH.shape[1], dtype=torch.float32, device=weight_VH.device)
    offset_BH = torch.nn.Parameter(zeros_BH) if shared is None else shared
    layer.register_parameter(OFFSET, offset_BH)
    layer.register_buffer(_IDS, ids_B, persistent=False)
    layer.register_buffer(_ROW_OF_ID, row_of_id_V, persistent=False)
    return offset_BH


def _offset_embeddings(layer: Any, args: tuple[Any, ...], output_H: torch.Tensor) -> torch.Tensor:
    # All other tokens look up an extra row of zeros. Not in place: autograd may need the embedding's output.
    offset_BH = getattr(layer, OFFSET)
    padded = torch.cat([offset_BH, offset_BH.new_zeros(1, offset_BH.shape[1])])
    added_H = F.embedding(getattr(layer, _ROW_OF_ID)[args[0]], padded)
    return output_H + added_H.to(output_H.dtype)


def _offset_logits(layer: Any, args: tuple[Any, ...], logits_V: torch.Tensor) -> torch.Tensor:
    offset_BH = getattr(layer, OFFSET)
    added_B = F.linear(args[0].to(offset_BH.dtype), offset_BH)
    return logits_V.index_add(-1, getattr(layer, _IDS), added_B.to(logits_V.dtype))
