"""A LoRA run's folder restores what was trained; pushed weights are those of a plain checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from coordexp.checkpoints.folder import CONFIG, OFFSETS, WEIGHTS, Checkpoint, is_adapter_folder
from coordexp.errors import CheckpointError
from coordexp.modeling.adapter import load_adapter, save_adapter
from coordexp.modeling.load import LoadedModel, export_checkpoint, load_model, merge_checkpoint, write_checkpoint
from coordexp.modeling.trainer_weights import TrainerWeights
from support.tiny_run import gt_segments, inputs_alone, load_tiny, tiny_checkpoint
from support.tuned_models import TUNERS, lora, pushed, randomise, trained, tuned, untied_checkpoint

# A head of its own makes a difference where its rows are trained.
KINDS = [(name, tiny_checkpoint) for name in TUNERS] + [(name, untied_checkpoint) for name in TUNERS if "rows" in name]
of_each_kind = pytest.mark.parametrize(
    ("keys", "checkpoint"),
    [(TUNERS[name], checkpoint) for name, checkpoint in KINDS],
    ids=[f"{name}, {checkpoint.__name__}" for name, checkpoint in KINDS],
)


@of_each_kind
def test_saved_adapters_are_restored_bit_for_bit(keys: dict, checkpoint: Callable[[], Path], tmp_path: Path) -> None:
    model = tuned(lora(**keys), dtype="bfloat16", checkpoint=checkpoint()).model
    save_adapter(model, tmp_path)
    again = tuned(lora(**keys), dtype="bfloat16", checkpoint=checkpoint(), seed=8).model
    assert any(not torch.equal(value, trained(model)[name]) for name, value in trained(again).items())
    load_adapter(again, tmp_path)
    saved, restored = trained(model), trained(again)
    assert saved.keys() == restored.keys() and all(torch.equal(saved[name], restored[name]) for name in saved)


@of_each_kind
def test_a_merged_checkpoint_equals_the_pushed_weights(
    keys: dict, checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    loaded = tuned(lora(**keys), checkpoint=checkpoint())
    save_adapter(loaded.model, tmp_path / "run")
    merge_checkpoint(tmp_path / "run", tmp_path / "merged")
    merged = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {"config.json", "tokenizer.json"}
    expected = pushed(loaded.model)
    assert expected.keys() == dict(merged.named_parameters()).keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in merged.named_parameters())


@pytest.mark.parametrize("use_dora", [False, True])
def test_peft_reads_and_merges_the_adapters_as_its_own(use_dora: bool, tmp_path: Path) -> None:
    loaded = tuned(lora(use_dora=use_dora, train_coord_rows=False))
    save_adapter(loaded.model, tmp_path)
    adapted: Any = PeftModel.from_pretrained(load_tiny().model, tmp_path)
    theirs = adapted.merge_and_unload()
    for name, tensor in pushed(loaded.model).items():
        torch.testing.assert_close(theirs.get_parameter(name), tensor, atol=1e-6, rtol=1e-5)


def test_adapters_on_an_adapter_folder_find_the_base(tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path / "first")
    second = tuned(lora(use_dora=True), checkpoint=tmp_path / "first")
    save_adapter(second.model, tmp_path / "second")
    opened = Checkpoint.open(tmp_path / "second")
    assert opened.parent is not None and opened.parent.path == tmp_path / "first"
    assert opened.base == tiny_checkpoint()
    again = load_model(tmp_path / "second", "float32").model
    assert all(torch.equal(again.get_parameter(name), value) for name, value in pushed(second.model).items())


def test_export_merges_too(tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", "bfloat16")
    weights = [*(tmp_path / "run").glob("*.safetensors"), *(tmp_path / "out").glob("*.safetensors")]
    assert {path.stat().st_mode for path in weights} == {(tmp_path / "out" / "config.json").stat().st_mode}
    assert not is_adapter_folder(tmp_path / "out")
    exported = load_model(tmp_path / "out", "float32").model
    reference = load_model(tmp_path / "run", "bfloat16").model
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name).float(), atol=0, rtol=0)


@pytest.mark.parametrize("named", [False, True], ids=["its base", "--base"])
def test_merged_weights_of_another_number_type_are_rounded_once(named: bool, tmp_path: Path) -> None:
    """A float32 base that is rounded to bfloat16 before its adapters are added would be rounded twice."""
    base = load_tiny()
    for parameter in base.model.parameters():
        parameter.data += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    write_checkpoint(base.model, base.processor, base.card, tmp_path / "base")
    save_adapter(tuned(lora(), checkpoint=tmp_path / "base").model, tmp_path / "run")
    merge_checkpoint(tmp_path / "run", tmp_path / "exact")
    merge_checkpoint(tmp_path / "run", tmp_path / "out", tmp_path / "base" if named else None, "bfloat16")
    exact, out = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "out"))
    assert all(torch.equal(out[name], value.bfloat16()) for name, value in exact.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {part["dtype"] for part in (config, config["text_config"], config["vision_config"])} == {"bfloat16"}


def cut(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:100])


def configured(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


def other_width(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[name] = torch.zeros(4, 7)
    save_file(tensors, folder / WEIGHTS)


def without_b(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if "0.mlp.up_proj.lora_B" not in name}
    save_file(kept, folder / WEIGHTS)


def other_layers(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace("layers.1.", "layers.9."): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def own_embedding(folder: Path) -> None:
    """As peft writes it for ``modules_to_save: [embed_tokens]``; with a tied head it leaves that as it was."""
    model: Any = load_tiny().model
    table = model.get_input_embeddings().weight.detach()
    name = "base_model.model.model.language_model.embed_tokens.weight"
    save_file(load_file(folder / WEIGHTS) | {name: table + 1}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "says"),
    [(own_embedding, "embed_tokens.weight is of the embedding or the head alone, which are one matrix"),
     (lambda folder: configured(folder, use_dora=True), "use_dora: true, and adapter_model.* has no magnitudes"),
     (lambda folder: configured(folder, peft_type="IA3"), "peft_type is IA3, and CoordExp reads LORA"),
     (lambda folder: cut(folder, WEIGHTS), "cannot be read"),
     (lambda folder: cut(folder, OFFSETS), "cannot be read"),
     (lambda folder: (folder / WEIGHTS).unlink(), f"has {CONFIG} but no {WEIGHTS}"),
     (lambda folder: configured(folder, rank_pattern={"q_proj": 2}), "sets rank_pattern, which CoordExp cannot merge"),
     (lambda folder: configured(folder, init_lora_weights="pissa"), "init_lora_weights: pissa, which CoordExp cannot"),
     (lambda folder: configured(folder, bias="all", init_lora_weights="olora"), "sets bias, init_lora_weights: olora"),
     (lambda folder: cut(folder, CONFIG), "adapter files cannot be read"),
     (lambda folder: (folder / CONFIG).write_text("[" * 100_000), "adapter files cannot be read .*recursion"),
     (lambda folder: (folder / CONFIG).write_text('{"base_model_name_or_path": ["a"]}'), f"in {CONFIG} is not text"),
     (lambda folder: (folder / CONFIG).write_text("[]"), f"in {CONFIG} is not text"),
     (lambda folder: configured(folder, r=9), "no two matrices of rank 9"),
     (without_b, "for base_model.model.model.language_model.layers.0.mlp.up_proj; restore"),
     (other_width, "up_proj.weight fits no weight of the base model"),
     (other_layers, "layers.9.mlp.down_proj.weight fits no weight of the base model")],
)  # fmt: skip
def test_a_failed_merge_is_one_clear_error(damage: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_model(tmp_path, "float32")
    assert str(tmp_path) in str(caught.value)


def test_rows_of_a_tied_head_do_not_fit_a_head_of_its_own(tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path / "run")
    with pytest.raises(CheckpointError, match="rows are of a model whose head is the embedding"):
        merge_checkpoint(tmp_path / "run", tmp_path / "out", base=untied_checkpoint())


@pytest.mark.parametrize(
    "other", [{"use_dora": True}, {"train_coord_rows": False}, {"target_modules": ["q_proj"]}], ids=str
)
def test_resuming_with_another_tuner_is_refused(other: dict, tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path)
    model = tuned(lora(**other)).model
    before = trained(model)
    with pytest.raises(CheckpointError, match="tuner"):
        load_adapter(model, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in trained(model).items()), "nothing was partly loaded"


def test_saving_uses_a_given_gathered_state(tmp_path: Path) -> None:
    """Under FSDP the model itself holds shards."""
    model = tuned(lora()).model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    randomise(model, seed=99)
    save_adapter(model, tmp_path, state)
    load_adapter(model, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in trained(model).items())


# -- pushed weights ----------------------------------------------------------------------------------------------------


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
    return loaded.model(**inputs_alone(loaded, gt_segments(loaded, 1)[0])).logits[0]


def test_a_plain_model_gives_its_own_weights_without_copies() -> None:
    model = load_tiny().model
    with TrainerWeights(model).full() as tensors:
        for name, tensor in tensors:
            assert tensor.data_ptr() == model.get_parameter(name).data_ptr() and not tensor.requires_grad
    assert TrainerWeights(model).adapter() is None


@of_each_kind
def test_a_plain_model_with_merged_weights_equals_the_tuned_one(keys: dict, checkpoint) -> None:
    """Their names are those of the checkpoint, in the model's order; and the trained weights are as they were."""
    loaded = tuned(lora(**keys), checkpoint=checkpoint())
    plain = load_model(checkpoint(), "float32")
    names = [name for name, _ in plain.model.named_parameters()]
    with safe_open(checkpoint() / "model.safetensors", "pt") as file:
        assert set(names) == set(file.keys())
    untouched, before = snapshot(loaded.model), logits_of(plain)
    tensors = pushed(loaded.model)
    TrainerWeights(loaded.model).adapter()
    assert_untouched(loaded.model, untouched)
    assert TrainerWeights(loaded.model).names() == names == list(tensors)
    assert not plain.model.load_state_dict(tensors, strict=False).unexpected_keys
    assert (before - logits_of(plain)).abs().max() > 0.1, "the tuned weights must differ for this test"
    torch.testing.assert_close(logits_of(plain), logits_of(loaded), atol=2e-5, rtol=1e-4)


