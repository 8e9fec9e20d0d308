"""The trained weights for rollout engines: merged, gathered, under the plain checkpoint's names.

Adapters and coordinate offsets are merged into copies, one tensor at a time: the training weights are never modified,
and no second model is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from coordexp.modeling.coord_offset import add_offset, is_offset, offset_of
from coordexp.rollouts.backend import AdapterWeights

ADAPTER = "default"
_BASE, _SAVED = ".base_layer", f".modules_to_save.{ADAPTER}"
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """One tensor of the plain checkpoint: a parameter, and the modules to merge into it."""

    name: str
    parameter: torch.Tensor
    owner: Any  # module that holds the parameter
    lora: Any | None  # peft's layer around the owner


class LearnerWeights:
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
        return any(_is_sharded(parameter) for parameter in self._model.parameters())

    def names(self) -> list[str]:
        """The names of :meth:`full`, in its order."""
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
        return AdapterWeights(adapter_config(config), tensors, changed, outside_llm)

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
        """All values of a parameter: gathered if FSDP shards it, the copy if it is away."""
        return parameter.full_tensor() if _is_sharded(parameter) else self._current(parameter)


def adapter_name(name: str) -> str:
    """A parameter's name in the model → its name in peft's file, where DoRA's vector has no ``.weight``."""
    stem = name.replace(_SAVED, "").replace(f".{ADAPTER}.", ".")
    if ".lora_magnitude_vector." in stem:
        stem = stem.removesuffix(".weight")
    return _PEFT_PREFIX + stem


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


def _is_sharded(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def merge_lora(
    weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float, magnitude_O: torch.Tensor | None
) -> torch.Tensor:
    """``W + s·B·A``; with DoRA each output row then scaled to its magnitude. In float32 at least, rounded once."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    merged_OI = torch.addmm(weight_OI.to(wide), b_OR.to(wide), a_RI.to(wide), alpha=scaling)
    if magnitude_O is not None:
        merged_OI *= (magnitude_O.to(wide) / torch.linalg.vector_norm(merged_OI, dim=1))[:, None]
    return merged_OI.to(weight_OI.dtype)
