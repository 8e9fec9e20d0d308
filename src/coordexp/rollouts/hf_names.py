"""A closed list of class names inside transformers' ``generate``."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from coordexp.rollouts.closed_names import START, ClosedNames, NextTokens, Place, by_place


class NamesOnly(LogitsProcessor):
    """Makes every other description impossible. Made anew for each call of ``generate``; before a guard, whose end of
    the turn goes before everything.

    Rows are sequences, or beams: a row is read from where its beginning was read last. ``prompt_length`` counts the
    padded prompt.
    """

    def __init__(self, rule: ClosedNames, eos_id: int, prompt_length: int) -> None:
        self._rule = rule
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._place_of: dict[tuple[int, ...], Place | None] = {(): START}

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answers = [tuple(answer) for answer in input_ids[:, self._prompt_length :].tolist()]
        self._place_of = {answer: self._place(answer) for answer in answers}
        masked = scores.clone()
        for place, rows in by_place([self._place_of[answer] for answer in answers]).items():
            masked[rows] = mask(masked[rows], self._rule.next_tokens(place))
        return masked

    def _place(self, answer: tuple[int, ...]) -> Place | None:
        """None: its turn is over, and what follows is padding."""
        if not answer:
            return START
        before = self._place_of[answer[:-1]] if answer[:-1] in self._place_of else self._place(answer[:-1])
        if before is None or answer[-1] == self._eos_id:
            return None
        return self._rule.after(before, answer[-1])


def mask(scores_RV: torch.Tensor, following: NextTokens) -> torch.Tensor:
    """The scores with what may not follow at minus infinity."""
    ids = torch.from_numpy(following.ids).to(scores_RV.device)
    if not following.are_allowed:
        return scores_RV.index_fill(1, ids, -torch.inf)
    only = torch.full_like(scores_RV, -torch.inf)
    only[:, ids] = scores_RV[:, ids]
    return only
