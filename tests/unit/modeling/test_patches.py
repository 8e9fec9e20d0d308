"""The patch embedding is one matrix product, nearer to the exact result than transformers' convolution."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from coordexp.errors import ConfigError
from coordexp.modeling.adapter import tune
from coordexp.modeling.patches import PatchProjection
from support.tiny_run import load_tiny
from support.tuned_models import lora, pushed

PROJECTION = "model.visual.patch_embed.proj"


def run(layer: torch.nn.Module, patches: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of weight, bias and input."""
    given = patches.clone().requires_grad_()
    out = layer(given)
    (out.to(torch.promote_types(out.dtype, torch.float32)) ** 2).mean().backward()
    gradients: list[Any] = [*(one.grad for one in layer.parameters()), given.grad]
    return [out.detach(), *gradients]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_product_is_as_exact_as_the_convolution_gradients_too(dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    convolution = torch.nn.Conv3d(3, 1024, (2, 16, 16), (2, 16, 16)).to(dtype)  # of Qwen3-VL-2B
    product = copy.deepcopy(convolution)
    product.__class__ = PatchProjection
    patches = torch.randn(40, 3, 2, 16, 16).to(dtype)
    exact = run(copy.deepcopy(convolution).double(), patches.double())
    for truth, expected, found in zip(exact, run(convolution, patches), run(product, patches), strict=True):
        assert found.shape == expected.shape
        error = (found - truth).abs().max() / truth.abs().max()
        assert error <= most
        assert error <= 1.1 * (expected - truth).abs().max() / truth.abs().max()


def test_every_loaded_model_projects_by_product_and_keeps_its_weights_names_and_shapes() -> None:
    model: Any = load_tiny().model
    layer = model.get_submodule(PROJECTION)
    with torch.profiler.profile() as profile:
        layer(torch.randn(5, *layer.weight.shape[1:]))
    calls = [str(event.name) for event in profile.events() or ()]
    assert "aten::linear" in calls
    assert not [name for name in calls if "conv" in name]
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters() if "patch_embed" in name}
    assert shapes == {f"{PROJECTION}.weight": (32, 3, 2, 8, 8), f"{PROJECTION}.bias": (32,)}


def test_an_adapter_of_the_patch_embedding_is_refused_and_the_advice_trains_it() -> None:
    loaded = load_tiny()
    with pytest.raises(ConfigError, match=r"proj multiplies whole patches.*tuner\.modules_to_save"):
        tune(loaded.model, lora(target_modules=["patch_embed.proj"]), loaded.vocab.coord_token_ids)
    tune(loaded.model, lora(modules_to_save=["patch_embed.proj"]), loaded.vocab.coord_token_ids)
    layer: Any = loaded.model.get_submodule(PROJECTION)
    copied = layer.modules_to_save["default"]
    before, patches = copied.weight.detach().clone(), torch.ones(1, 3, 2, 8, 8)
    with torch.no_grad():
        copied.weight.add_(1.0)
        moved = layer(patches) - layer.original_module(patches)
    assert copied.weight.requires_grad
    torch.testing.assert_close(moved, torch.full_like(moved, 3 * 2 * 8 * 8))
    assert torch.equal(pushed(loaded.model)[f"{PROJECTION}.weight"], before + 1.0)
