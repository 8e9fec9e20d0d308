"""A checkpoint loads whole or not at all; the one encoder gives the same prompt tokens everywhere."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordexp.data.jsonl import read_jsonl
from coordexp.errors import CheckpointError, CoordExpError, DataError, VocabError
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel, export_checkpoint, load_model, load_processor
from support.config_samples import edit_json
from support.tiny_run import PROMPT, encoder_of, tiny_checkpoint, tiny_scenes

Damage = Callable[[Path], Any]


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def written(text: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(text)


def configured(**keys: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **keys)


CHEAP: list[tuple[Damage, type[CoordExpError], str]] = [
    (shutil.rmtree, CheckpointError, "no such folder"),
    (without("config.json"), CheckpointError, "no config.json"),
    (written("{"), CheckpointError, "configuration cannot be read"),
    (
        written('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        CheckpointError,
        "configuration cannot be read .*recursion",
    ),
    (configured(model_type="qwen2_vl"), CheckpointError, "'qwen2_vl'"),
    (without("tokenizer.json"), CheckpointError, "no tokenizer.json"),
    (configured(text_config__vocab_size=600), VocabError, "600 embedding rows"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


@pytest.mark.parametrize(("damage", "error", "says"), CHEAP, ids=[says for *_, says in CHEAP])
def test_errors_are_found_without_reading_weights(
    folder: Path, damage: Damage, error: type[CoordExpError], says: str
) -> None:
    damage(folder)
    if folder.exists():
        (folder / "model.safetensors").unlink()  # reading weights first would raise another error
    with pytest.raises(error, match=says) as caught:
        load_model(folder, "float32")
    assert str(folder) in str(caught.value)


def cut_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def weights_as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


UP_PROJ, EMBED = "model.language_model.layers.1.mlp.up_proj.weight", "model.language_model.embed_tokens.weight"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INCOMPLETE: list[tuple[Damage, str]] = [
    (configured(quantization_config=FP8), r"its weights are quantised \(fp8\), which only vLLM reads"),
    (cut_weights, "weights cannot be read"),
    (weights(lambda state: state.update({"lm_head.weight": 2 * state[EMBED]})),
     "lm_head.weight of other values; set tie_word_embeddings to false"),
    (without("model.safetensors"), "weights cannot be read"),
    (weights_as_pickle, "weights cannot be read .*model.safetensors"),
    (weights(lambda state: state.pop(UP_PROJ)), f"1 weights are missing, {UP_PROJ}"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), INCOMPLETE, ids=[says for _, says in INCOMPLETE])
def test_incomplete_weights_are_refused(folder: Path, damage: Damage, says: str) -> None:
    """transformers would start a missing weight at random, with a line in the log."""
    damage(folder)
    with pytest.raises(CheckpointError, match=says):
        load_model(folder, "float32")


@pytest.mark.parametrize("part", ["", "image_processor__"], ids=["processor", "image processor"])
def test_python_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "AutoImageProcessor" if part else "AutoProcessor"
    key = "image_processor_type" if part else "processor_class"
    edit_json(folder / "processor_config.json", **{f"{part}{key}": "Evil", f"{part}auto_map": {kind: "evil.Evil"}})
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    with pytest.raises(CheckpointError, match=r"its processor is Python code \(auto_map\), which is not run"):
        load_processor(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["evil/kernel", "flash_attention_2"])
def test_attention_is_not_a_checkpoints_choice(name: str, folder: Path) -> None:
    """transformers fetches and runs code of the hub by such a name, or fails without a package."""
    for part in ("", "text_config__", "vision_config__"):
        edit_json(folder / "config.json", **{f"{part}_attn_implementation": name, f"{part}attn_implementation": name})
    model: Any = load_model(folder, "float32").model
    assert model.config.text_config._attn_implementation == "coordexp_packed"


def test_sizes_that_no_machine_counts_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", text_config__vocab_size=10**4000)
    with pytest.raises(CheckpointError, match="its weights cannot be read"):
        load_model(folder, "float32")


def test_a_missing_processor_is_an_error(folder: Path) -> None:
    (folder / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match="processor"):
        load_processor(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_requested_dtype(dtype: str) -> None:
    loaded = load_model(tiny_checkpoint(), dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}


def test_a_saved_model_does_not_name_our_attention(tmp_path: Path) -> None:
    """vLLM and plain transformers read the folder too, and know nothing of packed attention."""
    load_model(tiny_checkpoint(), "float32", "packed").model.save_pretrained(tmp_path)
    assert not [p.name for p in tmp_path.glob("*.json") if "coordexp" in p.read_text()]


def test_settings_of_generation_that_cannot_be_saved_do_not_end_a_run(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers reads a temperature without sampling, and refuses to write it: at the first save, hours later."""
    ids = {"eos_token_id": [3, 4], "pad_token_id": 4}
    (folder / "generation_config.json").write_text(json.dumps(ids | {"do_sample": False, "temperature": 0.7}))
    export_checkpoint(folder, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    saved.pop("transformers_version")
    assert saved == ids
    assert "generation_config.json contradicts itself (temperature)" in caplog.text


@pytest.mark.parametrize("package", ["coordexp.modeling", "coordexp.training"])
def test_torchvision_is_prepared_before_any_module_imports_transformers(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a CPU torch, transformers cannot be imported otherwise; the import order must not matter."""
    prepared: list[str] = []
    monkeypatch.setattr("coordexp.cpu_wheels.ensure_torchvision", lambda: prepared.append(package))
    importlib.reload(importlib.import_module(package))
    assert set(prepared) == {package}


# -- prompts and images ------------------------------------------------------------------------------------------------


def test_request_has_image_tokens_and_messages(loaded: LoadedModel) -> None:
    record = read_jsonl(tiny_scenes())[0]
    request = encoder_of(loaded).encode(record)
    assert (request.sample_id, request.image) == (record.sample_id, record.image)
    assert request.messages[0]["content"][0] == {"type": "image", "image": str(record.image)}
    _, rows, columns = request.model_inputs["image_grid_thw"][0].tolist()
    assert (rows, columns) == (record.height // 8, record.width // 8)
    assert len(request.model_inputs["pixel_values"]) == rows * columns
    assert request.prompt_token_ids.count(loaded.image_token_id) == rows * columns // 4
    assert PROMPT in loaded.vocab.decode(request.prompt_token_ids)


def test_prompt_and_system_message_are_encoded(loaded: LoadedModel) -> None:
    record = read_jsonl(tiny_scenes())[0]
    texts = {
        loaded.vocab.decode(PromptEncoder(loaded.processor, prompt, system).encode(record).prompt_token_ids)
        for prompt, system in ((None, None), ("Find cats.", None), ("Find cats.", "Be brief."))
    }
    assert len(texts) == 3
    assert sum("Find cats." in text for text in texts) == 2 and sum("Be brief." in text for text in texts) == 1


def test_image_of_another_size_than_annotated_is_refused(loaded: LoadedModel) -> None:
    record = replace(read_jsonl(tiny_scenes())[0], width=65)
    with pytest.raises(DataError, match="65"):
        encoder_of(loaded).encode(record)


def test_head_gets_the_last_position_of_a_prompt_with_plain_strides() -> None:
    model: Any = load_model(tiny_checkpoint()).model
    strides: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda head, args: strides.append(args[0].stride()))
    for rows in (1, 2):
        ids_BL = torch.arange(5).repeat(rows, 1)
        model.generate(input_ids=ids_BL, max_new_tokens=1, do_sample=False, eos_token_id=None)
    hidden = model.config.text_config.hidden_size
    assert strides == [(hidden, hidden, 1)] * 2
