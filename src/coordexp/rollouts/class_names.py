"""Constrained decoding of descriptions: which tokens may come next if every description is a class name of a list.

Torch-free. Works on the bytes that tokens write: a small scanner reads the answer's JSON, and inside a description a
token is allowed if its bytes continue a name, or end it and continue as JSON. So any tokens may spell a name.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coordexp.errors import ConfigError

_KEY = b"desc"
_SPACES = frozenset(b" \t\n\r")
_QUOTE, _COLON, _BACKSLASH = b'":\\'


class ScanState(NamedTuple):
    """State of the incremental JSON scanner, by ``kind``: ``out`` (outside of strings), ``text`` (inside a string;
    ``at`` bytes of the key "desc" match so far, -1 for another string; ``escaped`` after a backslash), ``key`` (after
    the key "desc"), ``colon`` (after its colon), ``name`` (inside a class name, at trie node ``at``)."""

    kind: str
    at: int = 0
    escaped: bool = False


START = ScanState("out")
_AFTER_KEY, _AFTER_COLON = ScanState("key"), ScanState("colon")


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """The allowed tokens, or, if nearly all are allowed, the forbidden ones."""

    ids: np.ndarray
    are_allowed: bool


class ClassNames:
    """Class names as a trie over bytes, for one vocabulary."""

    def __init__(self, names: Sequence[str], pieces: Sequence[bytes], eos_id: int) -> None:
        """``pieces[token_id]``: the bytes that a token writes (:attr:`coordexp.coords.CoordVocab.pieces`). Raises
        ConfigError for no name, or an empty one."""
        if not names or not all(name.strip() for name in names):
            raise ConfigError(f"a list of class names needs at least one name, none empty; got {list(names)!r}")
        self._pieces = pieces
        self._eos_id = eos_id
        self._children: list[dict[int, int]] = [{}]
        self._is_end = [False]
        for name in names:
            node = 0
            for byte in json.dumps(name, ensure_ascii=False)[1:-1].encode():
                if byte not in self._children[node]:
                    self._children[node][byte] = len(self._children)
                    self._children.append({})
                    self._is_end.append(False)
                node = self._children[node][byte]
            self._is_end[node] = True
        self._sorted = sorted((piece, token_id) for token_id, piece in enumerate(pieces) if piece)
        self._known: dict[tuple[ScanState, int], ScanState | None] = {}
        self._next: dict[ScanState, NextTokens] = {}

    def after(self, state: ScanState, token_id: int) -> ScanState | None:
        """The state after a token; None if the token is not allowed."""
        if (state, token_id) not in self._known:
            piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
            # A token that writes nothing cannot be part of a label.
            refused = not piece and state.kind in ("name", "colon")
            self._known[state, token_id] = None if refused else self._walk(state, piece)
        return self._known[state, token_id]

    def next_tokens(self, state: ScanState) -> NextTokens:
        """Which tokens are allowed in a state; the same object for equal states."""
        if state not in self._next:
            if state.kind == "name":
                tokens = NextTokens(_ids(self._continuations(state.at)), are_allowed=True)
            elif state == _AFTER_COLON:
                fits = {token_id for piece, token_id in self._sorted if self._walk(state, piece) is not None}
                tokens = NextTokens(_ids(fits - {self._eos_id}), are_allowed=True)
            else:
                # From here, only a token with a quote or a colon can reach a description.
                near = ((piece, token_id) for piece, token_id in self._sorted if b'"' in piece or b":" in piece)
                bad = (token_id for piece, token_id in near if self._walk(state, piece) is None)
                tokens = NextTokens(_ids(bad), are_allowed=False)
            self._next[state] = tokens
        return self._next[state]

    def _walk(self, state: ScanState, piece: bytes) -> ScanState | None:
        for byte in piece:
            if state.kind == "name":
                if byte == _QUOTE and self._is_end[state.at]:
                    state = START
                elif byte in self._children[state.at]:
                    state = ScanState("name", self._children[state.at][byte])
                else:
                    return None
            elif state == _AFTER_COLON:
                if byte == _QUOTE:
                    state = ScanState("name")
                elif byte not in _SPACES:
                    return None
            else:
                state = _outside_of_names(state, byte)
        return state

    def _continuations(self, node: int) -> Iterator[int]:
        """Ids of tokens that continue a name from ``node``, or end it and continue with allowed JSON."""
        waiting = [(node, b"")]
        while waiting:
            node, written = waiting.pop()
            for byte, child in self._children[node].items():
                longer = written + bytes([byte])
                exact = True
                for piece, token_id in self._beginning_with(longer):
                    if piece != longer:
                        exact = False
                        break
                    yield token_id
                if not exact:
                    waiting.append((child, longer))
            if self._is_end[node]:
                for piece, token_id in self._beginning_with(written + b'"'):
                    if token_id != self._eos_id and self._walk(START, piece[len(written) + 1 :]) is not None:
                        yield token_id

    def _beginning_with(self, start: bytes) -> Iterator[tuple[bytes, int]]:
        for at in range(bisect_left(self._sorted, (start, -1)), len(self._sorted)):
            if not self._sorted[at][0].startswith(start):
                return
            yield self._sorted[at]


def _outside_of_names(state: ScanState, byte: int) -> ScanState:
    if state.kind == "text":
        if state.escaped:
            return ScanState("text", -1)
        if byte == _BACKSLASH:
            return ScanState("text", -1, escaped=True)
        if byte == _QUOTE:
            return _AFTER_KEY if state.at == len(_KEY) else START
        fits = 0 <= state.at < len(_KEY) and byte == _KEY[state.at]
        return ScanState("text", state.at + 1 if fits else -1)
    if byte == _QUOTE:
        return ScanState("text")
    if state == _AFTER_KEY:
        return _AFTER_COLON if byte == _COLON else state if byte in _SPACES else START
    return START


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(sorted(set(token_ids)), dtype=np.int64)


def are_class_names(given: Any) -> bool:
    """Whether ``given``, any JSON value, is a list of class names, which may be empty."""
    texts = isinstance(given, list) and all(isinstance(name, str) and name.strip() for name in given)
    return texts and not any("\ud800" <= char <= "\udfff" for name in given for char in name)  # halves of characters