def test_training_weights_are_unchanged_after_a_failed_push() -> None:
    model = tuned(lora(use_dora=True)).model
    before = snapshot(model)
    with pytest.raises(ConnectionError), TrainerWeights(model).full() as tensors:
        next(tensors)
        assert torch.is_grad_enabled(), "a paused iterator must not keep gradients off"
        raise ConnectionError
    assert_untouched(model, before)
    with pytest.raises(StopIteration):
        next(tensors)


def test_a_bf16_model_is_merged_in_float32_and_rounded_once() -> None:
    half = tuned(lora(), dtype="bfloat16").model
    assert {p.dtype for p in half.parameters() if p.requires_grad} == {torch.float32}
    tensors = pushed(half)
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
    adapter = TrainerWeights(model).adapter()
    assert adapter is not None
    reference = {f"base_model.model.{name}": value for name, value in get_peft_model_state_dict(model).items()}
    assert dict(adapter.tensors).keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in adapter.tensors)
    assert (adapter.config["r"], adapter.config["lora_alpha"], adapter.config["use_dora"]) == (4, 8, use_dora)
    assert isinstance(adapter.config["target_modules"], list)


def test_trained_weights_outside_the_adapter_are_named() -> None:
    adapter = TrainerWeights(tuned(lora(modules_to_save=["visual.pos_embed"])).model).adapter()
    assert adapter is not None and adapter.outside_llm
    assert [name for name, _ in adapter.changed] == [
        "model.visual.pos_embed.weight", "model.language_model.embed_tokens.weight"
    ]  # fmt: skip
    llm_only = TrainerWeights(tuned(lora(freeze_vit=True, freeze_aligner=True, train_coord_rows=False)).model).adapter()
    assert llm_only is not None and not llm_only.outside_llm and llm_only.changed == ()


def test_an_adapter_of_a_model_that_has_adapters_says_so(tmp_path: Path) -> None:
    """Engines load the plain model below both: with the newer adapter alone, they would answer as another model."""
    keys = {"freeze_vit": True, "freeze_aligner": True, "train_coord_rows": False}
    first = tuned(lora(**keys))
    save_adapter(first.model, tmp_path)
    second = TrainerWeights(tuned(lora(**keys), checkpoint=tmp_path).model).adapter()
    plain = TrainerWeights(first.model).adapter()
    assert second is not None and plain is not None
    assert (is_adapter_folder(second.base), is_adapter_folder(plain.base)) == (True, False)
