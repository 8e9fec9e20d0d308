"""Requests to ``/infer/`` in ms-swift's form (``RolloutInferRequest``, ``RequestConfig``), and the prompt for vLLM."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from coordexp.data.images import open_rgb
from coordexp.engine.arguments import NAMES_KEY
from coordexp.engine.serve import MAX_IMAGE_PIXELS
from coordexp.errors import DataError, RolloutError
from coordexp.rollouts.allowed_labels import are_labels

MAX_REQUESTS = 4096
MAX_IMAGE_BYTES = 64 << 20
LONGEST_PATH = 4096
IMAGE_MARK = "<image>"


class RequestRefused(RolloutError):
    """The server does not serve this request; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InferRequest(BaseModel):
    """One prompt. ``images`` are local paths, base64 or data URLs, in the order of the images in ``messages``."""

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

    def allowed_labels(self) -> tuple[str, ...]:
        """Class names that the answer is limited to; empty for no limit. Raises RequestRefused for anything else."""
        names = self.data_dict.get(NAMES_KEY, [])
        if not are_labels(names):
            raise RequestRefused(400, f"data_dict.{NAMES_KEY} must be a list of names, none of them empty")
        return tuple(names)


class RequestConfig(BaseModel):
    """Decoding options. Fields that would change the answer in a way this server does not implement are refused."""

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
    seed: int | None = Field(default=None, ge=0, lt=1 << 62)  # vLLM's seeds have 64 bits, and the index is added
    return_details: bool = False
    num_beams: int = Field(default=1, ge=1, le=1)
    n: int = Field(default=1, ge=1, le=1)
    best_of: int | None = Field(default=None, ge=1, le=1)
    length_penalty: float = Field(default=1.0, ge=1, le=1)
    stream: Literal[False] = False
    logprobs: Literal[False] = False
    top_logprobs: int | None = Field(default=None, le=0)
    prompt_logprobs: int | None = Field(default=None, le=0)
    structured_outputs_regex: None = None

    def sampling_arguments(self, index: int) -> dict[str, Any]:
        """Arguments of vLLM's ``SamplingParams`` for request ``index`` of a call. As in ms-swift, the index is added to
        the call's seed; 0 and None mean no seed."""
        optional = self.model_dump(
            include={"max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}, exclude_none=True
        )
        return {
            "temperature": 1.0,
            **optional,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": self.stop or None,
            "seed": self.seed + index if self.seed else None,
            # Coordinate tokens may be special tokens, and the text must show them.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Renders prompts with the checkpoint's own processor, as the learner's encoder does."""

    processor: Any
    max_images: int

    def build(self, request: InferRequest) -> dict[str, Any]:
        """vLLM's prompt: text and opened images.

        Raises:
            RequestRefused: too many or too large images, unreadable ones, or another number than the messages hold.
        """
        messages = [_message(message) for message in request.messages]
        parts = [part for message in messages for part in message["content"]]
        num_images = sum(part["type"] == "image" for part in parts)
        if len(request.images) != num_images:
            raise RequestRefused(
                400, f"the messages have {num_images} images, but {len(request.images)} came along in 'images'"
            )
        if num_images > self.max_images:
            raise RequestRefused(
                400, f"{num_images} images in one prompt; vllm.limit_mm_per_prompt allows {self.max_images}"
            )
        texts = [*(message["role"] for message in messages), *(part.get("text", "") for part in parts)]
        if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
            raise RequestRefused(400, "a message holds half a character (a lone surrogate); send whole ones")
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not request.images:
            return {"prompt": text}
        return {"prompt": text, "multi_modal_data": {"image": [open_image(image) for image in request.images]}}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as a list of parts; ``<image>`` marks become image parts."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestRefused(400, f"a message without a role: {str(message)[:200]}")
    parts: list[dict[str, Any]] = []
    if isinstance(content, str):
        for position, text in enumerate(content.split(IMAGE_MARK)):
            parts += [{"type": "image"}] if position else []
            parts += [{"type": "text", "text": text}] if text else []
        return {"role": role, "content": parts}
    if not isinstance(content, list):
        raise RequestRefused(400, f"a message's content is {type(content).__name__}; send text or a list of parts")
    for part in content:
        match part:
            case {"type": "image"}:
                parts.append({"type": "image"})
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case _:
                raise RequestRefused(400, f"a message part must be an image or a text, not {str(part)[:200]}")
    return {"role": role, "content": parts}


def open_image(source: str) -> Image.Image:
    """An image as the learner's encoder opens it: upright RGB of the file's own pixels.

    Raises:
        RequestRefused: not found, not an image, too large, or an http(s) address.
    """
    if source.startswith(("http://", "https://")):
        raise RequestRefused(400, "images by http(s) are not fetched here; send a path or base64")
    # The base64 of every JPEG starts like a path: /9j/.
    is_jpeg = source.startswith("/9j/") and (len(source) > LONGEST_PATH or not os.path.exists(source))
    try:
        if source.startswith("data:"):
            header, _, encoded = source.partition(",")
            if not header.endswith(";base64"):
                raise RequestRefused(400, "a data URL must be ;base64")
            return open_rgb(Path("the data URL"), data=_decoded(encoded), max_pixels=MAX_IMAGE_PIXELS)
        if source.startswith(("/", "file:///")) and not is_jpeg:
            path = Path(source.removeprefix("file://"))
            if path.is_file() and path.stat().st_size > MAX_IMAGE_BYTES:
                raise RequestRefused(413, f"{path}: larger than {MAX_IMAGE_BYTES >> 20} MiB")
            return open_rgb(path, max_pixels=MAX_IMAGE_PIXELS)
        return open_rgb(Path("the base64 image"), data=_decoded(source), max_pixels=MAX_IMAGE_PIXELS)
    except DataError as error:
        raise RequestRefused(400, str(error)) from error


def _decoded(encoded: str) -> bytes:
    if len(encoded) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise RequestRefused(413, f"an image of more than {MAX_IMAGE_BYTES >> 20} MiB")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(
            400, f"an image is neither an absolute path, nor base64, nor a data URL: {encoded[:60]!r} ({error})"
        ) from error
