"""``coordexp.parse_answer``: the text or token ids that an OpenAI-compatible server wrote → Detections. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any

from PIL import Image

from coordexp.checkpoints.card import UNTRAINED, read_card
from coordexp.checkpoints.folder import Checkpoint
from coordexp.coords import COORD_TOKENS, TURN_END, CoordVocab
from coordexp.data.images import upright_size
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import make_answer
from coordexp.inference.detections import Detections, as_detections
from coordexp.parsing import parse_rollout
from coordexp.records import ImageRecord, Rollout

_MARK = re.compile(r"(<\|coord_(?:0|[1-9][0-9]{0,2})\|>|<\|im_end\|>)")
_WHOLE = re.compile(r"(\}\s*\}|\{\s*\})\s*$")
_SHAPE = re.compile(r'"(bbox_2d|poly)"\s*:\s*\[')


def parse_answer(
    answer: str | Sequence[int],
    image: tuple[int, int] | Image.Image,
    *,
    checkpoint: str | Path | None = None,
) -> Detections:
    """Read what a server of a trained model wrote, as strictly as in training.

    Args:
        answer: the message's text, with its coordinate tokens, or its token ids.
        image: the image of the question, or its (width, height): boxes are in its pixels.
        checkpoint: the served folder; token ids need its tokenizer, and class ids its class list.

    Returns:
        Objects without scores. ``truncated``: the answer does not end as a whole one does.

    Raises:
        DataError: text whose coordinates are missing, because the server left out special tokens; an image without
            pixels, or something else than an answer, or than an image or its size.
        ConfigError: token ids without ``checkpoint``.
    """
    width, height = upright_size(image) if isinstance(image, Image.Image) else _size(image)
    if min(width, height) < 1:
        raise DataError(f"image: a size of {width} x {height} has no pixels; give the image's (width, height)")
    if isinstance(answer, str):
        written, vocab, token_ids = (), text_vocab(), text_vocab().encode(answer)  # how many tokens it had is unknown
    else:
        written = token_ids = _token_ids(answer)
        if checkpoint is None:
            raise ConfigError("token ids need the checkpoint whose tokenizer wrote them: checkpoint='FOLDER'")
        vocab = vocab_of(str(checkpoint))
    text = vocab.decode(token_ids).partition(TURN_END)[0]
    if "<|coord_" not in text and _SHAPE.search(text):
        raise DataError(
            "the answer has shapes without coordinates: the server left out special tokens. Send skip_special_tokens: "
            "false, or serve a checkpoint of: coordexp model export RUN OUT --for openai"
        )
    ended = _WHOLE.search(text) is not None
    parsed = parse_rollout(token_ids, vocab, ended=ended)
    record = ImageRecord("answer", Path("answer"), width, height, ())
    card = UNTRAINED if checkpoint is None else read_card(checkpoint)
    rollout = Rollout("answer", (), tuple(written), text, truncated=not ended)
    found = make_answer(record, rollout, parsed)
    shown = image if isinstance(image, Image.Image) else None
    return as_detections(replace(found, gt=None), shown, card.classes)


def _token_ids(given: Any) -> list[int]:
    try:
        if not isinstance(given, bytes | bytearray | memoryview):
            return [index(token_id) for token_id in given]
    except TypeError:
        pass
    raise DataError(f"answer: {type(given).__name__}; give the text of the message, or its token ids")


def _size(given: Any) -> tuple[int, int]:
    try:
        width, height = (int(side) for side in given)  # NumPy's numbers would be none for JSON
        if [width, height] == list(given):
            return width, height
    except (TypeError, ValueError, OverflowError):
        pass
    shown = given if isinstance(given, str | tuple | list) else type(given).__name__
    raise DataError(f"image: {shown!r}; give a PIL image, or its (width, height) in whole pixels")


@lru_cache(maxsize=1)
def text_vocab() -> CoordVocab:
    """A vocabulary in which every byte is a token, besides the coordinates and the end of the turn."""
    pieces = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in COORD_TOKENS), TURN_END.encode()]
    marks = {token: number for number, token in enumerate([*COORD_TOKENS, TURN_END], start=256)}

    def encode(text: str, add_special_tokens: bool = False) -> dict[str, Any]:
        parts = _MARK.split(text)
        return {"input_ids": [i for p in parts for i in ([marks[p]] if p in marks else p.encode("utf-8", "replace"))]}

    return CoordVocab(pieces, range(256, 1256), 1256, (1256,), encode)


@lru_cache(maxsize=4)
def vocab_of(checkpoint: str) -> CoordVocab:
    return Checkpoint.open(checkpoint).read_vocab()
