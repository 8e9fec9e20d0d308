"""Reading a checkpoint without torch gives the same values as transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer

from coordexp.checkpoints.describe import describe
from coordexp.checkpoints.folder import Checkpoint, part_of, processor_rule
from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.files import asset
from coordexp.errors import CheckpointError, VocabError
from coordexp.modeling.adapter import tune
from coordexp.modeling.cpu_products import is_linear
from coordexp.modeling.load import load_model
from coordexp.records import GTObject
from support.config_samples import edit_json
from support.qwen_tokenizer import qwen_tokenizer
from support.tiny_run import tiny_checkpoint
from support.tuned_models import lora, untied_checkpoint

ANSWER = serialize_objects(
    [GTObject("Übergröße 3 🙂 cat", "bbox_2d", (0, 7, 42, 999)), GTObject("x", "poly", (1,) * 6)]
)


def qwen(folder: Path) -> Path:
    """A folder with the real Qwen's tokenizer, as transformers saves it."""
    qwen_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    return folder


def vocab_of(folder: Path) -> CoordVocab:
    return Checkpoint.open(folder).read_vocab()


@pytest.mark.parametrize("which", ["tiny", "demo", "qwen"])
def test_the_vocabulary_equals_transformers(which: str, tmp_path: Path) -> None:
    make = {"tiny": tiny_checkpoint, "demo": lambda: asset("checkpoints/demo-stage1"), "qwen": lambda: qwen(tmp_path)}
    folder = make[which]()
    found, expected = vocab_of(folder), CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(folder))
    assert found.pieces == expected.pieces and found.coord_token_ids == expected.coord_token_ids
    assert (found.eos_id, found.control_ids, found.reserved_ids) == (
        expected.eos_id, expected.control_ids, expected.reserved_ids
    )  # fmt: skip
    assert found.encode(ANSWER) == expected.encode(ANSWER) == found.encode_answer(ANSWER)


@pytest.mark.parametrize(
    ("older", "limits"),
    [({}, (4096, 200704)), ({"max_pixels": 65536}, (4096, 65536)), ({"min_pixels": 8192}, (8192, 200704))],
)
def test_the_limits_of_images_equal_the_processors(
    older: dict[str, int], limits: tuple[int, int], tmp_path: Path
) -> None:
    """``max_pixels`` next to ``size``, as for earlier Qwen models, overrides it."""
    folder = shutil.copytree(asset("checkpoints/demo-stage1"), tmp_path / "model")
    edit_json(folder / "processor_config.json", **{f"image_processor__{key}": value for key, value in older.items()})
    rule, size = processor_rule(folder), AutoProcessor.from_pretrained(folder).image_processor.size
    assert (rule.min_pixels, rule.max_pixels) == limits == (size["shortest_edge"], size["longest_edge"])


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_and_parts_equal_the_models(tied: bool) -> None:
    folder = tiny_checkpoint() if tied else untied_checkpoint()
    info, model = describe(folder), load_model(folder, "float32").model
    parameters: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameters[part_of(name)] = parameters.get(part_of(name), 0) + parameter.numel()
    linear = {
        (part_of(name), "attn.proj" if name.endswith(".proj") else name.rpartition(".")[2])
        for name, module in model.named_modules()
        if is_linear(module) and name != "lm_head"
    }
    text: Any = model.config.text_config
    assert info.parameters == parameters
    assert {(part, name) for part, names in info.linear_modules.items() for name in names} == linear
    assert (info.layers, info.hidden, info.vocab_rows) == (text.num_hidden_layers, text.hidden_size, text.vocab_size)
    assert info.tied_head is tied and info.coord_tokens == "yes"


def test_every_linear_layer_that_is_listed_can_get_an_adapter() -> None:
    """``proj`` alone is also the patch embedding's, which cannot."""
    listed = sorted({name for names in describe(tiny_checkpoint()).linear_modules.values() for name in names})
    assert listed[0] == "attn.proj" and len(listed) == 11
    loaded = load_model(tiny_checkpoint(), "float32")
    tune(loaded.model, lora(target_modules=listed), loaded.vocab.coord_token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def in_shards(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {name: f"model-0000{1 + k % 2}-of-00002.safetensors" for k, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_a_sharded_checkpoint_is_one_model(folder: Path) -> None:
    whole = describe(folder)
    in_shards(folder)
    assert describe(folder) == whole
    shutil.copy(tiny_checkpoint() / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"which transformers would read, and .*, whose files vLLM"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        describe(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model-00001-of-00002.safetensors"]}')
    with pytest.raises(CheckpointError, match="has no weight_map of file names"):
        describe(folder)


def test_a_broken_tokenizer_is_a_clear_error(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if "coord_7|" not in token["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(VocabError, match=r"expand-vocab"):
        vocab_of(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer"):
        vocab_of(folder)


@pytest.mark.parametrize(
    ("processor", "says"),
    [([1], "no attribute 'get'"), ({"size": 3}, "no attribute 'get'"),
     ({"patch_size": "8", "merge_size": "2", "min_pixels": 1, "max_pixels": 2}, "can't multiply"),
     ({"patch_size": 8, "merge_size": 2, "min_pixels": 1, "max_pixels": "many"}, "'many'"),
     ({"patch_size": 8, "merge_size": 2, "min_pixels": 9, "max_pixels": 2}, "min_pixels=9")],
)  # fmt: skip
def test_sizes_of_images_that_cannot_be_used_name_their_file(processor: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    with pytest.raises(CheckpointError, match=rf"sizes cannot be used \(.*{says}.*restore processor_config.json"):
        processor_rule(tmp_path)


def test_adapters_that_belong_to_each_other_are_refused(tmp_path: Path) -> None:
    for own, other in (("a", "b"), ("b", "a")):
        (tmp_path / own).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / other)}
        (tmp_path / own / "adapter_config.json").write_text(json.dumps(settings))
    says = rf"{tmp_path}/a: its adapters belong, by way of {tmp_path}/b, to its own"
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path / "a")


def test_a_length_that_no_number_holds_is_unknown(folder: Path) -> None:
    edit_json(folder / "config.json", text_config__max_position_embeddings=10**400)
    assert Checkpoint.open(folder).num_positions is None


@pytest.mark.parametrize("part", [{"text_config": 1.5}, {"quantization_config": "fp8"},
                                  {"text_config": {"quantization_config": [1]}}])  # fmt: skip
def test_settings_that_are_no_objects_are_refused(part: dict[str, Any], folder: Path) -> None:
    edit_json(folder / "config.json", **part)
    with pytest.raises(CheckpointError, match=r"in its config\.json is not an object"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("named", "shown"),
    [("all-linear", ("all-linear",)), (["q_proj", "v_proj"], ("q_proj", "v_proj")), (None, ()), (3, ("3",))],
)
def test_modules_of_adapters_are_listed_as_peft_names_them(named: Any, shown: tuple[str, ...], tmp_path: Path) -> None:
    settings = {"base_model_name_or_path": str(tiny_checkpoint()), "target_modules": named, "modules_to_save": named}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    adapter = describe(tmp_path).adapter
    assert adapter is not None and adapter.target_modules == adapter.modules_to_save == shown


def test_a_special_token_of_half_a_character_is_none(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", extra_special_tokens=["\ud800"])
    assert vocab_of(folder).control_ids == vocab_of(tiny_checkpoint()).control_ids
