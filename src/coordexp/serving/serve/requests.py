"""What ``/infer/`` takes, in ms-swift's form (``RolloutInferRequest``, ``RequestConfig``), and its way to a prompt."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from coordexp.data.images import open_rgb, rgb_from_bytes
from coordexp.engine.arguments import NAMES_KEY
from coordexp.errors import DataError
from coordexp.rollouts.allowed_labels import are_labels
from coordexp.serving.serve.weight_lock import RequestRefused

MAX_REQUESTS = 4096
MAX_IMAGE_BYTES = 64 << 20
LONGEST_PATH = 4096
MAX_IMAGE_PIXELS = 36_000_000  # a few kilobytes of PNG can hold any number, and each costs some 30 bytes on the way
IMAGE_MARK = "<image>"


class InferRequest(BaseModel):
    """One prompt. ``images`` are local paths, base64 or data URLs, in the order of the messages' images."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = Field(min_length=1)
    images: list[str] = []
    audios: list[str] = Field(default=[], max_length=0)
    videos: list[str] = Field(default=[], max_length=0)
    tools: list[Any] | None = Field(default=None, max_length=0)
    objects: dict[str, Any] = {}
    data_dict: dict[str, Any] = {}
    uuid: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=0)
    add_eos: bool | str | None = None

    def closed_names(self) -> tuple[str, ...]:
        """The only descriptions that the answer may hold; empty for any.

        Raises:
            RequestRefused: something else than names.
        """
        names = self.data_dict.get(NAMES_KEY, [])
        if not are_labels(names):
            raise RequestRefused(400, f"data_dict.{NAMES_KEY} must be a list of names, none of them empty")
        return tuple(names)


class RequestConfig(BaseModel):
    """How to decode. Fields that would change what comes back in ways this server does not know are refused."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop: list[str] | None = []
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)  # vLLM's have 64 bits, and each request adds its index
    return_details: bool = False
    num_beams: int = Field(default=1, ge=1, le=1)
    n: int = Field(default=1, ge=1, le=1)
    best_of: int | None = Field(default=None, ge=1, le=1)
    length_penalty: float = Field(default=1.0, ge=1, le=1)
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, le=0)
    prompt_logprobs: int | None = Field(default=None, le=0)
    structured_outputs_regex: None = None

    def sampling_arguments(self, index: int) -> dict[str, Any]:
        """Arguments of vLLM's ``SamplingParams`` for request ``index`` of a call; seed 0 and None mean none, and each
        request of a call has its own, counting up, as ms-swift does it."""
        if self.stream or self.logprobs:
            raise RequestRefused(400, "request_config: stream and logprobs are not served here; leave them out")
        given = {
            name: value
            for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        return {
            "temperature": 1.0,
            **given,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": self.stop or None,
            "seed": self.seed + index if self.seed else None,
            # Coordinate tokens may be special tokens; the answer's text is for people to read and must show them.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Messages → prompt text and images, by the checkpoint's own processor: the learner's encoder does the same."""

    processor: Any
    max_images: int

    def build(self, request: InferRequest) -> dict[str, Any]:
        """vLLM's prompt.

        Raises:
            RequestRefused: images that are too many, too large, unreadable, or not where the messages want them.
        """
        messages, num_wanted = _parts(request.messages)
        if len(request.images) != num_wanted:
            raise RequestRefused(
                400, f"the messages have {num_wanted} images, but {len(request.images)} came along in 'images'"
            )
        if num_wanted > self.max_images:
            raise RequestRefused(
                400, f"{num_wanted} images in one prompt; vllm.limit_mm_per_prompt allows {self.max_images}"
            )
        if any("\ud800" <= char <= "\udfff" for char in _texts(messages)):
            raise RequestRefused(400, "a message holds half a character (a lone surrogate); send whole ones")
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt: dict[str, Any] = {"prompt": text}
        if request.images:
            prompt["multi_modal_data"] = {"image": [open_image(image) for image in request.images]}
        return prompt


def _parts(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Messages with their content in parts (``<image>`` marks become image parts), and how many images they hold."""
    built, num_images = [], 0
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise RequestRefused(400, f"a message without a role: {str(message)[:200]}")
        if isinstance(content, str):
            parts: list[dict[str, Any]] = []
            for position, text in enumerate(content.split(IMAGE_MARK)):
                parts += [{"type": "image"}] if position else []
                parts += [{"type": "text", "text": text}] if text else []
        elif isinstance(content, list):
            parts = [_part(part) for part in content]
        else:
            raise RequestRefused(
                400, f"a message's content is {type(content).__name__}; text or a list of parts is due"
            )
        num_images += sum(part["type"] == "image" for part in parts)
        built.append({"role": role, "content": parts})
    return built, num_images


def _texts(messages: Sequence[Mapping[str, Any]]) -> str:
    parts = [part.get("text", "") for message in messages for part in message["content"]]
    return "".join([*(message["role"] for message in messages), *parts])


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise RequestRefused(400, f"a message part must be an image or a text, not {str(part)[:200]}")


def open_image(source: str) -> Image.Image:
    """An image as the learner's encoder sees it: upright RGB of the file's own pixels.

    Raises:
        RequestRefused: no such file, not an image, too large, or an address that this server will not fetch.
    """
    try:
        if source.startswith(("http://", "https://")):
            raise RequestRefused(400, "images by http(s) are not fetched here; send a path or base64")
        if source.startswith("data:"):
            header, _, encoded = source.partition(",")
            if not header.endswith(";base64"):
                raise RequestRefused(400, "a data URL must be ;base64")
            return rgb_from_bytes(_decode(encoded), "the data URL", max_pixels=MAX_IMAGE_PIXELS)
        if source.startswith(("/", "file:///")) and not _is_jpeg(source):
            path = Path(source.removeprefix("file://"))
            if path.is_file() and path.stat().st_size > MAX_IMAGE_BYTES:
                raise RequestRefused(413, f"{path}: larger than {MAX_IMAGE_BYTES >> 20} MiB")
            return open_rgb(path, max_pixels=MAX_IMAGE_PIXELS)
        return rgb_from_bytes(_decode(source), "the base64 image", max_pixels=MAX_IMAGE_PIXELS)
    except DataError as error:
        raise RequestRefused(400, str(error)) from error


def _is_jpeg(source: str) -> bool:
    """Whether it is a JPEG in base64, which begins as a path does."""
    return source.startswith("/9j/") and (len(source) > LONGEST_PATH or not os.path.exists(source))


def _decode(encoded: str) -> bytes:
    if len(encoded) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise RequestRefused(413, f"an image of more than {MAX_IMAGE_BYTES >> 20} MiB")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(
            400, f"an image is neither an absolute path, nor base64, nor a data URL: {encoded[:60]!r} ({error})"
        ) from error
