"""Which tokens of what an engine returned are the answer, and whether it was cut off: one rule for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.coords import CoordVocab
from coordexp.errors import RolloutError


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """``token_ids``: what stands before the end of the turn. ``ended``: the end token was among the tokens returned.
    ``truncated``: the answer ran out of tokens."""

    token_ids: tuple[int, ...]
    ended: bool
    truncated: bool


def answer_tokens(generated: Sequence[int], finish_reason: str | None, vocab: CoordVocab, where: str) -> AnswerTokens:
    """Cut ``generated`` at its first end of turn.

    Without an end token, the engine's finish reason decides: ``length`` means truncated, and ``stop`` that the engine
    keeps the end token to itself.

    Args:
        generated: token ids as the engine returned them. where: names the request in errors.

    Raises:
        RolloutError: an id is none of the tokenizer's, or the engine ended the answer for another reason.
    """
    if unknown := [token for token in generated if not 0 <= token < len(vocab)]:
        raise RolloutError(
            f"{where}: the answer holds token id {unknown[0]}, but the tokenizer knows only 0 to {len(vocab) - 1}: the "
            "model's language head has rows for no token, and this server may draw them; use coordexp serve or the "
            "CoordExp plugin, which cannot"
        )
    if finish_reason not in ("stop", "length"):
        raise RolloutError(f"{where}: the answer ended with {finish_reason!r} instead of 'stop' or 'length'")
    ids = tuple(generated)
    ended = vocab.eos_id in ids
    return AnswerTokens(
        ids[: ids.index(vocab.eos_id)] if ended else ids, ended, truncated=not ended and finish_reason == "length"
    )
