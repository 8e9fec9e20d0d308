"""Reads a canonical answer token by token, and predicts the tokens that come next. Torch-free.

A canonical answer is the text of :func:`coordexp.coords.serialize_objects`, as the tokenizer splits it. Most of its
tokens are forced, i.e. determined by the tokens before: keys, quotes, brackets and the next index. The model decides
names, coordinates, the kind of geometry, whether a polygon continues, and whether another object follows.

Coordinates are added tokens, so the text between two of them is tokenized separately. Each such text is one of a few
patterns that contain at most one name. Its last tokens may depend on a decision that is still open (``}`` and ``}}``
may each be one token), so the forced tokens are the common beginning of all possible texts.

After the first token that is not canonical, nothing is predicted any more. The repeat guard and class names must
read any text, degenerate answers too, so they have scanners of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from coordexp.coords import CoordVocab, FieldOrder
from coordexp.records import GEOMETRY_KINDS, GeometryKind

# Names that begin in ways that tokenizers treat differently. Tokens that are equal for all of them are taken to be the
# same for any name.
_BEGINNINGS = ("a", "Z", "7", "é", "龘", "-", "_", "(", "🙂", '\\"')
_MAX_REMEMBERED = 50_000  # places
_MAX_DRAFTS = 1_000  # of one place: with other names
_BOX, _MIN_POLY = 4, 6  # coordinates
_COORDINATE = -1  # any coordinate's token
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
    """Canonical answers in one vocabulary. Remembers places, with their drafts. ``on_gpu``: guess more, because a
    drafted token costs less."""

    def __init__(self, vocab: CoordVocab, on_gpu: bool = False) -> None:
        self.vocab = vocab
        self.coordinates = frozenset(vocab.coord_token_ids)
        self.longest_guess = _SHORT_ON_GPU if on_gpu else _SHORT
        self._places: dict[tuple[Any, ...], _Place] = {}

    def start(self) -> AnswerState:
        """The state of an empty answer."""
        return AnswerState(self)

    def place(self, *decided: Any) -> _Place:
        """The one place of these arguments of :class:`_Place`."""
        found = self._places.get(decided)
        if found is None:
            if len(self._places) >= _MAX_REMEMBERED:
                self._places.clear()  # answers keep those that they need
            found = self._places[decided] = _Place(self, *decided)
        return found


class _Place:
    """A place in canonical answers, shared by all answers that get there: the ``order`` of the fields, ``kind`` and
    ``index`` of the object, its ``count`` coordinates so far, and the tokens ``ids`` since the last one. ``begun``: the
    name of which the text has a beginning only, None outside a name.

    Reading a token and drafting are look-ups here, because a GPU waits for both after each step.
    """

    def __init__(
        self,
        grammar: AnswerGrammar,
        order: FieldOrder | None = None,
        kind: GeometryKind | None = None,
        index: int = 0,
        count: int = 0,
        ids: tuple[int, ...] = (),
    ) -> None:
        self._grammar = grammar
        self.decided, self.kind, self.count, self.ids = (order, kind, index), kind, count, ids
        self.after: dict[int, _Step] = {}
        self._drafts: dict[tuple[str | None, bool], tuple[int, ...]] = {}

    @cached_property
    def _text(self) -> str:
        return self._grammar.vocab.decode(self.ids)

    @cached_property
    def _open(self) -> list[_Pattern]:
        # Patterns that the text since the last coordinate may still become.
        order, kind, index = self.decided
        return [one for one in _patterns(order, kind, self.count, index) if _fits(self._text, one)]

    @cached_property
    def begun(self) -> str | None:
        names = (_name_in(self._text, pattern) for pattern in self._open)
        return next((name[0] for name in names if name is not None and not name[1]), None)

    def step(self, token_id: int) -> _Step:
        """The next place and what the answer learns on the way. All coordinates lead to one place."""
        ends = token_id == self._grammar.vocab.eos_id
        if ends or token_id == _COORDINATE:
            step = self._close_text(ends)
        elif self._open:
            step = self._grammar.place(*self.decided, self.count, (*self.ids, token_id)), None, None
        else:
            step = None, None, None
        self.after[token_id] = step
        return step

    def _close_text(self, ends: bool) -> _Step:
        # A coordinate, or the end of the turn, ends the text: apply the pattern that it matches.
        for pattern in self._open:
            name = _name_in(self._text, pattern)
            whole = pattern.before + ("" if name is None else name[0]) + (pattern.after or "")
            if pattern.ends != ends or self._text != whole:
                continue
            poly_size = self.count if self.kind == "poly" and (pattern.kind is not None or ends) else None
            order, kind, index = self.decided
            if pattern.kind is None:
                place = self._grammar.place(order, kind, index, self.count + 1)
            else:
                place = self._grammar.place(pattern.order, pattern.kind, index + 1, 1)
            return place, None if name is None else name[0], poly_size
        return None, None, None

    def forced(self) -> tuple[int, ...]:
        """The tokens with which every canonical continuation begins."""
        shared: tuple[int, ...] | None = None
        for pattern in self._open:
            name = _name_in(self._text, pattern)
            if name is not None and not name[1]:
                return ()  # inside a name
            names = [name[0]] if name is not None else _BEGINNINGS if pattern.after is not None else [""]
            shared = self._shared_tokens(pattern, names, shared)
        return shared or ()

    def draft(self, name: str | None, poly_ends: bool) -> tuple[int, ...]:
        """Tokens of the most probable text that fits. With ``name`` None, only those that are the same for any name.
        ``poly_ends``: the polygon probably ends here."""
        found = self._drafts.get((name, poly_ends))
        if found is None:
            if len(self._drafts) >= _MAX_DRAFTS:
                self._drafts.clear()
            found = self._drafts[name, poly_ends] = self._guess(name, poly_ends)
        return found

    def _guess(self, name: str | None, poly_ends: bool) -> tuple[int, ...]:
        patterns = self._open
        if poly_ends:  # another coordinate last
            patterns = sorted(patterns, key=lambda one: one.kind is None and not one.ends)
        for pattern in patterns:
            written = _name_in(self._text, pattern)
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
        vocab, done = self._grammar.vocab, len(self.ids)
        for name in names:
            ids = tuple(vocab.encode_answer(pattern.before + name + (pattern.after or "")))
            if ids[:done] == self.ids:
                ids = (*ids, vocab.eos_id) if pattern.ends else ids
                shared = ids[done:] if shared is None else _common(shared, ids[done:])
        return shared


# The next place (None: the answer is not canonical), a name that ended, and the coordinates of a polygon that ended.
_Step = tuple[_Place | None, str | None, int | None]


class AnswerState:
    """One answer so far.

    Only canonical answers are followed: after another token ``is_canonical`` is False and nothing is forced any more.
    ``names``: descriptions of the objects so far, as they are written in JSON.
    """

    def __init__(self, grammar: AnswerGrammar) -> None:
        self.names: list[str] = []
        self._poly_size = 0
        self._place: _Place | None = grammar.place()
        self._coordinates, self._longest_guess = grammar.coordinates, grammar.longest_guess

    @property
    def is_canonical(self) -> bool:
        return self._place is not None

    def push(self, token_id: int) -> None:
        """Add the answer's next token."""
        self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the answer's next tokens."""
        place, coordinates = self._place, self._coordinates
        for token_id in token_ids:
            if place is None:
                break
            key = _COORDINATE if token_id in coordinates else token_id
            place, name, poly_size = place.after.get(key) or place.step(key)
            if name is not None:
                self.names.append(name)
            if poly_size is not None:
                self._poly_size = poly_size
        self._place = place

    def forced(self) -> tuple[int, ...]:
        """The tokens with which every canonical continuation begins; ``()`` where the next token is a decision."""
        return () if self._place is None else self._place.forced()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Up to ``limit`` tokens that probably come next: forced ones, and guesses of decisions.

        Guesses depend only on the answer: another object of the same kind follows; after two objects with one name, the
        next one has it too; a name that begins like an earlier one is completed to it; any other name ends when it has
        as many words as the one before, if the tokenizer needs few tokens for that; a polygon has as many coordinates
        as the one before.
        """
        place, names = self._place, self.names
        if place is None:
            return ()
        begun = place.begun
        if begun is None:
            repeated = names[-1] if len(names) > 1 and names[-1] == names[-2] else None
            return place.draft(repeated, place.kind == "poly" and place.count == self._poly_size)[:limit]
        if not begun:
            return ()
        known = next((name for name in reversed(names) if name.startswith(begun)), None)
        if known is None and len(begun.split()) < (len(names[-1].split()) if names else 1):
            return ()
        found = place.draft(begun if known is None else known, False)
        return found[:limit] if known is not None or len(found) <= self._longest_guess else ()


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
