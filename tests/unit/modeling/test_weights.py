"""Pushed weights are those of a plain checkpoint; the trainer's own weights are unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open

from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.weights import LearnerWeights
from support.tiny_run import gt_segments, load_tiny, tiny_checkpoint
from support.tuned_models import TUNERS, lora, tuned, untied_checkpoint


def merged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with LearnerWeights(model).full() as weights:
        return {name: tensor.clone() for name, tensor in weights}


def snapshot(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, int, bool]]:
    return {n: (p.detach().clone(), p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()}


def assert_untouched(model: torch.nn.Module, before: dict[str, tuple[torch.Tensor, int, bool]]) -> None:
    for name, parameter in model.named_parameters():
        value, address, trainable = before.pop(name)
        assert torch.equal(parameter, value) and parameter.data_ptr() == address, name
        assert parameter.requires_grad == trainable and parameter.grad is None, name
    assert not before


@torch.no_grad()
def logits_of(loaded: LoadedModel) -> torch.Tensor:
    segment = gt_segments(loaded, 1)[0]
    ids = torch.tensor([[*segment.prompt_token_ids, *segment.target.token_ids]])
    inputs = {"pixel_values": segment.model_inputs["pixel_values"].to(loaded.model.dtype),
              "image_grid_thw": segment.model_inputs["image_grid_thw"]}  # fmt: skip
    is_image = (ids == loaded.image_token_id).int()
    return loaded.model(input_ids=ids, mm_token_type_ids=is_image, use_cache=False, **inputs).logits[0]


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
@pytest.mark.parametrize("keys", TUNERS.values(), ids=TUNERS)
def test_names_are_the_checkpoints_own_in_the_models_order(keys: dict, checkpoint) -> None:
    loaded = load_model(checkpoint(), "float32")
    plain = [name for name, _ in loaded.model.named_parameters()]
    with safe_open(checkpoint() / "model.safetensors", "pt") as file:
        assert set(plain) == set(file.keys())
    weights = LearnerWeights(tuned(lora(**keys), checkpoint=checkpoint()).model)
    assert weights.names() == plain
    with weights.full() as tensors:
        assert [name for name, _ in tensors] == plain


def test_a_plain_model_gives_its_own_weights_without_copies() -> None:
    model = load_tiny().model
    with LearnerWeights(model).full() as tensors:
        for name, tensor in tensors:
            assert tensor.data_ptr() == model.get_parameter(name).data_ptr() and not tensor.requires_grad
    assert LearnerWeights(model).adapter() is None


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
@pytest.mark.parametrize("keys", TUNERS.values(), ids=TUNERS)
def test_a_plain_model_with_merged_weights_equals_the_tuned_one(keys: dict, checkpoint) -> None:
    loaded = tuned(lora(**keys), checkpoint=checkpoint())
    plain = load_model(checkpoint(), "float32")
    before = logits_of(plain)
    tensors = merged(loaded.model)
    assert not plain.model.load_state_dict(tensors, strict=False).unexpected_keys
    assert (before - logits_of(plain)).abs().max() > 0.1, "the tuned weights must differ for this test"
    torch.testing.assert_close(logits_of(plain), logits_of(loaded), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_is_pefts_own_formula(use_dora: bool) -> None:
    model = tuned(lora(use_dora=use_dora)).model
    ours = merged(model)
    theirs = copy.deepcopy(model)
    compared = 0
    for name, layer in theirs.named_modules():
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            torch.testing.assert_close(ours[f"{name}.weight"], layer.get_base_layer().weight, atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared == 26


@pytest.mark.parametrize("keys", TUNERS.values(), ids=TUNERS)
def test_training_weights_are_bitwise_unchanged(keys: dict) -> None:
    model = tuned(lora(**keys)).model
    before = snapshot(model)
    merged(model)
    LearnerWeights(model).adapter()
    assert_untouched(model, before)


def test_training_weights_are_unchanged_after_a_failed_push() -> None:
    model = tuned(lora(use_dora=True)).model
    before = snapshot(model)
    with pytest.raises(ConnectionError), LearnerWeights(model).full() as tensors:
        next(tensors)
        assert torch.is_grad_enabled(), "a paused iterator must not keep gradients off"
        raise ConnectionError
    assert_untouched(model, before)
    with pytest.raises(StopIteration):
        next(tensors)


def test_a_bf16_model_is_merged_in_float32_and_rounded_once() -> None:
    half = tuned(lora(), dtype="bfloat16").model
    assert {p.dtype for p in half.parameters() if p.requires_grad} == {torch.float32}
    tensors = merged(half)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    name = "model.language_model.layers.0.mlp.up_proj"
    layer: Any = half.get_submodule(name)
    exact = layer.base_layer.weight.double() + 2 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    torch.testing.assert_close(tensors[f"{name}.weight"].double(), exact, atol=0, rtol=2**-8)


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapter_only_weights_have_pefts_names_and_values(use_dora: bool) -> None:
    model = tuned(lora(use_dora=use_dora)).model
    adapter = LearnerWeights(model).adapter()
    assert adapter is not None
    reference = {f"base_model.model.{name}": value for name, value in get_peft_model_state_dict(model).items()}
    assert dict(adapter.tensors).keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in adapter.tensors)
    assert (adapter.config["r"], adapter.config["lora_alpha"], adapter.config["use_dora"]) == (4, 8, use_dora)
    assert isinstance(adapter.config["target_modules"], list)


def test_trained_weights_outside_the_adapter_are_named() -> None:
    adapter = LearnerWeights(tuned(lora(modules_to_save=["visual.pos_embed"])).model).adapter()
    assert adapter is not None and adapter.outside_llm
    assert [name for name, _ in adapter.changed] == [
        "model.visual.pos_embed.weight", "model.language_model.embed_tokens.weight"
    ]  # fmt: skip
    llm_only = LearnerWeights(tuned(lora(freeze_vit=True, freeze_aligner=True, train_coord_rows=False)).model).adapter()
    assert llm_only is not None and not llm_only.outside_llm and llm_only.changed == ()
