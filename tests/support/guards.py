"""Where a guarded engine would end an answer, found from the whole of it."""

from __future__ import annotations

from collections.abc import Sequence

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard, Trigger


def first_trigger(
    token_ids: Sequence[int], settings: RepeatTerminateConfig, reader: ObjectKeyReader | None = None
) -> Trigger | None:
    """The verdict on a whole answer: where a guarded engine would have ended it, or None."""
    guard = RepeatGuard(settings, reader)
    for token_id in token_ids:
        if guard.push(token_id) is not None:
            break
    return guard.trigger
