"""A LoRA run's folder restores what was trained bit for bit, and merges into a plain checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from coordexp.checkpoints.folder import CONFIG, OFFSETS, WEIGHTS, Checkpoint, is_adapter_folder
from coordexp.errors import CheckpointError
from coordexp.modeling.adapter import has_adapter, load_adapter, save_adapter
from coordexp.modeling.load import export_checkpoint, load_model, load_vocab, merge_checkpoint
from coordexp.modeling.weights import LearnerWeights
from support.tiny_run import load_tiny, tiny_checkpoint
from support.tuned_models import TUNERS, lora, randomise, tuned, untied_checkpoint


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def pushed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with LearnerWeights(model).full() as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
@pytest.mark.parametrize("keys", TUNERS.values(), ids=TUNERS)
def test_saved_adapters_are_restored_bit_for_bit(keys: dict, checkpoint: Callable[[], Path], tmp_path: Path) -> None:
    model = tuned(lora(**keys), dtype="bfloat16", checkpoint=checkpoint()).model
    save_adapter(model, tmp_path)
    again = tuned(lora(**keys), dtype="bfloat16", checkpoint=checkpoint(), seed=8).model
    assert any(not torch.equal(value, trainable(model)[name]) for name, value in trainable(again).items())
    load_adapter(again, tmp_path)
    saved, restored = trainable(model), trainable(again)
    assert saved.keys() == restored.keys() and all(torch.equal(saved[name], restored[name]) for name in saved)


@pytest.mark.parametrize("checkpoint", [tiny_checkpoint, untied_checkpoint], ids=["tied", "untied"])
@pytest.mark.parametrize("keys", TUNERS.values(), ids=TUNERS)
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


def test_peft_reads_the_adapters_as_its_own(tmp_path: Path) -> None:
    loaded = tuned(lora(use_dora=True, train_coord_rows=False))
    save_adapter(loaded.model, tmp_path)
    adapted: Any = PeftModel.from_pretrained(load_tiny().model, tmp_path)
    theirs = adapted.merge_and_unload()
    for name, tensor in pushed(loaded.model).items():
        torch.testing.assert_close(theirs.get_parameter(name), tensor, atol=1e-6, rtol=1e-5)


def test_an_adapter_folder_loads_as_the_merged_model(tmp_path: Path) -> None:
    """``coordexp evaluate`` and ``model.model`` take a LoRA run's folder."""
    loaded = tuned(lora())
    save_adapter(loaded.model, tmp_path)
    assert Checkpoint.open(tmp_path).base == tiny_checkpoint()
    assert load_vocab(tmp_path).coord_token_ids == loaded.vocab.coord_token_ids
    again = load_model(tmp_path, "float32")
    assert not has_adapter(again.model)
    assert all(torch.equal(again.model.get_parameter(name), value) for name, value in pushed(loaded.model).items())


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


def test_the_base_of_an_adapter_can_be_overridden(tmp_path: Path) -> None:
    base = shutil.copytree(tiny_checkpoint(), tmp_path / "base")
    loaded = tuned(lora(), checkpoint=base)
    save_adapter(loaded.model, tmp_path / "run")
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"/base,.*--base"):
        load_model(tmp_path / "run", "float32")
    merged = load_model(merge_checkpoint(tmp_path / "run", tmp_path / "out", base=tmp_path / "moved"), "float32").model
    assert all(torch.equal(merged.get_parameter(name), value) for name, value in pushed(loaded.model).items())


def cut(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:100])


def rank_pattern(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"rank_pattern": {"q_proj": 2}}))


def other_width(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[name] = torch.zeros(4, 7)
    save_file(tensors, folder / WEIGHTS)


def other_layers(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace("layers.1.", "layers.9."): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "says"),
    [(lambda folder: cut(folder, WEIGHTS), "cannot be read"),
     (lambda folder: cut(folder, OFFSETS), "cannot be read"),
     (lambda folder: (folder / WEIGHTS).unlink(), f"has {CONFIG} but no {WEIGHTS}"),
     (rank_pattern, "sets rank_pattern, which CoordExp cannot merge"),
     (lambda folder: cut(folder, CONFIG), "adapter files cannot be read"),
     (other_width, "up_proj.weight fits no weight of the base model"),
     (other_layers, "layers.9.mlp.down_proj.weight fits no weight of the base model")],
)  # fmt: skip
def test_a_failed_merge_is_one_clear_error(damage: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_model(tmp_path, "float32")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "other", [{"use_dora": True}, {"train_coord_rows": False}, {"target_modules": ["q_proj"]}], ids=str
)
def test_resuming_with_another_tuner_is_refused(other: dict, tmp_path: Path) -> None:
    save_adapter(tuned(lora()).model, tmp_path)
    model = tuned(lora(**other)).model
    before = trainable(model)
    with pytest.raises(CheckpointError, match="tuner"):
        load_adapter(model, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in trainable(model).items()), (
        "nothing was partly loaded"
    )


def test_saving_uses_a_given_gathered_state(tmp_path: Path) -> None:
    """Under FSDP the model itself holds shards."""
    model = tuned(lora()).model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    randomise(model, seed=99)
    save_adapter(model, tmp_path, state)
    load_adapter(model, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in trainable(model).items())
