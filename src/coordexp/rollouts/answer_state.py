"""Follows a canonical answer token by token, and says which tokens come next. Torch-free.

A canonical answer is the text of :func:`coordexp.coords.serialize_objects`, in the tokens that the tokenizer gives it.
Most of them are decided by the ones before: keys, quotes, brackets and the next index. Decisions are names,
coordinates, the kind of geometry, whether a polygon goes on, and whether another object follows.

Coordinates are added tokens, so the text between two of them is tokenized on its own. Each such text is one of a few
patterns with at most one name in it. Its last tokens may depend on a decision that is still open (``}`` and ``}}`` may
each be one token), so the forced tokens are those that all possible texts share.

A state gives up at the first token that is not canonical. The repeat guard and allowed labels have to read any text,
also of a degenerate answer, so they have scanners of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordexp.coords import CoordVocab, FieldOrder
from coordexp.records import GEOMETRY_KINDS, GeometryKind

# Beginnings of names that tokenizers treat differently: tokens that all of them share do not depend on the name.
_BEGINNINGS = ("a", "Z", "7", "é", "龘", "-", "_", "(", "🙂", '\\"')
_MAX_REMEMBERED = 50_000  # drafts, and texts between coordinates
_BOX, _MIN_POLY = 4, 6  # coordinates


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
    """What may follow after ``count`` coordinates of object ``index``, of ``kind``; index 0 at the answer's start. The
    more probable one first: more coordinates of a polygon, another object of the same kind, the end."""
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
    """Canonical answers in one vocabulary. Remembers drafts, and the tokens of texts between coordinates."""

    def __init__(self, vocab: CoordVocab) -> None:
        self.vocab = vocab
        self.drafts: OrderedDict[Hashable, tuple[int, ...] | str] = OrderedDict()  # by what a state depends on
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
        self._index = self._count = 0
        self._ids: list[int] = []  # since the last coordinate
        self._bytes = b""

    def push(self, token_id: int) -> None:
        """Add the answer's next token."""
        if not self.is_canonical:
            return
        vocab = self._grammar.vocab
        ends = token_id == vocab.eos_id
        if ends or vocab.bin_of(token_id) is not None:
            self.is_canonical = self._cross(ends)
            return
        self._ids.append(token_id)
        self._bytes += vocab.pieces[token_id] if token_id < len(vocab.pieces) else b""

    def forced(self) -> tuple[int, ...]:
        """The tokens with which every canonical continuation begins; ``()`` where the next token is a decision."""
        if not self.is_canonical:
            return ()
        done, text = len(self._ids), self._text()
        shared: tuple[int, ...] | None = None
        for pattern in self._open():
            name = _name_in(text, pattern)
            if name is not None and not name[1]:
                return ()  # inside a name
            names = [name[0]] if name is not None else _BEGINNINGS if pattern.after is not None else [""]
            for one in names:
                ids = self._grammar.tokens(pattern.before + one + (pattern.after or ""))
                if list(ids[:done]) == self._ids:
                    ids = (*ids, self._grammar.vocab.eos_id) if pattern.ends else ids
                    shared = ids[done:] if shared is None else _common(shared, ids[done:])
        return shared or ()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Up to ``limit`` tokens that probably come next: the forced ones, and guesses beyond decisions.

        Guesses depend on the answer alone: another object follows, of the same kind; a name that two objects in a row
        have is repeated; and a name that begins like an earlier one is that one.
        """
        if not self.is_canonical:
            return ()
        repeated = self.names[-1] if len(self.names) > 1 and self.names[-1] == self.names[-2] else None
        key = (self._order, self._kind, self._count, self._index, tuple(self._ids), repeated)
        drafts = self._grammar.drafts
        found = drafts.get(key)
        if found is None:
            begun = self._name_begun()
            found = drafts[key] = self._guess(repeated) if begun is None else begun
            if len(drafts) > _MAX_REMEMBERED:
                drafts.popitem(last=False)
        if isinstance(found, str):  # inside a name
            name = next((known for known in reversed(self.names) if found and known.startswith(found)), None)
            found = self._guess(name) if name is not None else ()
        return found[:limit]

    def _guess(self, name: str | None) -> tuple[int, ...]:
        # The most probable text that fits; without a name, as far as no name matters.
        done = len(self._ids)
        for pattern in self._open():
            written = _name_in(self._text(), pattern)
            if written is not None and written[1]:
                names: Sequence[str] = [written[0]]
            elif pattern.after is None:
                names = [""]
            else:
                names = _BEGINNINGS if name is None else [name]
            shared: tuple[int, ...] | None = None
            for one in names:
                ids = self._grammar.tokens(pattern.before + one + (pattern.after or ""))
                if list(ids[:done]) == self._ids:
                    ids = (*ids, self._grammar.vocab.eos_id) if pattern.ends else ids
                    shared = ids[done:] if shared is None else _common(shared, ids[done:])
            if shared:
                return shared
        return ()

    def _name_begun(self) -> str | None:
        # The part of a name that the text ends with.
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

    def _cross(self, ends: bool) -> bool:
        # The text is complete: a coordinate or the end of the turn follows. False if no pattern is.
        text = self._text()
        for pattern in self._open():
            name = _name_in(text, pattern)
            whole = pattern.before if pattern.after is None else pattern.before + (name or ("",))[0] + pattern.after
            if pattern.ends != ends or text != whole:
                continue
            if name is not None:
                self.names.append(name[0])
            if pattern.kind is not None:
                self._kind, self._order, self._count = pattern.kind, pattern.order, 0
                self._index += 1
            self._count += 1
            self._ids, self._bytes = [], b""
            return True
        return False


def forced_positions(grammar: AnswerGrammar, token_ids: Sequence[int]) -> Iterator[int]:
    """Positions of an answer's tokens that the tokens before them leave no choice about."""
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
    """The name that ``text`` contains or begins, and whether it is complete; None before a name."""
    if pattern.after is None or len(text) <= len(pattern.before) or not text.startswith(pattern.before):
        return None
    start = at = len(pattern.before)
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return text[start:at], at < len(text)


def _common(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    most = min(len(first), len(second))
    return tuple(first[: next((k for k in range(most) if first[k] != second[k]), most)])
