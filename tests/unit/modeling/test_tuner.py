"""Frozen weights stay frozen, fresh adapters equal the base, and coordinate rows get exactly their own gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from coordexp.checkpoints.folder import part_of
from coordexp.config.schema import TunerConfig
from coordexp.errors import ConfigError
from coordexp.modeling.adapter import tune
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.trainer_weights import add_offset, is_offset, output_head
from support.tiny_run import gt_segments, inputs_alone, load_tiny, tiny_checkpoint
from support.tuned_models import lora, tuned, untied_checkpoint

PARTS = [
    ("model.visual.blocks.0.attn.qkv.weight", "vit"),
    ("model.visual.patch_embed.proj.bias", "vit"),
    ("model.visual.merger.linear_fc1.weight", "aligner"),
    ("model.visual.deepstack_merger_list.0.norm.weight", "aligner"),
    ("model.language_model.layers.0.mlp.up_proj.lora_A.default.weight", "llm"),
    ("model.language_model.embed_tokens.weight", "llm"),
    ("lm_head.weight", "llm"),
    ("model.language_model.embed_tokens.coord_offset", "coord"),
    ("lm_head.coord_offset", "coord"),
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_each_parameter_belongs_to_one_part(name: str, part: str) -> None:
    assert part_of(name) == part


def trained_parts(loaded: LoadedModel) -> set[str]:
    return {part_of(name) for name, p in loaded.model.named_parameters() if p.requires_grad}


def tune_tiny(config: TunerConfig) -> LoadedModel:
    loaded = load_tiny()
    tune(loaded.model, config, loaded.vocab.coord_token_ids)
    return loaded


FREEZING = [
    ({}, ("vit", "aligner", "llm")),
    ({"freeze_vit": True}, ("aligner", "llm")),
    ({"freeze_vit": True, "freeze_aligner": True}, ("llm",)),
    ({"freeze_llm": True, "freeze_aligner": True}, ("vit",)),
]


@pytest.mark.parametrize(("keys", "parts"), FREEZING, ids=str)
def test_full_training_trains_every_weight_of_unfrozen_parts(keys: dict, parts: tuple[str, ...]) -> None:
    model = tune_tiny(TunerConfig(**keys)).model
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if part_of(n) in parts
    }


@pytest.mark.parametrize(("keys", "parts"), FREEZING, ids=str)
def test_adapters_are_on_every_linear_layer_of_unfrozen_parts(keys: dict, parts: tuple[str, ...]) -> None:
    model = tune_tiny(lora(**keys)).model
    adapted = {name.rpartition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    plain = load_tiny().model
    linear = {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert adapted == {name for name in linear if part_of(name) in parts}
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" not in n and "coord_offset" not in n)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_adapters_do_not_cast_their_input_under_autocast_and_compute_the_same() -> None:
    found = {}
    for casts in (False, True):
        model = tuned(lora(lora_dropout=0.0), dtype="bfloat16").model
        layer: Any = next(one for one in model.modules() if hasattr(one, "lora_A"))
        torch.manual_seed(0)
        if casts:
            layer.cast_input_dtype_enabled = True
        seen = []
        layer.lora_A["default"].register_forward_hook(lambda module, given, out, seen=seen: seen.append(given[0].dtype))
        inputs = torch.randn(5, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(inputs)
        out.float().sum().backward()
        layer(inputs)  # without autocast the cast is needed
        assert seen == [torch.float32 if casts else torch.bfloat16, torch.float32]
        found[casts] = [out, inputs.grad, *(one.grad for one in layer.parameters() if one.grad is not None)]
    assert len(found[True]) == 4
    assert all(torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True))


def test_coordinate_rows_are_trained_even_if_every_part_is_frozen() -> None:
    everything = {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": True}
    assert trained_parts(tune_tiny(lora(**everything))) == {"coord"}


@pytest.mark.parametrize(("checkpoint", "tables"), [(tiny_checkpoint, 1), (untied_checkpoint, 2)])
def test_a_tied_table_has_one_offset_under_two_names(checkpoint, tables: int) -> None:
    loaded = tuned(lora(), checkpoint=checkpoint())
    assert sum(is_offset(name) for name, _ in loaded.model.named_parameters()) == tables
    model: Any = loaded.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.coord_offset is head.coord_offset) == (tables == 1)


REFUSED = [
    ({"target_modules": ["q_prj"]}, r"target_modules: .*'q_prj'"),
    ({"target_modules": ["norm"]}, "is a .*; only linear layers"),
    ({"target_modules": ["lm_head"]}, "lm_head is the embedding or the head"),
    ({"modules_to_save": ["embed_tokens"]}, "embed_tokens is the embedding or the head"),
    ({"target_modules": ["all-linear", "q_proj"]}, "all-linear"),
    ({"target_modules": ["q_proj"], "freeze_llm": True, "train_coord_rows": False}, "tuner.freeze_llm freezes"),
    ({"modules_to_save": ["visual.posembed"]}, "tuner.modules_to_save: .*'visual.posembed'"),
    ({"modules_to_save": ["language_model"]}, "language_model has model.language_model.embed_tokens.weight"),
    ({"modules_to_save": ["visual"], "freeze_aligner": True}, "model.visual has weights that tuner.freeze_aligner"),
    ({"modules_to_save": ["language_model.layers"]}, r"such as model\.language_model\.layers\.0"),
    ({"modules_to_save": ["rotary_emb"]}, "rotary_emb has no weights"),
    ({"modules_to_save": ["mlp"], "target_modules": ["gate_proj"]}, "target_modules: every module .* trained whole"),
]


@pytest.mark.parametrize(("keys", "says"), REFUSED, ids=lambda value: str(value))
def test_invalid_target_modules_are_refused(keys: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tune_tiny(lora(**keys))


def test_a_module_inside_one_that_is_trained_whole_is_trained_with_it() -> None:
    model = tune_tiny(lora(modules_to_save=["visual.merger", "visual.merger.linear_fc1"])).model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad and ".visual.merger." in name}
    start = "model.visual.merger.modules_to_save.default"
    layers = ("linear_fc1", "linear_fc2", "norm")
    assert trained == {f"{start}.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


def test_nothing_left_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="train"):
        tune_tiny(TunerConfig(freeze_vit=True, freeze_aligner=True, freeze_llm=True))


def row(loaded: LoadedModel) -> dict[str, Any]:
    return inputs_alone(loaded, gt_segments(loaded, 1)[0])


def test_a_fresh_adapter_with_its_zero_offset_changes_nothing() -> None:
    plain, adapted = load_tiny(), tune_tiny(lora(lora_dropout=0.0))
    with torch.no_grad():
        assert torch.equal(plain.model(**row(plain)).logits, adapted.model(**row(adapted)).logits)


def loss(loaded: LoadedModel) -> torch.Tensor:
    inputs = row(loaded)
    logits = loaded.model(**inputs).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
def test_an_offsets_gradient_equals_the_tables_at_its_rows(checkpoint, checkpointing: bool) -> None:
    """Full training differentiates the whole tables; at the base, the offset's gradient is the slice of it. With a tied
    head that is the sum of what flows into the embedding and into the head."""
    full = load_model(checkpoint(), "float32")
    loss(full).backward()
    adapted = load_model(checkpoint(), "float32")
    tune(adapted.model, lora(lora_dropout=0.0), adapted.vocab.coord_token_ids)
    if checkpointing:
        adapted.model.gradient_checkpointing_enable()
        adapted.model.train()
    loss(adapted).backward()
    rows = list(adapted.vocab.coord_token_ids)
    for name, offset in adapted.model.named_parameters():
        if not is_offset(name):
            continue
        table: Any = full.model.get_submodule(name.rpartition(".")[0]).weight
        assert table.grad[rows].abs().max() > 1e-4
        torch.testing.assert_close(offset.grad, table.grad[rows], atol=1e-7, rtol=1e-4)
        assert adapted.model.get_submodule(name.rpartition(".")[0]).weight.grad is None


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
def test_the_objectives_head_equals_the_models_own(checkpoint) -> None:
    loaded = tuned(lora(), checkpoint=checkpoint())
    head = output_head(loaded.model)
    assert head.offset_BH is not None
    hidden = torch.randn(5, head.weight_VH.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded.model.lm_head(hidden)
        ids_B = torch.tensor(loaded.vocab.coord_token_ids)
        whole_VH = add_offset(head.weight_VH, ids_B, head.offset_BH)
        torch.testing.assert_close(hidden @ whole_VH.T, logits, atol=1e-5, rtol=1e-5)
        logits_NV = hidden @ head.weight_VH.T
        logits_NV[:, ids_B] += hidden @ head.offset_BH.T
        torch.testing.assert_close(logits_NV, logits, atol=1e-5, rtol=1e-5)
    plain = output_head(load_tiny().model)
    assert plain.offset_BH is None


def test_a_copy_of_a_model_has_its_own_offset() -> None:
    loaded = tuned(lora(), seed=1)
    twin: Any = copy.deepcopy(loaded.model)
    with torch.no_grad():
        before = loaded.model(**row(loaded)).logits
        twin.get_output_embeddings().coord_offset.zero_()  # the embedding's too: they are one, as asserted below
        assert torch.equal(loaded.model(**row(loaded)).logits, before)
        assert not torch.equal(twin(**row(loaded)).logits, before)
    assert twin.get_input_embeddings().coord_offset is twin.get_output_embeddings().coord_offset
