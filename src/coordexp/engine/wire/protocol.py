"""Calls of ``/infer/`` in ms-swift's format (``RolloutInferRequest``, ``RequestConfig``), parsed strictly: the
trainer writes requests and reads answers; ``coordexp serve`` reads requests and passes them to vLLM."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from coordexp.coords import CoordVocab
from coordexp.data.images import image_bytes, image_exists, open_rgb, read_header
from coordexp.data.preparation import ImagePreparation
from coordexp.data.shards import shard_of
from coordexp.engine.wire.arguments import CLASS_NAMES_KEY
from coordexp.errors import DataError, RolloutError
from coordexp.printable import has_half_characters
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import DecodingOptions, response_tokens
from coordexp.rollouts.class_names import are_class_names
from coordexp.weight_sync import WeightVersion

IMAGE_MARK = "<image>"
ENVELOPE = "coordexp"  # the key next to the answer, with the fields that our server and plugin add
TRIGGERED = "repeat_terminate_triggered"  # 0 or 1, required from every guarded server
ACTIVE = "repeat_terminate_active"
_EXCERPT = 300
MAX_REQUESTS = 4096
MAX_IMAGE_BYTES = 64 << 20
MAX_IMAGE_PIXELS = 36_000_000  # a PNG of a few kilobytes can have more, and each takes about 30 bytes here
LONGEST_PATH = 4096
# Compressed formats that every reader decodes to equal pixels. Bitmaps and TIFF would be larger than a PNG.
_COMPRESSED = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}


def infer_payload(
    requests: Sequence[RolloutRequest],
    seed: int,
    options: DecodingOptions,
    source_of: Callable[[Path], str],
    tagged: bool = False,
    class_names: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON body of one ``/infer/`` call.

    ``source_of``: see :func:`image_source`. ``tagged``: number the requests (``uuid``); our servers return the number
    with each answer. ``class_names``: those that answers may use, empty for any.
    """

    def content(parts: str | Sequence[Mapping[str, Any]]) -> str:
        # One text with a mark for each image, as every server of this protocol reads it.
        text = ""
        for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
            if part["type"] == "text" and IMAGE_MARK in part["text"]:
                raise RolloutError(
                    f"a prompt's text contains {IMAGE_MARK!r}, which rollout servers read as an image; reword "
                    "template.prompt or template.system"
                )
            text += IMAGE_MARK if part["type"] == "image" else part["text"]
        return text

    return {
        "infer_requests": [
            {
                "messages": [{"role": one["role"], "content": content(one["content"])} for one in request.messages],
                "images": [source_of(request.image)],
                **({"data_dict": {CLASS_NAMES_KEY: list(class_names)}} if class_names else {}),
                **({"uuid": str(place)} if tagged else {}),
            }
            for place, request in enumerate(requests)
        ],
        "request_config": {
            "n": 1,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "repetition_penalty": options.repetition_penalty,
            "seed": seed,
            "return_details": True,
        },
    }


