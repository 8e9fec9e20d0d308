"""Decides when an answer repeats itself and must end, token by token and in the same way in every engine.

Pure and torch-free. The cost per token does not grow with the answer, because both rules need only a counter. For
n-grams it counts the latest tokens that equal the token n positions before: from n * (r - 1) on, the last n tokens have
occurred r times in a row.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from coordexp.config.rollout import RepeatTerminateConfig


class GuardRule(StrEnum):
    """Why an answer is ended."""

    TOKEN_RUN = "token_run"  # one token, max_consecutive_token_repeats times in a row
    NGRAM = "ngram"  # the last ngram_size tokens, ngram_repeats times in a row
    OBJECT_KEYS = "object_keys"  # more than max_object_keys object keys


@dataclass(frozen=True, slots=True)
class Trigger:
    """``rule`` held after ``num_new_tokens`` tokens of the answer, so token ``num_new_tokens`` (0-based) is the end of
    the turn."""

    rule: GuardRule
    num_new_tokens: int


class RepeatGuard:
    """Guard of one answer. It never sees the prompt."""

    def __init__(self, settings: RepeatTerminateConfig, reader: ObjectKeyReader | None = None) -> None:
        if settings.max_object_keys is not None and reader is None:
            raise ValueError("max_object_keys counts keys in the text, so the guard needs an ObjectKeyReader")
        self._settings = settings
        self._reader = reader
        self._last: int | None = None
        self._run = 0
        self._window: deque[int] = deque(maxlen=max(1, settings.ngram_size))
        self._ngram_matches = 0
        self._key_state = OUTSIDE
        self._keys = 0
        self.num_tokens = 0
        self.trigger: Trigger | None = None

    def push(self, token_id: int) -> Trigger | None:
        """Add the answer's next token. Returns the trigger once there is one; it is final."""
        return self.extend((token_id,))

    def extend(self, token_ids: Sequence[int]) -> Trigger | None:
        """As :meth:`push` for each of the answer's next tokens."""
        window, may_trigger = self._window, len(token_ids) >= self.fewest_to_trigger()
        for token_id in token_ids:
            self.num_tokens += 1
            self._run = self._run + 1 if token_id == self._last else 1
            self._last = token_id
            if len(window) == window.maxlen:
                self._ngram_matches = self._ngram_matches + 1 if token_id == window[0] else 0
            window.append(token_id)
            if may_trigger:
                self._apply_rules(token_id)
        return self.trigger

    def _apply_rules(self, token_id: int) -> None:
        settings, size, repeats = self._settings, self._settings.ngram_size, self._settings.ngram_repeats
        if settings.max_object_keys is not None:
            assert self._reader is not None, "the constructor refuses this"
            self._key_state, num_keys = self._reader.read(self._key_state, token_id)
            self._keys += num_keys
        if self.trigger is None and self.num_tokens >= settings.min_new_tokens:
            if 0 < settings.max_consecutive_token_repeats <= self._run:
                self.trigger = Trigger(GuardRule.TOKEN_RUN, self.num_tokens)
            elif size > 0 and repeats > 0 and self._ngram_matches >= size * (repeats - 1):
                self.trigger = Trigger(GuardRule.NGRAM, self.num_tokens)
            elif settings.max_object_keys is not None and self._keys > settings.max_object_keys:
                self.trigger = Trigger(GuardRule.OBJECT_KEYS, self.num_tokens)

    def fewest_to_trigger(self) -> float:
        """The fewest further tokens that perhaps trigger the guard, whatever they are; infinity if no rule is on."""
        settings, size, repeats = self._settings, self._settings.ngram_size, self._settings.ngram_repeats
        if self.trigger is not None or settings.max_object_keys is not None:
            return 0
        most = settings.max_consecutive_token_repeats
        run = most - self._run if most > 0 else math.inf
        ngram = size * (repeats - 1) - self._ngram_matches if size > 0 and repeats > 0 else math.inf
        return max(settings.min_new_tokens - self.num_tokens, min(run, ngram))

    def fork(self) -> RepeatGuard:
        """An independent guard that has seen the same tokens: a beam that splits."""
        twin = copy.copy(self)
        twin._window = self._window.copy()
        return twin


# States of the key reader. Within `"object_` the state is the number of bytes already read, 1 … 8.
OUTSIDE = 0
_NEEDLE = b'"object_'
_DIGITS = len(_NEEDLE) + 1  # at least one digit of the index
_CLOSED = _DIGITS + 1  # the quote after the digits, itself a possible start of the next key
_SPACED = _CLOSED + 1  # white space between that quote and the colon
_ESCAPED = _SPACED + 1  # after a backslash: the next byte is text
_SPACES = frozenset(b" \t\n\r")


class ObjectKeyReader:
    """Counts ``"object_N":`` in a text that arrives token by token. A token may contain any part of a key, or several.

    An escaped quote inside a description does not begin a key. In valid JSON that makes the count exact; in an
    answer with unpaired quotes, as in degenerate tails, keys are still counted.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[token_id]``: the bytes that a token writes (:attr:`coordexp.coords.CoordVocab.pieces`)."""
        self._pieces = pieces
        # (state, token) → result. There are few states, and an answer uses few different tokens.
        self._known: dict[tuple[int, int], tuple[int, int]] = {}

    def read(self, state: int, token_id: int) -> tuple[int, int]:
        """The state after ``token_id``, and how many keys it completed."""
        if (state, token_id) not in self._known:
            after, keys = state, 0
            # Ids beyond the tokenizer's have no text: checkpoints pad their vocabulary.
            for byte in self._pieces[token_id] if token_id < len(self._pieces) else b"":
                after = _after(after, byte)
                if after < 0:
                    after, keys = OUTSIDE, keys + 1
            self._known[state, token_id] = after, keys
        return self._known[state, token_id]


def _after(state: int, byte: int) -> int:
    """Next state; -1 where ``byte`` is the colon that completes a key."""
    if state == _ESCAPED:
        return OUTSIDE
    if byte == ord("\\"):
        return _ESCAPED
    if state in (_CLOSED, _SPACED):
        if byte == ord(":"):
            return -1
        if byte in _SPACES:
            return _SPACED
        if state == _CLOSED:
            state = 1  # not the end of a key, so perhaps the opening quote of one
    if byte == ord('"'):
        return _CLOSED if state == _DIGITS else 1
    if 1 <= state < len(_NEEDLE) and byte == _NEEDLE[state]:
        return state + 1
    if state in (len(_NEEDLE), _DIGITS) and ord("0") <= byte <= ord("9"):
        return _DIGITS
    return OUTSIDE
