"""Reads a canonical answer token by token, and predicts the tokens that come next. Torch-free.

A canonical answer is the text of :func:`coordexp.coords.serialize_objects`, as the tokenizer splits it. Most of its
tokens are forced, i.e. determined by the tokens before: keys, quotes, brackets and the next index. The model decides
names, coordinates, the kind of geometry, whether a polygon continues, and whether another object follows.

Coordinates are added tokens, so the text between two of them is tokenized separately. Each such text is one of a few
patterns that contain at most one name. Its last tokens may depend on a decision that is still open (``}`` and ``}}``
may each be one token), so the forced tokens are the common beginning of all possible texts.

After the first token that is not canonical, nothing is predicted any more. The repeat guard and allowed labels must
read any text, degenerate answers too, so they have scanners of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coordexp.coords import CoordVocab, FieldOrder
from coordexp.records import GEOMETRY_KINDS, GeometryKind

# Names that begin in ways that tokenizers treat differently. Tokens that are equal for all of them are taken to be the
# same for any name.
_BEGINNINGS = ("a", "Z", "7", "é", "龘", "-", "_", "(", "🙂", '\\"')
_MAX_REMEMBERED = 50_000  # drafts, and texts between coordinates
_BOX, _MIN_POLY = 4, 6  # coordinates
_NEXT = b'", "'  # between two coordinates of an object
# Most tokens of the guess that a name ends, which is often wrong. With Qwen's tokenizer it takes 6 tokens. On a CPU
# these cost more than the passes that it saves; on a GPU a pass takes as long with them.
_SHORT, _SHORT_ON_GPU = 2, 8


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A text between coordinates: ``before``, and if ``after`` is not None a name and ``after``.

    Then the turn ends, or a coordinate follows: the next one of the same object, or the first one of a new object,
    whose ``kind`` and ``order`` are then given.
    """

    before: str
    after: str | None
    ends: bool = False
    kind: GeometryKind | None = None
    order: FieldOrder | None = None


@lru_cache(maxsize=4096)
def _patterns(order: FieldOrder | None, kind: GeometryKind | None, count: int, index: int) -> tuple[_Pattern, ...]:
    """The patterns that may follow ``count`` coordinates of object ``index``, of ``kind``; index 0 at the answer's
    start. The most probable first: more coordinates of a polygon, another object of the same kind, the end."""
    patterns = []
    if index and (kind == "poly" or count < _BOX):
        patterns.append(_Pattern('", "', None))
    if index and (count < _BOX if kind == "bbox_2d" else count < _MIN_POLY or count % 2):
        return tuple(patterns)
    closing = "{" if not index else '"], "desc": "' if order == "geometry_first" else '"]}'
    for new in sorted(GEOMETRY_KINDS, key=lambda one: one != (kind or "bbox_2d")):
        entry, opening = f'{", " if index else ""}"object_{index + 1}": {{', f'"{new}": ["'
        if order == "geometry_first":
            patterns.append(_Pattern(closing, f'"}}{entry}{opening}', False, new, order))
            continue
        patterns.append(_Pattern(f'{closing}{entry}"desc": "', f'", {opening}', False, new, "desc_first"))
        if order is None:
            patterns.append(_Pattern(f"{closing}{entry}{opening}", None, False, new, "geometry_first"))
    end = _Pattern(closing, '"}}', True) if order == "geometry_first" else _Pattern(closing + "}", None, True)
    return (*patterns, end)