def read_answer(
    item: Mapping[str, Any],
    request: RolloutRequest,
    vocab: CoordVocab,
    weights: WeightVersion,
    guarded: bool,
    where: str,
    *,
    max_new_tokens: int | None = None,
    place: int | None = None,
) -> Rollout:
    """One item of a server's reply → a rollout that can be trained on.

    ``weights``: the expected ones. ``guarded``: the configuration enables the repeat guard. ``place``: index of the
    request in its call, for servers that return it and their weight version with each answer. Raises RolloutError if a
    part is missing, malformed or unexpected."""
    where, response = f"{where}, {request.sample_id}", item.get("response", item)
    try:
        (choice,) = response["choices"]
        prompt_ids = _token_ids(response["prompt_token_ids"])
        answer_ids = _token_ids(choice["token_ids"])
        finish_reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"{where}: expected token ids of prompt and answer and one finish reason "
            f"({type(error).__name__}: {error}), got {str(response)[:_EXCERPT]}; the server must support return_details"
        ) from error
    if not prompt_ids:
        raise RolloutError(f"{where}: the server reports that the prompt had no tokens; update the server")
    if max_new_tokens is not None and len(answer_ids) > max_new_tokens:
        raise RolloutError(
            f"{where}: the answer has {len(answer_ids)} tokens, and rollout_matching.max_new_tokens is "
            f"{max_new_tokens}: the server ignores it; look into its log"
        )
    answer = response_tokens(answer_ids, finish_reason, vocab, where)
    # A plain ms-swift sends no envelope: its weights cannot be checked, and it cannot be used with the guard.
    envelope = {} if item.get(ENVELOPE) is None else item[ENVELOPE]
    if not isinstance(envelope, Mapping):
        raise RolloutError(f"{where}: {ENVELOPE!r} is {str(envelope)[:_EXCERPT]}, not an object")
    answered_by = WeightVersion(
        envelope.get("weight_version", weights.version), envelope.get("trainer_id", weights.trainer_id)
    )
    if answered_by != weights:
        raise RolloutError(
            f"{where}: the answer is from weights of {answered_by}, not {weights}: the server restarted, or another "
            "trainer pushes to it. Give each trainer its own servers, and resume from the last checkpoint"
        )
    active = _flag(envelope, ACTIVE, where)
    wrong = None
    if active not in (None, int(guarded)):
        wrong = f"the server's guard is {'active' if active else 'not active'}"
    if guarded and TRIGGERED not in envelope:
        wrong = f"the answer has no {ENVELOPE}.{TRIGGERED}: the guard is not active"
    if wrong is not None:
        raise RolloutError(
            f"{where}: rollout_matching.repeat_terminate.enabled is {str(guarded).lower()}, but {wrong}; start the "
            "server with the trainer's YAML (coordexp serve, or coordexp launch)"
        )
    if place is not None and envelope.get("uuid") != str(place):
        raise RolloutError(
            f"{where}: request {place} of the call got the answer to request {str(envelope.get('uuid'))[:40]}: answers "
            "were exchanged"
        )
    if place is not None and not {"weight_version", "trainer_id"} <= envelope.keys():
        raise RolloutError(
            f"{where}: the answer does not report its weight_version and trainer_id, and this server's answers do; "
            "another process answers instead; check which one listens at base_url"
        )
    return Rollout(
        sample_id=request.sample_id,
        prompt_token_ids=prompt_ids,
        response_token_ids=answer.token_ids,
        text=vocab.decode(answer.token_ids),
        truncated=answer.truncated,
        repeat_terminated=_flag(envelope, TRIGGERED, where) == 1,
        weight_version=weights.version,
    )


def _flag(envelope: Mapping[str, Any], name: str, where: str) -> int | None:
    value = envelope.get(name)
    if name in envelope and (type(value) is not int or value not in (0, 1)):
        raise RolloutError(
            f"{where}: {ENVELOPE}.{name} holds {str(value)[:_EXCERPT]!r} ({type(value).__name__}), and must be the "
            "number 0 or 1; correct the server"
        )
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise TypeError(f"{str(value)[:60]} is not a list of token ids")
    return tuple(value)


def image_source(path: Path, images: Literal["path", "base64"], preparation: ImagePreparation, ours: bool) -> str:
    """How to send an image: as an absolute path, or as a data URL of its file's own bytes. The image is encoded again
    only if the server's model would otherwise see other pixels than the trainer's. (Plain base64 would be ambiguous:
    every JPEG's begins like a path, ``/9j/``.)

    Args:
        images: whether the server sees the trainer's files. preparation: how the trainer resizes an image.
        ours: the server opens images as the trainer does (``coordexp serve``): turned as EXIF says, transparency on
            white, out of tar files. Other servers do none of this.
    """
    if ours and images == "path" and preparation.resize is None:
        return str(path)
    header = read_header(path)
    plain = ours or (header.orientation == 1 and header.opaque)
    unchanged = plain and not preparation.changes(*header.size)
    if unchanged and images == "path" and (ours or shard_of(str(path)) is None):
        return str(path)
    if unchanged and header.format in _COMPRESSED:
        data, kind = image_bytes(path), _COMPRESSED[header.format]
    else:  # the pixels that the trainer's own encoder sees, lossless, at zlib's fastest level: networks are fast enough
        encoded = io.BytesIO()
        preparation(open_rgb(path)).save(encoded, format="PNG", compress_level=1)
        data, kind = encoded.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


