"""The coordinate vocabulary: 1000 tokens ``<|coord_0|>`` … ``<|coord_999|>``, and what every token id writes.

Torch-free. Works on bytes because byte-level BPE splits characters over tokens: JSON structure is ASCII, so a byte
scan is exact where a scan over decoded pieces would meet replacement characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from coordexp.errors import VocabError
from coordexp.records import NUM_BINS

TURN_END = "<|im_end|>"


def coord_token(bin_index: int) -> str:
    """The text of coordinate token ``bin_index`` (0..999)."""
    return f"<|coord_{bin_index}|>"


COORD_TOKENS: tuple[str, ...] = tuple(coord_token(k) for k in range(NUM_BINS))


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Inverse of GPT-2's printable alphabet for bytes (Radford et al. 2019), which byte-level BPE files use."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


class CoordVocab:
    """Token id → bytes, token id ↔ bin, and text → token ids, for one tokenizer.

    Attributes:
        coord_token_ids: the 1000 ids, in bin order.
        eos_id: id of ``<|im_end|>``, which ends the assistant's turn.
        control_ids: special tokens that no answer may contain (image placeholders, turn marks, …).
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        coord_token_ids: Sequence[int],
        eos_id: int,
        control_ids: Iterable[int],
        encode: Any,
    ) -> None:
        self._pieces = tuple(pieces)
        self._encode = encode
        self.coord_token_ids = tuple(coord_token_ids)
        self.eos_id = eos_id
        self.control_ids = frozenset(control_ids)
        self._bins = {token_id: k for k, token_id in enumerate(self.coord_token_ids)}

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> CoordVocab:
        """Read the vocabulary of a fast byte-level BPE tokenizer (the Qwen family's).

        Raises:
            VocabError: a coordinate token or ``<|im_end|>`` is missing, or is split into several ids.
        """
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
        specials = set(tokenizer.all_special_ids) | {
            token_id for text, token_id in added.items() if text.startswith("<|") and text.endswith("|>")
        }
        return cls(pieces, coord_ids, added[TURN_END], specials - set(coord_ids), tokenizer)

    def __len__(self) -> int:
        return len(self._pieces)

    def bin_of(self, token_id: int) -> int | None:
        """The bin that ``token_id`` writes, or None when it is not a coordinate token."""
        return self._bins.get(token_id)

    def piece_bytes(self, token_id: int) -> bytes:
        """The exact bytes that ``token_id`` contributes to the decoded text."""
        return self._pieces[token_id]

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """All pieces by id, for loops that cannot afford a call per token."""
        return self._pieces

    def piece(self, token_id: int) -> str:
        """``token_id`` decoded alone; U+FFFD where it holds part of a character."""
        return self._pieces[token_id].decode("utf-8", errors="replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ``token_ids``, special tokens included; equals the tokenizer's own decode without clean-up."""
        pieces = self._pieces
        return b"".join([pieces[token_id] for token_id in token_ids]).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` with no special tokens added (coordinate literals become coordinate tokens)."""
        return self._encode(text, add_special_tokens=False)["input_ids"]