class AnswerGrammar:
    """Canonical answers in one vocabulary. Remembers drafts, and the tokens of texts between coordinates. ``on_gpu``:
    guess more, because a drafted token costs less."""

    def __init__(self, vocab: CoordVocab, on_gpu: bool = False) -> None:
        self.vocab, self.pieces = vocab, vocab.pieces
        self.closing = frozenset((vocab.eos_id, *vocab.coord_token_ids))  # they end a text between coordinates
        self.longest_guess = _SHORT_ON_GPU if on_gpu else _SHORT
        self.drafts: OrderedDict[Hashable, tuple[int, ...] | str] = OrderedDict()  # see AnswerState.draft
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def start(self) -> AnswerState:
        """The state of an empty answer."""
        return AnswerState(self)

    def tokens(self, text: str) -> tuple[int, ...]:
        """Tokens of a text between coordinates."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = tuple(self.vocab.encode(text))
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return found


class AnswerState:
    """One answer so far.

    Only canonical answers are followed: after another token ``is_canonical`` is False and nothing is forced any more.
    ``names``: descriptions of the objects so far, as they are written in JSON.
    """

    def __init__(self, grammar: AnswerGrammar) -> None:
        self._grammar = grammar
        self.is_canonical = True
        self.names: list[str] = []
        self._order: FieldOrder | None = None
        self._kind: GeometryKind | None = None
        self._index = self._count = self._poly_size = 0
        self._ids: list[int] = []  # since the last coordinate
        self._bytes = b""

    def push(self, token_id: int) -> None:
        """Add the answer's next token."""
        if not self.is_canonical:
            return
        grammar = self._grammar
        if token_id not in grammar.closing:
            self._ids.append(token_id)
            self._bytes += grammar.pieces[token_id] if token_id < len(grammar.pieces) else b""
            return
        ends = token_id == grammar.vocab.eos_id
        if self._bytes == _NEXT and not ends and self._index and (self._kind == "poly" or self._count < _BOX):
            self._count += 1  # the first pattern, and by far the most frequent one
            self._ids, self._bytes = [], b""
            return
        self.is_canonical = self._close_text(ends)

    def forced(self) -> tuple[int, ...]:
        """The tokens with which every canonical continuation begins; ``()`` where the next token is a decision."""
        if not self.is_canonical:
            return ()
        text = self._text()
        shared: tuple[int, ...] | None = None
        for pattern in self._open():
            name = _name_in(text, pattern)
            if name is not None and not name[1]:
                return ()  # inside a name
            names = [name[0]] if name is not None else _BEGINNINGS if pattern.after is not None else [""]
            shared = self._shared_tokens(pattern, names, shared)
        return shared or ()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Up to ``limit`` tokens that probably come next: forced ones, and guesses of decisions.

        Guesses depend only on the answer: another object of the same kind follows; after two objects with one name, the
        next one has it too; a name that begins like an earlier one is completed to it; any other name ends when it has
        as many words as the one before, if the tokenizer needs few tokens for that; a polygon has as many coordinates
        as the one before.
        """
        if not self.is_canonical:
            return ()
        repeated = self.names[-1] if len(self.names) > 1 and self.names[-1] == self.names[-2] else None
        # All that a draft depends on. Inside a name it also depends on the answer's names, so the name's beginning is
        # remembered then, and the draft for each name that is guessed.
        key = (self._order, self._kind, self._count, self._index, tuple(self._ids), repeated, self._poly_ends())
        found = self._remembered(key, lambda: self._guess(repeated) if (begun := self._name_begun()) is None else begun)
        return (self._guess_after(found, key) if isinstance(found, str) else found)[:limit]

    def _guess_after(self, begun: str, key: Hashable) -> tuple[int, ...]:
        # Inside a name that begins with ``begun``.
        if not begun:
            return ()
        known = next((name for name in reversed(self.names) if name.startswith(begun)), None)
        words = len(self.names[-1].split()) if self.names else 1
        if known is None and len(begun.split()) < words:
            return ()
        name = begun if known is None else known
        found = self._remembered((key, name), lambda: self._guess(name))
        return found if known is not None or len(found) <= self._grammar.longest_guess else ()

    def _remembered(self, key: Hashable, guess: Callable[[], tuple[int, ...] | str]) -> Any:
        drafts = self._grammar.drafts
        found = drafts.get(key)
        if found is None:
            found = drafts[key] = guess()
            if len(drafts) > _MAX_REMEMBERED:
                drafts.popitem(last=False)
        return found

    def _poly_ends(self) -> bool:
        # Whether the polygon probably ends here.
        return self._kind == "poly" and self._count == self._poly_size

    def _guess(self, name: str | None) -> tuple[int, ...]:
        # Tokens of the most probable text that fits; with ``name`` None, only those that are the same for any name.
        patterns = self._open()
        if self._poly_ends():
            patterns.sort(key=lambda one: one.kind is None and not one.ends)  # another coordinate last
        for pattern in patterns:
            written = _name_in(self._text(), pattern)
            if written is not None and written[1]:
                names: Sequence[str] = [written[0]]
            elif pattern.after is None:
                names = [""]
            else:
                names = _BEGINNINGS if name is None else [name]
            if shared := self._shared_tokens(pattern, names):
                return shared
        return ()

    def _shared_tokens(
        self, pattern: _Pattern, names: Sequence[str], shared: tuple[int, ...] | None = None
    ) -> tuple[int, ...] | None:
        # The tokens after the current ones with which ``shared`` and the pattern with each of the names begin; None for
        # no such text.
        done = len(self._ids)
        for name in names:
            ids = self._grammar.tokens(pattern.before + name + (pattern.after or ""))
            if list(ids[:done]) == self._ids:
                ids = (*ids, self._grammar.vocab.eos_id) if pattern.ends else ids
                shared = ids[done:] if shared is None else _common(shared, ids[done:])
        return shared

    def _name_begun(self) -> str | None:
        # The beginning of a name at the end of the text; None outside a name.
        for pattern in self._open():
            written = _name_in(self._text(), pattern)
            if written is not None and not written[1]:
                return written[0]
        return None

    def _text(self) -> str:
        return self._bytes.decode("utf-8", errors="replace")

    def _open(self) -> list[_Pattern]:
        # Patterns that the text since the last coordinate may still become.
        text = self._text()
        patterns = _patterns(self._order, self._kind, self._count, self._index)
        return [pattern for pattern in patterns if _fits(text, pattern)]

    def _close_text(self, ends: bool) -> bool:
        # A coordinate, or the end of the turn, ends the text: apply the pattern that it matches. False if none does.
        text = self._text()
        for pattern in self._open():
            name = _name_in(text, pattern)
            whole = pattern.before + ("" if name is None else name[0]) + (pattern.after or "")
            if pattern.ends != ends or text != whole:
                continue
            if name is not None:
                self.names.append(name[0])
            if self._kind == "poly" and (pattern.kind is not None or ends):
                self._poly_size = self._count
            if pattern.kind is not None:
                self._kind, self._order, self._count = pattern.kind, pattern.order, 0
                self._index += 1
            self._count += 1
            self._ids, self._bytes = [], b""
            return True
        return False


def forced_positions(grammar: AnswerGrammar, token_ids: Sequence[int]) -> Iterator[int]:
    """Positions of an answer's forced tokens, i.e. those that the tokens before them determine."""
    state, ahead = grammar.start(), ()
    for at, token_id in enumerate(token_ids):
        ahead = ahead or state.forced()
        if ahead[:1] == (token_id,):
            yield at
            ahead = ahead[1:]
        else:
            ahead = ()
        state.push(token_id)


def _fits(text: str, pattern: _Pattern) -> bool:
    if pattern.after is None or len(text) <= len(pattern.before):
        return pattern.before.startswith(text)
    name = _name_in(text, pattern)
    if name is None:
        return False
    return not name[1] or pattern.after.startswith(text[len(pattern.before) + len(name[0]) :])


def _name_in(text: str, pattern: _Pattern) -> tuple[str, bool] | None:
    """The name in ``text``, or its beginning, and whether it is complete; None if no name has begun."""
    if pattern.after is None or len(text) <= len(pattern.before) or not text.startswith(pattern.before):
        return None
    start = at = len(pattern.before)
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return text[start:at], at < len(text)


def _common(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    most = min(len(first), len(second))
    return tuple(first[: next((k for k in range(most) if first[k] != second[k]), most)])
