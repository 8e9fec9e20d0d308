"""Trained weights for rollout engines: merged, gathered, under the plain checkpoint's names; and coordinate offsets.

Adapters and offsets are merged into copies, one tensor at a time: the training weights are never modified, and no
second model is kept in memory.

An offset trains the 1000 coordinate rows of a frozen embedding and language head: a float32 ``(1000, H)`` parameter,
zero at first, is added to the embeddings of coordinate tokens and to their columns of the logits. Only those rows ever
have a gradient; peft's trainable token indices would rebuild the whole table in every forward and backward. It is
registered on ``embed_tokens`` and on ``lm_head``; with a tied head it is one parameter with two names, like the table.
The hooks that apply it are plain functions, so that a copied model applies its own offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from coordexp.checkpoints.folder import OFFSET
from coordexp.rollouts.backend import AdapterWeights
from coordexp.sharding import is_sharded

ADAPTER = "default"
_BASE, _SAVED = ".base_layer", f".modules_to_save.{ADAPTER}"
PEFT_PREFIX = "base_model.model."  # of names in an adapter's file
_IDS, _ROW_OF_ID = "coord_offset_ids", "coord_offset_row_of_id"


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    name: str  # of the tensor in the plain checkpoint
    parameter: torch.Tensor
    owner: Any  # module that holds the parameter
    lora: Any | None  # peft's layer around the owner


class TrainerWeights:
    """Reads the weights of a bare (not DDP-wrapped) model: plain, LoRA or DoRA, with or without coordinate offsets.

    Tied weights appear once, under the embedding's name, as ``save_pretrained`` writes them. Order is the model's.
    """

    def __init__(self, model: Any, current: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> None:
        """``current``: a parameter → a tensor with its values, if offload moves them to main memory between steps."""
        self._model = model
        self._current = current

    @property
    def collective(self) -> bool:
        """Whether weights are sharded over ranks, so that all ranks must read together."""
        return is_sharded(self._model)

    def names(self) -> list[str]:
        return [source.name for source in self._sources()]

    @contextmanager
    def full(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """``(name, tensor)`` of every weight, merged lazily.

        Weights without an adapter are the training weights themselves: only read them, inside the context. Under FSDP
        each is gathered by a collective, so every rank must iterate to the end.
        """
        with closing((source.name, self._merged(source)) for source in self._sources()) as tensors:
            yield tensors

    def adapter(self) -> AdapterWeights | None:
        """Only the adapter; None if the model has none. Collective under FSDP."""
        config = getattr(self._model, "peft_config", {}).get(ADAPTER)
        if config is None:
            return None
        named = [(name, self._whole(p)) for name, p in self._model.named_parameters() if is_adapter_part(name)]
        tensors = tuple((adapter_name(name), tensor.detach()) for name, tensor in named)
        changed = tuple(
            (source.name, self._merged(source))
            for source in self._sources()
            if source.parameter.requires_grad or offset_of(source.owner) is not None
        )
        outside_llm = any(".visual." in f".{name}" for name, _ in named)
        return AdapterWeights(adapter_config(config), tensors, Path(self._model.name_or_path), changed, outside_llm)

    def _sources(self) -> list[_Source]:
        modules = dict(self._model.named_modules())
        sources: list[_Source] = []
        seen: set[int] = set()
        for path, owner in modules.items():
            for own_name, parameter in owner.named_parameters(recurse=False):
                full_name = f"{path}.{own_name}"
                if id(parameter) in seen or is_adapter_part(full_name) or is_offset(full_name):
                    continue
                if ".original_module." in f"{full_name}.":
                    continue  # its trained copy follows under modules_to_save
                seen.add(id(parameter))
                lora = modules[path.removesuffix(_BASE)] if path.endswith(_BASE) and own_name == "weight" else None
                sources.append(_Source(full_name.replace(_BASE, "").replace(_SAVED, ""), parameter, owner, lora))
        return sources

    @torch.no_grad()
    def _merged(self, source: _Source) -> torch.Tensor:
        weight = self._whole(source.parameter).detach()
        if source.lora is not None:
            lora = source.lora
            a_RI, b_OR = (self._whole(part[ADAPTER].weight) for part in (lora.lora_A, lora.lora_B))
            magnitudes = lora.lora_magnitude_vector
            magnitude_O = self._whole(magnitudes[ADAPTER].weight) if ADAPTER in magnitudes else None
            weight = merge_lora(weight, a_RI, b_OR, lora.scaling[ADAPTER], magnitude_O)
        offset = offset_of(source.owner)
        if offset is not None:
            coord_ids_B, offset_BH = offset
            weight = add_offset(weight, coord_ids_B, self._whole(offset_BH))
        return weight

    def _whole(self, parameter: Any) -> torch.Tensor:
        return parameter.full_tensor() if isinstance(parameter, DTensor) else self._current(parameter)


def adapter_name(name: str) -> str:
    """A parameter's name in the model → its name in peft's file, where DoRA's vector has no ``.weight``."""
    stem = name.replace(_SAVED, "").replace(f".{ADAPTER}.", ".")
    if ".lora_magnitude_vector." in stem:
        stem = stem.removesuffix(".weight")
    return PEFT_PREFIX + stem


def adapter_config(config: Any) -> dict[str, Any]:
    """peft's configuration as JSON values, in a fixed order."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {key: getattr(value, "value", value) for key, value in sorted(values.items())}


def is_saved_whole(name: str) -> bool:
    """Whether a parameter of this name belongs to a module in ``tuner.modules_to_save``."""
    return f"{_SAVED}." in name


def is_adapter_part(name: str) -> bool:
    """Whether a parameter of this name belongs to LoRA or DoRA."""
    return any(f".{part}.{ADAPTER}" in name for part in ("lora_A", "lora_B", "lora_magnitude_vector"))


def merge_lora(
    weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float, magnitude_O: torch.Tensor | None
) -> torch.Tensor:
    """``W + s·B·A``; with DoRA each output row then scaled to its magnitude. In float32 at least, rounded once."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    merged_OI = torch.addmm(weight_OI.to(wide), b_OR.to(wide), a_RI.to(wide), alpha=scaling)
    if magnitude_O is not None:
        merged_OI *= (magnitude_O.to(wide) / torch.linalg.vector_norm(merged_OI, dim=1))[:, None]
    return merged_OI.to(weight_OI.dtype)


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
