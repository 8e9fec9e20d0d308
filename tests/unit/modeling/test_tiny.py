"""The tiny checkpoint is a real Qwen3-VL in all but size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import COORD_TOKENS, CoordVocab, FieldOrder, serialize_objects
from coordexp.data.scenes import DENSE, make_scene
from coordexp.modeling.load import LoadedModel, load_model, load_vocab
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint, build_tokenizer
from coordexp.records import GTObject, ImageRecord


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=1)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def vocab() -> CoordVocab:
    return CoordVocab.from_tokenizer(build_tokenizer())


def test_a_fresh_process_builds_the_model(tmp_path: Path) -> None:
    """It does not depend on an earlier import (torchvision with a CPU torch)."""
    code = (
        "import sys; from pathlib import Path; from coordexp.modeling.tiny import build_tiny_checkpoint; "
        "build_tiny_checkpoint(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert load_vocab(tmp_path).eos_id > 0


def test_the_model_is_tiny_and_of_the_real_family(loaded: LoadedModel) -> None:
    assert loaded.model.config.model_type == "qwen3_vl"
    assert 3e6 < sum(parameter.numel() for parameter in loaded.model.parameters()) < 9e6
    model: Any = loaded.model
    rope = model.config.text_config.rope_parameters
    assert sum(rope["mrope_section"]) == TinySpec().head_dim // 2 and rope["mrope_interleaved"] is True
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_seed_determines_the_weights(tmp_path: Path, folder: Path) -> None:
    weights = {
        name: (build_tiny_checkpoint(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("same", 1), ("other", 2))
    }
    assert weights["same"] == (folder / "model.safetensors").read_bytes() != weights["other"]


def test_a_128_pixel_image_is_64_tokens(loaded: LoadedModel, tmp_path: Path) -> None:
    from coordexp.modeling.inputs import PromptEncoder

    image, objects = make_scene(DENSE, 0, 0)
    image.save(tmp_path / "a.png")
    record = ImageRecord("a", tmp_path / "a.png", *image.size, objects)
    request = PromptEncoder(loaded.processor, None, "Be exact.").encode(record)
    assert request.prompt_token_ids.count(loaded.image_token_id) == 64  # (128 / (patch 8 x merge 2))²
    text = loaded.vocab.decode(request.prompt_token_ids)
    assert text.startswith("<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\n<|vision_start|>")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@settings(max_examples=150)
@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(vocab: CoordVocab, text: str) -> None:
    clean = text.encode("utf-8", errors="ignore").decode()
    assert vocab.decode(vocab.encode(clean)) == clean


@pytest.mark.parametrize("order", get_args(FieldOrder))
@pytest.mark.parametrize("desc", ["red circle", "WBC", "a {brace}", "naïve 雪 😀", 'quoted "x"'])
def test_entries_end_where_tokens_end(vocab: CoordVocab, order: FieldOrder, desc: str) -> None:
    """So stage 2's appended text has the same tokens as the model's own."""
    objects = [GTObject(desc, "bbox_2d", (1, 20, 300, 999)), GTObject(desc, "poly", (0, 1, 2, 3, 4, 5))] * 6
    text = serialize_objects(objects, order)
    ids = vocab.encode(text)
    assert vocab.decode(ids) == text
    ends, at = set(), 0
    for token_id in ids:
        at += len(vocab.pieces[token_id])
        ends.add(at)
    for count in range(1, len(objects) + 1):
        prefix = serialize_objects(objects[:count], order)[:-1]  # without the root's closing brace
        assert len(prefix.encode()) in ends


def test_structure_costs_few_tokens(vocab: CoordVocab) -> None:
    text = serialize_objects([GTObject("red circle", "bbox_2d", (1, 2, 3, 4))] * 2)
    assert len(vocab.encode(text)) <= 2 * 16
    assert all(vocab.encode(token) == [vocab.coord_token_ids[k]] for k, token in enumerate(COORD_TOKENS))
