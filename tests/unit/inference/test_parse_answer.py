"""``coordexp.parse_answer``: an OpenAI-compatible server's answer, in pixels of the image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coordexp.coords import serialize_objects
from coordexp.data.files import asset
from coordexp.errors import ConfigError, DataError
from coordexp.geometry import pixel_box
from coordexp.inference.parse_answer import parse_answer, vocab_of
from coordexp.modeling.load import export_checkpoint, load_processor
from coordexp.records import GTObject

OBJECTS = (GTObject("手提包", "bbox_2d", (10, 20, 300, 999)), GTObject("cat", "poly", (0, 0, 500, 0, 500, 500)))
TEXT = serialize_objects(OBJECTS)


@pytest.mark.parametrize(
    "given", [TEXT, TEXT + "<|im_end|>", TEXT.replace('"<|coord_', "<|coord_").replace('|>"', "|>")]
)
def test_text_becomes_detections(given: str) -> None:
    found = parse_answer(given, (640, 480))
    assert found.names == ["手提包", "cat"] and found.problem is None and found[0].confidence is None
    assert found[0].box == pixel_box(OBJECTS[0], 640, 480) and found.polygons[1] is not None
    assert (found.width, found.height, found.text) == (640, 480, given.removesuffix("<|im_end|>"))


def test_token_ids_need_their_tokenizer() -> None:
    checkpoint = asset("checkpoints/demo-stage1")
    ids = vocab_of(str(checkpoint)).encode(TEXT)
    found = parse_answer(ids, Image.new("RGB", (640, 480)), checkpoint=checkpoint)
    assert found.objects == parse_answer(TEXT, (640, 480), checkpoint=checkpoint).objects
    assert found[0].box == pixel_box(OBJECTS[0], 640, 480)
    assert "red circle" in found.classes and found.plot().size == (640, 480)
    with pytest.raises(ConfigError, match="checkpoint"):
        parse_answer(ids, (640, 480))
    with pytest.raises(DataError, match="a size of 0 x 480 has no pixels"):
        parse_answer(TEXT, (0, 480))


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), (b"{}", "bytes"), (["{}"], "list"), (3, "int")])
def test_something_else_than_an_answer_is_refused(given: Any, kind: str) -> None:
    """A server's message without content is None; the error spoke of a checkpoint for token ids."""
    with pytest.raises(DataError, match=f"answer: {kind}; give the text of the message, or its token ids"):
        parse_answer(given, (640, 480))


@pytest.mark.parametrize(
    "given", ["photo.jpg", Path("photo.jpg"), (480, 640, 3), ("640", "480"), 640, None, (640.5, 1)]
)
def test_something_else_than_an_image_or_its_size_is_refused(given: Any) -> None:
    with pytest.raises(DataError, match=r"image: .*give a PIL image, or its \(width, height\)"):
        parse_answer(TEXT, given)


def test_a_size_of_numpy_numbers_is_a_size() -> None:
    width, height = np.array([640, 480])
    found = parse_answer(TEXT, (width, height))
    assert '"width": 640, "height": 480' in found.to_json()
    assert found._repr_png_() is None, "a notebook shows the repr of an answer without an image"


def test_an_answer_that_is_not_whole_says_so(tmp_path: Path) -> None:
    cut = parse_answer(TEXT[:-30], (640, 480))
    assert cut.names == ["手提包"] and cut.truncated
    # How many tokens a text had is unknown: it said the number of its bytes.
    assert cut.problem == "cut off; allow more with --max-new-tokens, max_new_tokens= or a server's max_tokens"
    for text in ("There is a cat. {}", "There is a cat.", "```json\n" + TEXT + "\n```", "[1, 2"):
        prose = parse_answer(text, (640, 480))
        assert not prose and "not JSON" in (prose.problem or "")
    empty = parse_answer("{}", (640, 480))
    assert not empty and empty.problem is None
    hidden = TEXT
    for token in {f"<|coord_{k}|>" for obj in OBJECTS for k in obj.bins}:
        hidden = hidden.replace(token, "")
    with pytest.raises(DataError, match="skip_special_tokens"):
        parse_answer(hidden, (640, 480))


def test_a_checkpoint_exported_for_openai_keeps_its_coordinates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers decode without special tokens, and resize by the processor's limits alone."""
    folder = export_checkpoint(asset("checkpoints/demo-stage1"), tmp_path / "out", "float32", for_openai=True)
    processor = load_processor(folder)
    tokenizer = processor.tokenizer
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == vocab_of(str(asset("checkpoints/demo-stage1"))).encode(TEXT), "the same tokens as in training"
    text = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
    assert parse_answer(text, (640, 480)).objects == parse_answer(TEXT, (640, 480)).objects
    assert dict(processor.image_processor.size) == {"shortest_edge": 16384, "longest_edge": 16384}
    assert "its image limits, 16384 and 16384 pixels, are closer than a step of" in caplog.text


def test_a_checkpoint_exported_for_openai_has_no_penalty_of_its_base(tmp_path: Path) -> None:
    """vLLM applies the settings of generation_config.json to requests that do not name them."""
    base = tmp_path / "base"
    shutil.copytree(asset("checkpoints/demo-stage1"), base)
    file = base / "generation_config.json"
    ids = {"eos_token_id": [426, 427], "pad_token_id": 427}
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.8, "max_new_tokens": 7}
    file.unlink()
    file.write_text(json.dumps(ids | sampling))
    served = export_checkpoint(base, tmp_path / "out", "float32", for_openai=True)
    left = json.loads((served / "generation_config.json").read_text())
    left.pop("transformers_version")
    assert left == ids
