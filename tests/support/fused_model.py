"""A model that is fused, renamed and tied like vLLM's, with the loading that this needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from coordexp.rollouts.backend import AdapterWeights


class Rename:
    """The part of vLLM's ``WeightsMapper`` that the layout uses."""

    def get_rename_mapper(self) -> Rename:
        return self

    def map_name(self, name: str) -> str | None:
        for old, new in (("model.language.", "language.model."), ("lm_head.", "language.lm_head.")):
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


class Wrapped(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = layer


class FusedModel(torch.nn.Module):
    """Heads of 4 and 2 rows fused; a tied head; one layer wrapped as vLLM's LoRA layers wrap it."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "qkv": ["qkv"]}
    hf_to_vllm_mapper = Rename()

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.ModuleDict(
            {"qkv_proj": Wrapped(torch.nn.Linear(3, 8, bias=False)), "norm": torch.nn.LayerNorm(3, bias=False)}
        )
        embed = torch.nn.Embedding(6, 3)
        head = torch.nn.Linear(3, 6, bias=False)
        head.weight = embed.weight
        self.language = torch.nn.ModuleDict(
            {"model": torch.nn.ModuleDict({"embed": embed, "layer": layer}), "lm_head": head}
        )
        self.visual = torch.nn.ModuleDict({"qkv": torch.nn.Linear(2, 6)})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = {"q_proj": slice(0, 4), "k_proj": slice(4, 6), "v_proj": slice(6, 8)}
        language: Any = self.language
        layer = language["model"]["layer"]
        for name, tensor in weights:
            module, _, kind = name.rpartition(".")
            last = module.rpartition(".")[2]
            if last in rows:
                layer["qkv_proj"].base_layer.weight.data[rows[last]] = tensor
            elif last == "embed":
                language["model"]["embed"].weight.data[: tensor.shape[0]] = tensor
            elif last == "norm":
                layer["norm"].weight.data.copy_(tensor)
            elif last == "qkv":
                getattr(self.visual["qkv"], kind).data.copy_(tensor)
            else:
                raise ValueError(f"There is no module or parameter named {name!r}")


# The trainer's names.
SHAPES = {
    "model.language.embed.weight": (5, 3),  # the engine pads the vocabulary
    "model.language.layer.q_proj.weight": (4, 3),
    "model.language.layer.k_proj.weight": (2, 3),
    "model.language.layer.v_proj.weight": (2, 3),
    "model.language.layer.norm.weight": (3,),
    "visual.qkv.weight": (6, 2),
    "visual.qkv.bias": (6,),
}


class FakeWeights:
    """Weights of the fused model; new values at every step."""

    collective = False

    def __init__(self, adapter: AdapterWeights | None = None) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.given = 0
        self._adapter = adapter
        self.step(0)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def names(self) -> list[str]:
        return list(self.values)

    @contextmanager
    def full(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for item in self.values.items():
                self.given += 1
                yield item

        yield each()

    def adapter(self) -> AdapterWeights | None:
        return self._adapter
