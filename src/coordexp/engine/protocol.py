"""Requests to rollout servers and their answers, in ms-swift's ``RolloutInferRequest`` format, strictly read."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from coordexp.coords import CoordVocab
from coordexp.data.images import image_bytes, open_rgb, read_header, shard_of
from coordexp.data.preparation import ImagePreparation
from coordexp.engine.arguments import NAMES_KEY
from coordexp.errors import RolloutError
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import DecodingOptions, response_tokens
from coordexp.weight_sync import WeightVersion

IMAGE_MARK = "<image>"
ENVELOPE = "coordexp"  # the key next to the answer, for what our own server and plugin add
TRIGGERED = "repeat_terminate_triggered"  # 0 or 1, required from every guarded server
ACTIVE = "repeat_terminate_active"
_EXCERPT = 300
# Compressed formats that every reader opens in the same way: bitmaps and TIFF would be longer than a PNG of them.
_COMPRESSED = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}


def infer_payload(
    requests: Sequence[RolloutRequest],
    seed: int,
    options: DecodingOptions,
    source_of: Callable[[Path], str],
    tagged: bool = False,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON body of one ``/infer/`` call.

    Args:
        source_of: the form in which an image is sent; see :func:`image_source`.
        tagged: each request carries its place, which servers that stamp their answers repeat.
        names: the only descriptions that answers may hold; empty for any.
    """
    return {
        "infer_requests": [
            {
                "messages": [{"role": one["role"], "content": _content(one["content"])} for one in request.messages],
                "images": [source_of(request.image)],
                **({"data_dict": {NAMES_KEY: list(names)}} if names else {}),
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


def _content(parts: str | Sequence[Mapping[str, Any]]) -> str:
    """One text with a mark for each image, as every server of this protocol reads it."""
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    text = ""
    for part in parts:
        if part["type"] == "text" and IMAGE_MARK in part["text"]:
            raise RolloutError(
                f"a prompt's text holds {IMAGE_MARK!r}, which rollout servers read as an image; reword template.prompt "
                "or template.system"
            )
        text += IMAGE_MARK if part["type"] == "image" else part["text"]
    return text


def read_answer(
    item: Mapping[str, Any],
    request: RolloutRequest,
    vocab: CoordVocab,
    weights: WeightVersion,
    guarded: bool,
    where: str,
    *,
    stamped: bool = False,
    max_new_tokens: int | None = None,
    place: int | None = None,
) -> Rollout:
    """One item of a server's reply → a rollout that can be trained on.

    Args:
        weights: the expected ones. guarded: the configuration switches the repeat guard on.
        stamped: answers of this server must report their weights. max_new_tokens: of the request.
        place: of the request in its call, if it was sent along.

    Raises:
        RolloutError: token ids or the finish reason are missing, an id is none of the tokenizer's, or answer, weights
            or guard are not the expected ones.
    """
    where, response = f"{where}, {request.sample_id}", item.get("response", item)
    try:
        (choice,) = response["choices"]
        prompt_ids = _token_ids(response["prompt_token_ids"])
        answer_ids = _token_ids(choice["token_ids"])
        finish_reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"{where}: token ids of prompt and answer and one finish reason are due ({type(error).__name__}: {error}), "
            f"not {str(response)[:_EXCERPT]}; the server must honour return_details"
        ) from error
    if not prompt_ids:
        raise RolloutError(f"{where}: the server reports that the prompt had no tokens; update the server")
    if max_new_tokens is not None and len(answer_ids) > max_new_tokens:
        raise RolloutError(
            f"{where}: the answer has {len(answer_ids)} tokens, and rollout_matching.max_new_tokens is "
            f"{max_new_tokens}: the server ignores it; look into its log"
        )
    answer = response_tokens(answer_ids, finish_reason, vocab, where)
    envelope = _check_envelope(item.get(ENVELOPE), weights, guarded, where)
    if place is not None and envelope.get("uuid") != str(place):
        raise RolloutError(
            f"{where}: request {place} of the call got the answer to request {str(envelope.get('uuid'))[:40]}: answers "
            "were exchanged on the way"
        )
    if stamped and not {"weight_version", "learner_id"} <= envelope.keys():
        raise RolloutError(
            f"{where}: the answer does not report its weight_version and learner_id, and this server's answers do; "
            "another process answers in its place. Look for what listens at base_url"
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


def _check_envelope(envelope: Any, weights: WeightVersion, guarded: bool, where: str) -> Mapping[str, Any]:
    """Check the weights and the guard that a server reports. A plain ms-swift reports neither: its weights cannot be
    checked, and it cannot be used with the guard."""
    if envelope is None:
        envelope = {}
    elif not isinstance(envelope, Mapping):
        raise RolloutError(f"{where}: {ENVELOPE!r} holds {str(envelope)[:_EXCERPT]}, not an object")
    answered_by = WeightVersion(
        envelope.get("weight_version", weights.version), envelope.get("learner_id", weights.learner_id)
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
            "server with the trainer's YAML (coordexp serve --config, or coordexp launch)"
        )
    return envelope


def _flag(envelope: Mapping[str, Any], name: str, where: str) -> int | None:
    """The 0 or 1 under ``name``; None if it is missing."""
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
    """The form in which an image is sent: an absolute path, or a data URL of its file's own bytes. It is encoded again
    only if the server would otherwise show its model other pixels than the trainer's. (Plain base64 would be ambiguous:
    that of every JPEG begins like a path, ``/9j/``.)

    Args:
        images: whether the server sees the trainer's files. preparation: how the trainer resizes an image.
        ours: the server opens images as the trainer does (``coordexp serve``): turned as EXIF says, transparency on
            white, out of tar files. Others do none of it.

    Raises:
        DataError: the file is missing, or is not an image.
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
