"""From ``/infer/``'s payload to a prompt: the trainer's pixels, ms-swift's formats, and refusals."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from coordexp.data.images import open_rgb
from coordexp.engine.server.swift_pipes import seeded_by_place
from coordexp.engine.wire import protocol
from coordexp.engine.wire.arguments import CLASS_NAMES_KEY, cache_kept_by
from coordexp.engine.wire.protocol import InferRequest, PromptBuilder, RequestConfig, RequestRefused, open_image


class FakeProcessor:
    """Shows the messages that a chat template would get."""

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        parts = [
            f"{message['role']}:" + "".join(part.get("text", "[image]") for part in message["content"])
            for message in messages
        ]
        return "|".join(parts)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Not upright as stored, and partly transparent: opening it takes more than decoding it."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    path = tmp_path / "picture.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels, "RGBA").save(path, exif=exif)
    return path


@pytest.mark.parametrize("side", [16, 400])
def test_a_base64_jpeg_is_not_read_as_a_path(tmp_path: Path, side: int) -> None:
    """All of them begin with ``/9j/``."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.jpg")
    encoded = base64.b64encode((tmp_path / "a.jpg").read_bytes()).decode()
    assert encoded.startswith("/9j/")
    assert np.array_equal(np.asarray(open_image(encoded)), np.asarray(open_rgb(tmp_path / "a.jpg")))


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("/no/such.png", 400, "image not found"),
        ("https://example.org/a.png", 400, "not fetched"),
        ("data:image/png,raw", 400, "must be ;base64"),
        ("picture.png", 400, "neither an absolute path"),
        ("data:image/png;base64,picture.png", 400, "a data URL's part after the comma is not base64: 'picture.png'"),
        (base64.b64encode(b"no image").decode(), 400, "not a readable image"),
        ("A" * 2000, 413, "more than"),
        ("data:;base64," + "A" * 2000, 413, "more than"),
    ],
    ids=["missing", "address", "not base64", "relative", "url of a name", "no image", "large", "large url"],
)
def test_invalid_images_are_refused(monkeypatch: pytest.MonkeyPatch, source: str, status: int, message: str) -> None:
    monkeypatch.setattr(protocol, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(RequestRefused, match=message) as refused:
        open_image(source)
    assert refused.value.status == status


def test_a_large_file_is_refused_before_it_is_read(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(RequestRefused, match="larger than") as refused:
        open_image(str(picture))
    assert refused.value.status == 413


def built(picture: Path, messages: list[Any], num_images: int) -> dict[str, Any]:
    request = InferRequest(messages=messages, images=[str(picture)] * num_images)
    return PromptBuilder(FakeProcessor()).build(request)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([user("<image>Detect.")], "user:[image]Detect."),
        ([user([{"type": "image", "image": "x"}, {"type": "text", "text": "Detect."}])], "user:[image]Detect."),
        ([{"role": "system", "content": "Be brief."}, user("See<image>")], "system:Be brief.|user:See[image]"),
    ],
    ids=["mark", "parts", "system"],
)
def test_both_message_formats_give_the_same_prompt(picture: Path, messages: list[Any], text: str) -> None:
    prompt = built(picture, messages, 1)
    assert prompt["prompt"] == text
    assert [image.size for image in prompt["multi_modal_data"]["image"]] == [(20, 30)]


def test_a_prompt_without_an_image_is_refused(picture: Path) -> None:
    assert built(picture, [user("Hello.")], 0) == {"prompt": "user:Hello."}


