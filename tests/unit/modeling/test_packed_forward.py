"""One forward over a packed row gives what separate forwards give; and where it would not, it refuses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from coordexp.modeling.attention import row_arguments
from coordexp.modeling.inputs import ON_HOST, VisionTower, image_arguments, row_inputs, to_device
from coordexp.modeling.load import LoadedModel
from coordexp.objective import SupervisionTensors
from coordexp.records import Segment
from support.tiny_run import gt_segments, inputs_alone, load_tiny, row_of

ATTENTIONS = ("packed", "sdpa")


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    """One model per attention, same weights. Sharpened: with flat random attention a leak would hardly show."""
    return {attention: load_tiny(attention=attention, sharpen=4.0) for attention in ATTENTIONS}


@pytest.fixture(scope="module")
def segments(models: dict[str, LoadedModel]) -> list[Segment]:
    return gt_segments(models["sdpa"])


def inputs_of(loaded: LoadedModel, segments: Sequence[Segment], with_tower: bool = True) -> dict[str, Any]:
    rope_index, tower = loaded.model.model.get_rope_index, VisionTower.from_model(loaded.model) if with_tower else None
    return row_inputs(row_of(segments), rope_index, loaded.image_token_id, loaded.attention, tower)


@torch.no_grad()
def packed_logits(loaded: LoadedModel, segments: Sequence[Segment], use_cache: bool = False) -> torch.Tensor:
    return loaded.model(**inputs_of(loaded, segments), use_cache=use_cache).logits[0]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_packed_row_equals_separate_forwards(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    assert len({segment.length for segment in segments}) > 3  # several lengths, several image sizes
    assert len({tuple(segment.model_inputs["image_grid_thw"][0].tolist()) for segment in segments}) > 3
    packed = packed_logits(models[attention], segments).split([segment.length for segment in segments])
    for together, segment in zip(packed, segments, strict=True):
        with torch.no_grad():
            by_itself = models["sdpa"].model(**inputs_alone(models["sdpa"], segment)).logits[0]
        assert by_itself.std() > 0.1, "flat logits would be equal with any attention"
        torch.testing.assert_close(together, by_itself, atol=1e-5, rtol=1e-5)


def test_with_a_cache_sdpa_leaks_between_segments(models: dict[str, LoadedModel], segments: list[Segment]) -> None:
    """Why the one forward switches the cache off. If this fails, transformers has fixed packed rows. Our own
    attention gets the segments and cannot leak."""
    length = segments[1].length
    clean = packed_logits(models["sdpa"], segments[:2])[-length:]
    leaking = packed_logits(models["sdpa"], segments[:2], use_cache=True)[-length:]
    assert (clean - leaking).abs().max() > 0.1
    ours = packed_logits(models["packed"], segments[:2], use_cache=True)[-length:]
    torch.testing.assert_close(ours, clean, atol=1e-5, rtol=1e-5)


def supervised_logits(model: Any, inputs: Any, position_N: torch.Tensor) -> torch.Tensor:
    """All logits at supervised positions, through the program that the model runs as its forward."""
    return model(forward_fn=lambda bare: bare.lm_head(bare.model(**inputs, use_cache=False)[0][0, position_N - 1]))


def test_packed_attention_refuses_cached_keys(models: dict[str, LoadedModel], segments: list[Segment]) -> None:
    loaded = models["packed"]
    with torch.no_grad():
        cache = loaded.model(**inputs_of(loaded, segments[:1]), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="use_cache=False"):
            loaded.model(**inputs_of(loaded, segments[:1]), past_key_values=cache, use_cache=True)


def test_packed_attention_refuses_wrong_lengths(models: dict[str, LoadedModel], segments: list[Segment]) -> None:
    inputs = inputs_of(models["packed"], segments[:2]) | row_arguments([7, 9])
    with torch.no_grad(), pytest.raises(ValueError, match="16"):
        models["packed"].model(**inputs, use_cache=False)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_supervised_logits_are_the_full_logits_one_position_earlier(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    loaded = models[attention]
    config: Any = loaded.model.config
    assert config.text_config.use_cache is True, "the model's own default, with which sdpa leaks"
    positions = SupervisionTensors.from_row(row_of(segments)).position_N
    with torch.no_grad():
        logits = supervised_logits(loaded.model, inputs_of(loaded, segments), positions)
    assert logits.shape == (len(positions), len(loaded.processor.tokenizer))
    torch.testing.assert_close(logits, packed_logits(loaded, segments)[positions - 1], atol=1e-5, rtol=1e-5)


def gradients(loaded: LoadedModel, segments: Sequence[Segment], checkpointing: bool) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(loaded.model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    positions = SupervisionTensors.from_row(row_of(segments)).position_N
    logits = supervised_logits(model, inputs_of(loaded, segments), positions)
    logits.logsumexp(dim=-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_places_of_images_do_what_transformers_masks_do(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    loaded, inputs = models[attention], inputs_of(models[attention], segments[:3])
    by_masks = {name: value for name, value in inputs.items() if name != "placeholder_at_M"}
    assert len(by_masks) < len(inputs)
    states, found = [], []
    for given in (inputs, by_masks):
        loaded.model.zero_grad()
        states.append(loaded.model.model(**given, use_cache=False).last_hidden_state)
        states[-1].square().mean().backward()
        found.append({name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None})
    loaded.model.zero_grad()
    assert torch.equal(*states) and found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradient_checkpointing_changes_no_gradient(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    plain = gradients(models[attention], segments[:3], checkpointing=False)
    recomputed = gradients(models[attention], segments[:3], checkpointing=True)
    assert plain.keys() == recomputed.keys() and len(plain) > 40
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_both_attentions_have_equal_gradients(models: dict[str, LoadedModel], segments: list[Segment]) -> None:
    packed, sdpa = (gradients(models[attention], segments[:3], checkpointing=False) for attention in ATTENTIONS)
    for name, gradient in sdpa.items():
        scale = max(1.0, gradient.abs().max().item())
        assert (packed[name] - gradient).abs().max() < 1e-4 * scale, name


def test_all_tensors_of_a_row_are_moved_to_the_device(models: dict[str, LoadedModel], segments: list[Segment]) -> None:
    inputs = inputs_of(models["packed"], segments[:2])
    moved = to_device(inputs, torch.device("meta"))
    stay = {"segments", "image_frames", *ON_HOST}
    assert moved.keys() == inputs.keys() and all(moved[name] is inputs[name] for name in stay)
    assert {value.device.type for name, value in moved.items() if name not in stay} == {"meta"}
    left_to_the_tower = to_device(inputs_of(models["packed"], segments[:2], with_tower=False), torch.device("meta"))
    assert left_to_the_tower["image_grid_thw"].device.type == "meta"
    assert moved["segments"].lengths == tuple(segment.length for segment in segments[:2])


def image_features(loaded: LoadedModel, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Features of each image: the tower's output, and those for the language model's first layers."""
    given: Any = loaded.model.model.get_image_features(
        inputs["pixel_values"], inputs["image_grid_thw"], **image_arguments(inputs)
    )
    return [torch.cat(parts, dim=-1) for parts in zip(given.pooler_output, *given.deepstack_features, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_images_together_equal_images_one_by_one(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    """The tensors precomputed from the image sizes equal the tower's own."""
    loaded = models[attention]
    seen: list[dict[str, Any]] = []
    blocks: Any = loaded.model.model.visual.blocks
    hook = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    given, derived = (image_features(loaded, inputs_of(loaded, segments, with_tower)) for with_tower in (True, False))
    hook.remove()
    for together, alone in zip(given, derived, strict=True):
        assert alone.std() > 0.01
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*(one["position_embeddings"] for one in seen), strict=True))
    as_given, as_derived = (one["cu_seqlens"].tolist() for one in seen)
    assert len(as_derived) == len(segments) + 1
    assert as_given == (as_derived if attention == "sdpa" else [0, as_derived[-1]])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_image_attends_only_to_itself(
    models: dict[str, LoadedModel], segments: list[Segment], attention: str
) -> None:
    loaded = models[attention]
    scale: Any = loaded.model.model.pixel_scale
    cut = (segment.model_inputs["pixel_values"] for segment in segments[:2])
    pixels = [scale(patches, torch.float32).requires_grad_() for patches in cut]
    inputs = inputs_of(loaded, segments[:2]) | {"pixel_values": torch.cat(pixels)}
    image_features(loaded, inputs)[0][0].sum().backward()
    first, second = (part.grad for part in pixels)
    assert first is not None and second is not None
    assert first[-1].any(), "the first patch sees the last one"
    assert not second.any()


def test_a_bf16_row_is_near_the_float32_row(segments: list[Segment]) -> None:
    half, full = load_tiny("bfloat16"), load_tiny("float32")
    inputs = inputs_of(half, segments[:3])
    assert half.model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = half.model(**inputs, use_cache=False).logits[0]
    reference = packed_logits(full, segments[:3])
    assert logits.isfinite().all()
    assert (logits.float() - reference).abs().max() < 0.1 * reference.abs().max()
