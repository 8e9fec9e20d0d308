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
from coordexp.errors import AlignmentError, CheckpointError, CoordExpError, DataError, VocabError
from coordexp.modeling.inputs import PromptEncoder, check_prompt
from coordexp.modeling.load import LoadedModel, export_checkpoint, load_model, load_processor
from support.tiny_run import PROMPT, encoder_of, tiny_checkpoint, tiny_scenes


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2_vl"}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def too_few_rows(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 600
    (folder / "config.json").write_text(json.dumps(config))


CHEAP: list[tuple[Callable[[Path], None], type[CoordExpError], str]] = [
    (shutil.rmtree, CheckpointError, "no such folder"),
    (no_config, CheckpointError, "no config.json"),
    (broken_config, CheckpointError, "configuration cannot be read"),
    (deep_config, CheckpointError, "configuration cannot be read .*recursion"),
    (other_family, CheckpointError, "'qwen2_vl'"),
    (no_tokenizer, CheckpointError, "no tokenizer.json"),
    (too_few_rows, VocabError, "600 embedding rows"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


@pytest.mark.parametrize(("damage", "error", "says"), CHEAP, ids=lambda value: getattr(value, "__name__", None))
def test_errors_are_found_without_reading_weights(
    folder: Path, damage: Callable[[Path], None], error: type[CoordExpError], says: str
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


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def weights_as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    no_weights(folder)


def one_weight_missing(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop("model.language_model.layers.1.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def another_head(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = 2 * state["model.language_model.embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "says"),
    [(quantised, r"its weights are quantised \(fp8\), which only vLLM reads"),
     (cut_weights, "weights cannot be read"),
     (another_head, "lm_head.weight of other values; set tie_word_embeddings to false"),
     (no_weights, "weights cannot be read"),
     (weights_as_pickle, "weights cannot be read .*model.safetensors"),
     (one_weight_missing, r"1 weights are missing, model.language_model.layers.1.mlp.up_proj.weight")],
)  # fmt: skip
def test_incomplete_weights_are_refused(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    """transformers would start a missing weight at random, with a line in the log."""
    damage(folder)
    with pytest.raises(CheckpointError, match=says):
        load_model(folder, "float32")


def changed(folder: Path, file: str, *, part: str | None = None, **values: Any) -> None:
    content = json.loads((folder / file).read_text())
    (content if part is None else content[part]).update(values)
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize("part", [None, "image_processor"])
def test_python_code_of_a_checkpoint_is_neither_run_nor_asked_about(
    part: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "AutoProcessor" if part is None else "AutoImageProcessor"
    key = "processor_class" if part is None else "image_processor_type"
    changed(folder, "processor_config.json", part=part, **{key: "Evil", "auto_map": {kind: "evil.Evil"}})
    (folder / "evil.py").write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    with pytest.raises(CheckpointError, match=r"its processor is Python code \(auto_map\), which is not run"):
        load_processor(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["evil/kernel", "flash_attention_2"])
def test_attention_is_not_a_checkpoints_choice(name: str, folder: Path) -> None:
    """transformers fetches and runs code of the hub by such a name, or fails without a package."""
    for part in (None, "text_config", "vision_config"):
        changed(folder, "config.json", part=part, _attn_implementation=name, attn_implementation=name)
    model: Any = load_model(folder, "float32").model
    assert model.config.text_config._attn_implementation == "coordexp_packed"


def test_sizes_that_no_machine_counts_are_refused(folder: Path) -> None:
    changed(folder, "config.json", part="text_config", vocab_size=10**4000)
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


@pytest.mark.parametrize(
    ("reported", "at"),
    [((1, 9, 3), "token 1: trainer '(2, 3)', rollout '(9, 3)'"),
     ((1, 2), "token 2: trainer '(3,)', rollout '()'"),
     ((1, 2, 3, 4), "token 3: trainer '()', rollout '(4,)'"),
     ((), "token 0: trainer '(1, 2, 3)', rollout '()'")],
)  # fmt: skip
def test_first_difference_of_prompts_is_named(reported: tuple[int, ...], at: str) -> None:
    with pytest.raises(AlignmentError) as caught:
        check_prompt("scene 7", (1, 2, 3), reported, str)
    assert at in str(caught.value) and str(caught.value).startswith("scene 7: ")


def test_head_gets_the_last_position_of_a_prompt_with_plain_strides() -> None:
    model: Any = load_model(tiny_checkpoint()).model
    strides: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda head, args: strides.append(args[0].stride()))
    for rows in (1, 2):
        ids_BL = torch.arange(5).repeat(rows, 1)
        model.generate(input_ids=ids_BL, max_new_tokens=1, do_sample=False, eos_token_id=None)
    hidden = model.config.text_config.hidden_size
    assert strides == [(hidden, hidden, 1)] * 2
