"""Receiving into the engine's own memory: only if loading was shown to be a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.receiver import InPlaceTargets, WeightLayout
from support.fused_model import SHAPES, FusedModel

Q, K, V = (f"model.language.layer.{part}_proj.weight" for part in "qkv")
NORM, EMBED = "model.language.layer.norm.weight", "model.language.embed.weight"
Load = Callable[[FusedModel, list[tuple[str, torch.Tensor]]], None]


def trainers(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def usual(model: FusedModel, tensors: list[tuple[str, torch.Tensor]]) -> None:
    model.load_weights(tensors)


def without(*names: str) -> Load:
    return lambda model, tensors: model.load_weights([(name, t) for name, t in tensors if name not in names])


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Load:
    return lambda model, tensors: model.load_weights([(n, change(t) if n == name else t) for n, t in tensors])


def k_under_q(model: FusedModel, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Loads the same bytes, but in another order of the fused parameter's parts."""
    model.load_weights(tensors)
    fused = model.get_parameter("language.model.layer.qkv_proj.base_layer.weight").data
    fused.copy_(torch.cat([fused[4:6], fused[:4], fused[6:]]))


def proven(load: Load, sent: dict[str, torch.Tensor], **keys: Any) -> tuple[FusedModel, InPlaceTargets, set[str]]:
    model = FusedModel()
    places = InPlaceTargets(WeightLayout.from_model(model), **{"enabled": True, **keys})
    tensors = list(sent.items())
    with torch.no_grad(), places.probe(tensors):
        load(model, tensors)
    found = {name for name, t in tensors if places.destination(name, tuple(t.shape), t.dtype) is not None}
    return model, places, found


@pytest.mark.parametrize(
    ("load", "sent", "keys", "unproven"),
    [
        (usual, trainers(), {}, set()),
        (k_under_q, trainers(), {}, {Q, K}),
        (changed(NORM, lambda t: t + 1), trainers(), {}, {NORM}),
        (usual, trainers(torch.bfloat16), {}, set(SHAPES)),
        (usual, {name: t for name, t in trainers().items() if name != Q}, {}, {Q, K, V}),
        (usual, trainers(), {"enabled": False}, set(SHAPES)),
    ],
    ids=["copies", "another order of parts", "transformed", "another type", "a part before is unknown", "sharded"],
)
def test_loading_shows_which_tensors_are_plain_copies(
    load: Load, sent: dict[str, torch.Tensor], keys: dict[str, Any], unproven: set[str]
) -> None:
    assert proven(load, sent, **keys)[2] == set(SHAPES) - unproven


def test_a_tensor_that_the_loader_ignores_is_named() -> None:
    with pytest.raises(RolloutError, match=r"the engine's loader ignored .*norm\.weight"):
        proven(without(NORM), trainers())


def test_bytes_written_in_place_become_the_weights() -> None:
    model, places, _ = proven(usual, trainers())
    fresh = {name: tensor + 1 for name, tensor in trainers().items()}
    for name, tensor in fresh.items():
        memory = places.destination(name, tuple(tensor.shape), tensor.dtype)
        assert memory is not None
        memory.copy_(tensor.view(-1).view(torch.uint8))
    expected = FusedModel()
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected.load_weights(fresh.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    "change", [lambda t: t[:-1], lambda t: t.to(torch.bfloat16), lambda t: t.double()], ids=["rows", "narrow", "wide"]
)
def test_a_tensor_without_a_proven_destination_is_loaded(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _, places, _ = proven(usual, trainers())
    tensor = change(trainers()[EMBED])
    assert places.destination(EMBED, tuple(tensor.shape), tensor.dtype) is None