# From here on, the server's side.


def envelope_of(weights: WeightVersion, guarded: bool, triggered: bool, uuid: str | None) -> dict[str, Any]:
    """Our part of an answer: its weights, whether the repeat guard was active and ended it, and its request's id."""
    mark = {} if uuid is None else {"uuid": uuid}
    return {**weights.payload(), ACTIVE: int(guarded), TRIGGERED: int(triggered), **mark}


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

    def class_names(self) -> tuple[str, ...]:
        """Class names that the answer is limited to; empty for no limit. Raises RequestRefused for anything else."""
        class_names = self.data_dict.get(CLASS_NAMES_KEY, [])
        if not are_class_names(class_names):
            raise RequestRefused(400, f"data_dict.{CLASS_NAMES_KEY} must be a list of class names, none of them empty")
        return tuple(class_names)


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
        the call's seed; 0 and None mean no seed. ``max_tokens`` None means up to the engine's ``max_model_len``."""
        optional = self.model_dump(
            include={"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}, exclude_none=True
        )
        return {
            "max_tokens": self.max_tokens,  # vLLM's own default is 16
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
    """Renders prompts with the checkpoint's own processor, as the trainer's encoder does."""

    processor: Any

    def build(self, request: InferRequest) -> dict[str, Any]:
        """vLLM's prompt: text and opened images. Raises RequestRefused."""
        messages = [_with_parts(message) for message in request.messages]
        parts = [part for message in messages for part in message["content"]]
        num_images = sum(part["type"] == "image" for part in parts)
        if len(request.images) != num_images:
            raise RequestRefused(
                400, f"the messages have {num_images} images, but {len(request.images)} are in 'images'"
            )
        if num_images > 1:
            raise RequestRefused(400, f"{num_images} images in one prompt; send one request for each")
        texts = [*(message["role"] for message in messages), *(part.get("text", "") for part in parts)]
        if any(has_half_characters(text) for text in texts):
            raise RequestRefused(
                400, "a message contains a lone surrogate, which is not a valid character; send valid Unicode"
            )
        try:
            text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RequestRefused(400, f"the model's chat template refuses the messages ({error})") from error
        if not request.images:
            return {"prompt": text}
        return {"prompt": text, "multi_modal_data": {"image": [open_image(image) for image in request.images]}}


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
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
        raise RequestRefused(400, f"a message's content must be a text or a list of parts, not {str(content)[:200]}")
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
    """An image as the trainer's encoder opens it: upright RGB of the file's own pixels. Raises RequestRefused."""
    if source.startswith(("http://", "https://")):
        raise RequestRefused(400, "images from http(s) addresses are not fetched; send a path or base64")
    # The base64 of every JPEG starts like a path: /9j/.
    is_jpeg = source.startswith("/9j/") and (len(source) > LONGEST_PATH or not os.path.exists(source))
    name, data = Path("the base64 image"), None
    try:
        if source[:5].lower() == "data:":
            header, _, encoded = source.partition(",")
            if not header.endswith(";base64"):
                raise RequestRefused(400, "a data URL must be ;base64")
            name, data = Path("the data URL"), _decoded(encoded, "a data URL's part after the comma is not base64")
        elif source.startswith(("/", "file:///")) and not is_jpeg:
            name = Path(source.removeprefix("file://"))
            if image_exists(name) and name.is_file() and name.stat().st_size > MAX_IMAGE_BYTES:
                raise RequestRefused(413, f"{name}: larger than {MAX_IMAGE_BYTES >> 20} MiB")
        else:
            data = _decoded(source, "an image is neither an absolute path, nor base64, nor a data URL")
        return open_rgb(name, data=data, max_pixels=MAX_IMAGE_PIXELS)
    except DataError as error:
        raise RequestRefused(400, str(error)) from error


def _decoded(encoded: str, problem: str) -> bytes:
    if len(encoded) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise RequestRefused(413, f"an image of more than {MAX_IMAGE_BYTES >> 20} MiB")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(400, f"{problem}: {encoded[:60]!r} ({error})") from error