@pytest.mark.parametrize(
    ("messages", "num_images", "message"),
    [
        ([user("<image>a")], 0, "have 1 images, but 0"),
        ([user("a")], 1, "have 0 images, but 1"),
        ([user("<image><image>")], 2, "2 images in one prompt"),
        ([{"content": "a"}], 0, "without a role"),
        ([user(3)], 0, "not 3"),
        ([user({"type": "text", "text": "a"})], 0, "a list of parts"),
        ([user([{"type": "video"}])], 0, "must be an image or a text"),
        ([user(["text"])], 0, "must be an image or a text"),
    ],
)
def test_invalid_messages_are_refused(picture: Path, messages: list[Any], num_images: int, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        built(picture, messages, num_images)


def test_decoding_keys_reach_the_engine() -> None:
    config = RequestConfig(
        max_tokens=9, temperature=0.0, top_k=-1, top_p=0.9, repetition_penalty=1.1, seed=5, stop=["x"]
    )
    arguments = config.sampling_arguments(2)
    expected = {"max_tokens": 9, "temperature": 0.0, "top_k": -1, "top_p": 0.9, "repetition_penalty": 1.1}
    assert expected.items() <= arguments.items()
    assert (arguments["seed"], arguments["stop"]) == (7, ["x"])


def test_without_max_tokens_an_answer_may_fill_the_engines_length() -> None:
    assert RequestConfig().sampling_arguments(0)["max_tokens"] is None  # as in ms-swift; vLLM's own default is 16


@pytest.mark.parametrize("seed", [None, 0])
def test_no_seed_stays_none(seed: int | None) -> None:
    assert RequestConfig(seed=seed).sampling_arguments(3)["seed"] is None


@pytest.mark.parametrize("key", [{"n": 2}, {"num_beams": 2}, {"top_p": 0}, {"temperatur": 1}, {"length_penalty": 0.5}])
def test_unsupported_decoding_keys_are_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RequestConfig(**key)


def test_all_default_keys_of_ms_swift_are_accepted() -> None:
    swift = pytest.importorskip("swift.infer_engine.protocol")
    from dataclasses import asdict

    RequestConfig(**asdict(swift.RequestConfig(max_tokens=5, seed=1, return_details=True)))
    InferRequest(**asdict(swift.RolloutInferRequest(messages=[user("<image>a")], images=["/a.png"])))


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({}, ()),
        ({"other": 1}, ()),
        ({CLASS_NAMES_KEY: []}, ()),
        ({CLASS_NAMES_KEY: ["cat", "red cup"]}, ("cat", "red cup")),
    ],
)
def test_a_request_can_have_class_names(data: dict[str, Any], names: tuple[str, ...]) -> None:
    assert InferRequest(messages=[user("a")], data_dict=data).class_names() == names


@pytest.mark.parametrize("names", ["cat", ["cat", " "], ["cat", 1], ["\ud800"], {"cat": 1}, 3])
def test_invalid_class_names_are_refused(names: Any) -> None:
    with pytest.raises(RequestRefused, match="must be a list of class names"):
        InferRequest(messages=[user("a")], data_dict={CLASS_NAMES_KEY: names}).class_names()


# -- seeds of a call to ``swift rollout``; each of its workers counts its requests from 0 ------------------------------


def test_seeds_do_not_depend_on_the_worker() -> None:
    swift = pytest.importorskip("swift.infer_engine.protocol", reason="the plugin runs inside ms-swift")
    config = swift.RequestConfig(max_tokens=9, temperature=0.7, seed=100)
    sizes = [3, 2, 2]
    of_workers = seeded_by_place(config, sizes)
    firsts = [one.seed for one in of_workers if one is not None and one.seed is not None]
    drawn = [first + own for first, size in zip(firsts, sizes, strict=True) for own in range(size)]
    assert drawn == list(range(100, 107))
    assert {(one.max_tokens, one.temperature) for one in of_workers if one} == {(9, 0.7)} and config.seed == 100


def test_without_a_seed_none_is_set() -> None:
    swift = pytest.importorskip("swift.infer_engine.protocol", reason="the plugin runs inside ms-swift")
    assert seeded_by_place(None, [1, 1]) == [None, None]
    assert [one.seed for one in seeded_by_place(swift.RequestConfig(), [2, 1]) if one] == [None, None]


def test_a_cache_that_an_engine_kept_is_named() -> None:
    """vLLM's prefix cache says False while a request runs; the others always empty, and say nothing."""

    class Engine:
        def __init__(self, is_emptied: bool) -> None:
            self.emptied: list[str] = []
            self.reset_prefix_cache = lambda: self.emptied.append("prefix") or is_emptied
            self.reset_encoder_cache = lambda: self.emptied.append("encoder")
            self.reset_mm_cache = lambda: self.emptied.append("mm")

    engine = Engine(True)
    assert cache_kept_by(engine) is None and engine.emptied == ["prefix", "encoder", "mm"]
    assert cache_kept_by(Engine(False)) == "prefix"
