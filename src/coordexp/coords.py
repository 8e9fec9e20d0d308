"""The coordinate vocabulary (1000 tokens ``<|coord_0|>`` … ``<|coord_999|>``, and the bytes of every token), and the
JSON text of objects that the model writes.

Torch-free. The vocabulary is one of bytes because byte-level BPE splits characters over tokens: JSON structure is
ASCII, so scanning bytes is exact, while decoded pieces contain replacement characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from coordexp.errors import AppendError, VocabError
from coordexp.records import NUM_BINS, GTObject

if TYPE_CHECKING:
    import numpy as np

TURN_END = "<|im_end|>"
_CONTROL_TOKENS = (
    *("<|im_start|>", TURN_END, "<|endoftext|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)


COORD_TOKENS: tuple[str, ...] = tuple(f"<|coord_{k}|>" for k in range(NUM_BINS))
_COORD_LITERAL = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")
_MAX_REMEMBERED = 50_000  # parts between coordinates, a few hundred bytes each


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Inverse of GPT-2's printable alphabet for bytes (Radford et al. 2019), which byte-level BPE files use."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


@dataclass(frozen=True, slots=True, eq=False)
class TokenLayout:
    """By token id: ``length_V`` bytes it writes, ``bin_V`` the bin it writes or -1, ``forbidden_V`` whether no
    answer may contain it (a control token, or an id that writes nothing). The last entry is of ids beyond the
    vocabulary, to which models pad their embedding: they write nothing."""

    length_V: np.ndarray
    bin_V: np.ndarray
    forbidden_V: np.ndarray


class CoordVocab:
    """Token id → bytes, token id ↔ bin, and text → token ids, for one tokenizer.

    ``encode(text, add_special_tokens=False)["input_ids"]`` are the token ids of a text and, where ``batches``, the
    lists of ids of a list of texts.

    Attributes:
        pieces: by token id, the exact bytes that a token contributes to the decoded text.
        coord_token_ids: the 1000 ids, in bin order.
        bins: coordinate token id → bin.
        eos_id: id of ``<|im_end|>``, which ends the assistant's turn.
        control_ids: tokens that no answer may contain because they mean more to the model than their text: image and
            video placeholders, turn marks, end and padding tokens.
        reserved_ids: these and every other ``<|…|>`` token: an answer may contain them, written ground truth may not.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        coord_token_ids: Sequence[int],
        eos_id: int,
        control_ids: Iterable[int],
        encode: Any,
        batches: bool = False,
        reserved_ids: Iterable[int] = (),
    ) -> None:
        self.pieces = tuple(pieces)
        self._encode = encode
        self._batches = batches
        self.coord_token_ids = tuple(coord_token_ids)
        self.eos_id = eos_id
        self.control_ids = frozenset(control_ids)
        self.reserved_ids = self.control_ids | frozenset(reserved_ids)
        self.bins = {token_id: k for k, token_id in enumerate(self.coord_token_ids)}
        self._ids_of_part: dict[str, tuple[int, ...]] = {}
        self._splits_at_coords = self._has_split_at_coords()

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> CoordVocab:
        """Read the vocabulary of a fast byte-level BPE tokenizer (the Qwen family's). Raises VocabError if a coordinate
        token or ``<|im_end|>`` is missing, or is split into several ids."""
        added: dict[str, int] = tokenizer.get_added_vocab()
        missing = [token for token in COORD_TOKENS if token not in added]
        if missing:
            raise VocabError(
                f"the tokenizer lacks {len(missing)} of the 1000 coordinate tokens (first: {missing[0]}); "
                "add them with: coordexp model expand-vocab CHECKPOINT OUTPUT"
            )
        if TURN_END not in added:
            raise VocabError(f"the tokenizer has no {TURN_END} token; use a Qwen chat tokenizer")
        coord_ids = [added[token] for token in COORD_TOKENS]
        if len(set(coord_ids)) != NUM_BINS:
            raise VocabError("coordinate tokens share ids; rebuild the tokenizer with coordexp model expand-vocab")
        text_of_added = {token_id: text for text, token_id in added.items()}
        byte_of = _byte_of_char()
        pieces: list[bytes] = []
        for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
            if token_id in text_of_added:
                pieces.append(text_of_added[token_id].encode())
            elif token is None:  # a hole in the id space: no tokenizer output ever uses it
                pieces.append(b"")
            else:
                try:
                    pieces.append(bytes(byte_of[char] for char in token))
                except KeyError as error:
                    raise VocabError(
                        f"token {token_id} ({token!r}) is not byte-level BPE; use a Qwen tokenizer"
                    ) from error
        marked = {token_id for text, token_id in added.items() if text.startswith("<|") and text.endswith("|>")}
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        control = ends | {added[text] for text in _CONTROL_TOKENS if text in added}
        reserved = (marked | set(tokenizer.all_special_ids)) - set(coord_ids)
        return cls(pieces, coord_ids, added[TURN_END], control, tokenizer, batches=True, reserved_ids=reserved)

    def __len__(self) -> int:
        return len(self.pieces)

    def bin_of(self, token_id: int) -> int | None:
        """The bin that ``token_id`` writes, or None when it is not a coordinate token."""
        return self.bins.get(token_id)

    @cached_property
    def layout(self) -> TokenLayout:
        """Properties of every id, as arrays."""
        import numpy as np  # commands that look at a vocabulary need no arrays

        length_V = np.array([*map(len, self.pieces), 0], dtype=np.int32)
        bin_V = np.full(len(length_V), -1, dtype=np.int16)
        bin_V[list(self.coord_token_ids)] = np.arange(NUM_BINS)
        forbidden_V = length_V == 0
        forbidden_V[sorted(self.control_ids)] = True
        return TokenLayout(length_V, bin_V, forbidden_V)

    def piece(self, token_id: int) -> str:
        """``token_id`` decoded alone; U+FFFD where it holds part of a character."""
        return self.pieces[token_id].decode("utf-8", errors="replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ``token_ids``, special tokens included; equals the tokenizer's own decode without clean-up. An id
        that the tokenizer does not have writes nothing."""
        pieces, size = self.pieces, len(self.pieces)
        written = [pieces[token_id] for token_id in token_ids if 0 <= token_id < size]
        return b"".join(written).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` with no special tokens added (coordinate literals become coordinate tokens)."""
        return self._encode(text, add_special_tokens=False)["input_ids"]

    def encode_answer(self, text: str) -> list[int]:
        """:meth:`encode` of text that :func:`serialize_append` wrote: the same ids, several times faster.

        Tokenizers split text at added tokens first, so the text between two coordinates is encoded on its own, and the
        same parts occur in every answer: each part is encoded once and cached. If this does not hold for a tokenizer
        (checked on a sample answer), it encodes the whole text.
        """
        if not self._splits_at_coords:
            return self.encode(text)
        parts = _COORD_LITERAL.split(text)  # text, bin, text, bin, …, text
        known = self._ids_of_part
        unknown = [part for part in dict.fromkeys(parts[::2]) if part not in known]
        if unknown:
            if len(known) + len(unknown) > _MAX_REMEMBERED:
                known = self._ids_of_part = {}  # another thread may be reading the old one
                unknown = list(dict.fromkeys(parts[::2]))
            encoded: list[list[int]] = self._encode(unknown, add_special_tokens=False)["input_ids"]
            known.update(zip(unknown, map(tuple, encoded), strict=True))
        ids = list(known[parts[0]])
        coord_ids = self.coord_token_ids
        for k, part in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(coord_ids[int(k)])
            ids += known[part]
        return ids

    def _has_split_at_coords(self) -> bool:
        """Whether coordinates split their surroundings, on a sample with words, spaces and quotes next to them."""
        if not self._batches:
            return False
        sample = '{"object_1": {"desc": "black cat", "bbox_2d": ["<|coord_0|>", "<|coord_7|>", "<|coord_42|>"]}, x'
        sample += '<|coord_999|>y <|coord_1|> z: ["<|coord_1|>", <|coord_3|>], "desc": "wow! 龘"}}'
        self._splits_at_coords = True
        ids = self.encode_answer(sample)
        self._ids_of_part.clear()
        return ids == self.encode(sample)


_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
FieldOrder = Literal["desc_first", "geometry_first"]
FIELD_ORDERS: tuple[str, ...] = get_args(FieldOrder)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Text and the half-open character ranges of its objects.

    ``desc_spans``: *inside* the quotes of each desc. ``entry_spans``: from the separator before an entry (or its key,
    if there is none) to after its closing brace.
    """

    text: str
    desc_spans: tuple[tuple[int, int], ...]
    entry_spans: tuple[tuple[int, int], ...]


def serialize_objects(objects: Sequence[GTObject], field_order: FieldOrder = "desc_first") -> str:
    """The whole answer for ``objects``: ``{"object_1": {…}, …}``; ``{}`` when there are none."""
    return append_fragment(objects, "{", 1, field_order, opening="{").text


def serialize_append(
    objects: Sequence[GTObject], prefix_text: str, start_index: int, field_order: FieldOrder = "desc_first"
) -> str:
    """Continue an open root object: entries ``object_{start_index}`` … and the closing brace.

    The leading comma follows the last non-whitespace character of ``prefix_text``: none after ``{`` or ``,``, one
    after ``}``; other characters are an error.

    Raises:
        AppendError: ``prefix_text`` is not append-ready (it ends elsewhere, inside a string, or not at the root's
            depth), or ends with a comma and there is nothing to append.
        ValueError: another ``field_order``, or a bin outside 0 … 999.
    """
    depth = 0
    for mark in _MARK.findall(prefix_text):
        if mark == '"':  # a string that does not end
            raise AppendError(f"cannot append after {prefix_text[-40:]!r}: it ends inside a string")
        depth += (mark in "{[") - (mark in "}]") if len(mark) == 1 else 0
    if depth != 1 and prefix_text.rstrip()[-1:] in ("{", ",", "}"):  # append_fragment refuses other ends
        raise AppendError(
            f"cannot append after {prefix_text[-40:]!r}: {depth} brackets are open there, not the root's alone"
        )
    return append_fragment(objects, prefix_text, start_index, field_order).text


def append_fragment(
    objects: Sequence[GTObject], prefix_text: str, start_index: int, field_order: FieldOrder, opening: str = ""
) -> Fragment:
    """:func:`serialize_append` with positions, for the prefix of a parsed rollout: only its last character is
    checked. The fragment starts with ``opening``."""
    if field_order not in FIELD_ORDERS:
        raise ValueError(f"field_order is {field_order!r}; write {' or '.join(FIELD_ORDERS)}")
    last = prefix_text.rstrip()[-1:]
    if last not in ("{", ",", "}"):
        raise AppendError(
            f"cannot append after {prefix_text[-40:]!r}: an append-ready prefix ends with '{{', ',' or '}}'"
        )
    if last == "," and not objects:
        raise AppendError("the prefix ends with a comma, but nothing follows; cut before the comma")
    parts = [opening]
    at = len(opening)
    spans: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []

    def write(piece: str) -> None:
        nonlocal at
        parts.append(piece)
        at += len(piece)

    for offset, obj in enumerate(objects):
        entry_start = at
        write(", " if offset or last == "}" else "")
        write(f'"object_{start_index + offset}": {{')
        desc = json.dumps(obj.desc, ensure_ascii=False)
        if min(obj.bins, default=0) < 0 or max(obj.bins, default=0) >= NUM_BINS:  # -1 would be 999
            raise ValueError(f"{obj.desc!r} has a bin outside 0 … {NUM_BINS - 1}: {list(obj.bins)}")
        geometry = f'"{obj.kind}": [' + ", ".join([f'"{COORD_TOKENS[k]}"' for k in obj.bins]) + "]"
        if field_order == "geometry_first":
            write(geometry + ", ")
        write('"desc": ')
        spans.append((at + 1, at + len(desc) - 1))
        write(desc)
        if field_order == "desc_first":
            write(", " + geometry)
        write("}")
        entries.append((entry_start, at))
    write("}")
    return Fragment("".join(parts), tuple(spans), tuple(entries))
