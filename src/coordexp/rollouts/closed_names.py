"""A closed list of class names: which tokens may come next, so that every description is one of them. Torch-free.

Works on the bytes that tokens write. An answer's state says where in its JSON it stands; inside a description, a token
may come next if its bytes continue one of the names, or end it and go on. Whatever the tokenizer, every way to cut a
name into tokens is open, and nothing else is.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coordexp.errors import ConfigError

_KEY = b"desc"
_SPACES = frozenset(b" \t\n\r")
_QUOTE, _COLON, _BACKSLASH = b'":\\'


class Place(NamedTuple):
    """Where an answer stands. ``kind``: ``out`` of strings; in a ``text``, of which ``at`` bytes are the key's so far
    (-1: it is another one), ``escaped`` behind a backslash; behind the ``key``; behind its ``colon``; in a ``name``, at
    node ``at`` of the tree."""

    kind: str
    at: int = 0
    escaped: bool = False


START = Place("out")
_BEHIND_KEY, _BEHIND_COLON = Place("key"), Place("colon")


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """The tokens that may come next, or, where nearly all may, those that may not."""

    ids: np.ndarray
    are_allowed: bool


class ClosedNames:
    """The rule for one vocabulary and one list of names."""

    def __init__(self, names: Sequence[str], pieces: Sequence[bytes], eos_id: int) -> None:
        """``pieces[token_id]``: the bytes that a token writes (:attr:`coordexp.coords.CoordVocab.pieces`).

        Raises:
            ConfigError: no name, or an empty one.
        """
        if not names or not all(name.strip() for name in names):
            raise ConfigError(f"a closed list of class names needs at least one, and none empty; got {list(names)!r}")
        self._pieces = pieces
        self._eos_id = eos_id
        self._children: list[dict[int, int]] = [{}]
        self._is_end = [False]
        for name in names:
            self._plant(json.dumps(name, ensure_ascii=False)[1:-1].encode())
        self._sorted = sorted((piece, token_id) for token_id, piece in enumerate(pieces) if piece)
        self._known: dict[tuple[Place, int], Place | None] = {}
        self._next: dict[Place, NextTokens] = {}

    def after(self, place: Place, token_id: int) -> Place | None:
        """Where an answer stands behind a token; None where the token may not come."""
        if (place, token_id) not in self._known:
            piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
            self._known[place, token_id] = self._walk(place, piece) if piece else _unless_named(place)
        return self._known[place, token_id]

    def next_tokens(self, place: Place) -> NextTokens:
        """What may be written there; the same object for equal places."""
        if place not in self._next:
            if place.kind == "name":
                tokens = NextTokens(_ids(self._continuations(place.at)), are_allowed=True)
            elif place == _BEHIND_COLON:
                fits = (token_id for piece, token_id in self._sorted if self._walk(place, piece) is not None)
                tokens = NextTokens(_ids(token_id for token_id in fits if token_id != self._eos_id), are_allowed=True)
            else:
                # Without a quote or a colon no token comes near a description from here.
                near = ((piece, token_id) for piece, token_id in self._sorted if b'"' in piece or b":" in piece)
                bad = (token_id for piece, token_id in near if self._walk(place, piece) is None)
                tokens = NextTokens(_ids(bad), are_allowed=False)
            self._next[place] = tokens
        return self._next[place]

    def _plant(self, name: bytes) -> None:
        node = 0
        for byte in name:
            if byte not in self._children[node]:
                self._children[node][byte] = len(self._children)
                self._children.append({})
                self._is_end.append(False)
            node = self._children[node][byte]
        self._is_end[node] = True

    def _walk(self, place: Place, piece: bytes) -> Place | None:
        for byte in piece:
            if place.kind == "name":
                if byte == _QUOTE and self._is_end[place.at]:
                    place = START
                elif byte in self._children[place.at]:
                    place = Place("name", self._children[place.at][byte])
                else:
                    return None
            elif place == _BEHIND_COLON:
                if byte == _QUOTE:
                    place = Place("name")
                elif byte not in _SPACES:
                    return None
            else:
                place = _outside_of_names(place, byte)
        return place

    def _continuations(self, node: int) -> Iterator[int]:
        """Ids of tokens that continue a name from ``node``, or end it and go on allowedly."""
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


def _outside_of_names(place: Place, byte: int) -> Place:
    if place.kind == "text":
        if place.escaped:
            return Place("text", -1)
        if byte == _BACKSLASH:
            return Place("text", -1, escaped=True)
        if byte == _QUOTE:
            return _BEHIND_KEY if place.at == len(_KEY) else START
        fits = 0 <= place.at < len(_KEY) and byte == _KEY[place.at]
        return Place("text", place.at + 1 if fits else -1)
    if byte == _QUOTE:
        return Place("text")
    if place == _BEHIND_KEY:
        return _BEHIND_COLON if byte == _COLON else place if byte in _SPACES else START
    return START


def _unless_named(place: Place) -> Place | None:
    """A token that writes nothing: no part of a name."""
    return None if place.kind in ("name", "colon") else place


def _ids(token_ids: Iterator[int]) -> np.ndarray:
    return np.array(sorted(set(token_ids)), dtype=np.int64)


def are_names(given: Any) -> bool:
    """Whether ``given``, which may be anything that JSON holds, is a list of names, perhaps an empty one."""
    texts = isinstance(given, list) and all(isinstance(name, str) and name.strip() for name in given)
    return texts and not any("\ud800" <= char <= "\udfff" for name in given for char in name)  # halves of characters


def by_place(places: Sequence[Place | None]) -> dict[Place, list[int]]:
    """Rows by where they stand; rows of which nothing is asked (None) in none."""
    rows: defaultdict[Place, list[int]] = defaultdict(list)
    for row, place in enumerate(places):
        if place is not None:
            rows[place].append(row)
    return dict(rows)
