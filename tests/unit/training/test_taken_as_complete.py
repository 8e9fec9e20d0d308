"""`target.complete_above`: if most predictions match, the step's annotations count as complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig
from coordexp.records import GTObject
from coordexp.targets import SampleOutcome, TargetPolicy, TransportConfig
from coordexp.training.answers import AnswerReader, RolloutQueue, TargetOptions, decide_policy
from support.answers import CAT, DOG, LEAF, answer, entry, record, request, taught_text, tiny_vocab
from support.tiny_run import InMemoryBackend

# One of two is annotated, and the cat, which annotations name first, is missed.
HALF = answer(entry(1, LEAF), entry(2, DOG))
NONE = answer(entry(1, DOG))
AS_COMPLETE = "{" + f"{entry(1)}, {entry(2, LEAF)}" + "}"
AS_INCOMPLETE = "{" + f"{entry(1, LEAF)}, {entry(2, DOG)}, {entry(3)}" + "}"


def outcomes(
    texts: Sequence[str], complete_above: float | None, truth: Sequence[GTObject] = (CAT, LEAF), **target: Any
) -> list[SampleOutcome]:
    """Outcomes of a step with one micro-batch; every image has ``truth``."""
    unread = list(texts)
    policy = TargetPolicy(answer="rewritten", complete_above=complete_above, **target)
    queue = RolloutQueue(
        InMemoryBackend(tiny_vocab(), lambda _: unread.pop(0)), AnswerReader(tiny_vocab(), MatchingConfig()), 3
    )
    options = TargetOptions(tiny_vocab(), "desc_first", TransportConfig(), policy)
    one = record(truth)
    answers = queue.take([[Sample(one, request(one))] for _ in texts], 0, {})
    decided, complete = decide_policy(policy, answers.all)
    return [options.corrected(answer, decided, complete) for answer in answers.all]


@pytest.mark.parametrize(
    ("texts", "complete_above", "taught"),
    [
        ([HALF], 0.5, AS_COMPLETE),  # the share itself suffices
        ([HALF], 0.51, AS_INCOMPLETE),
        ([HALF], None, AS_INCOMPLETE),  # never
        ([HALF, answer(entry(1))], 0.66, AS_COMPLETE),  # two of three, over the step's answers
        ([HALF, NONE], 0.34, AS_INCOMPLETE),  # one of three
    ],
)
def test_annotations_count_as_complete_above_the_threshold(
    texts: list[str], complete_above: float | None, taught: str
) -> None:
    """Then unmatched predictions are dropped, and missed objects are at their place in the annotations."""
    found = outcomes(texts, complete_above)
    assert taught_text(found[0], tiny_vocab()) == taught
    assert {one.taken_as_complete for one in found} == {taught == AS_COMPLETE}


@pytest.mark.parametrize("text", [answer(), NONE, "no JSON"])
def test_answers_without_matches_are_not_counted_for_completeness(text: str) -> None:
    (found,) = outcomes([text], 0.01)
    assert not found.taken_as_complete and found.target.left_out_pred_idx == ()


def test_soft_objects_are_not_counted_for_completeness() -> None:
    """A soft object was added by a model, so it is not evidence of annotation."""
    texts = [answer(entry(1), entry(2, LEAF))]
    assert outcomes(texts, 0.51)[0].taken_as_complete
    assert not outcomes(texts, 0.51, (CAT, replace(LEAF, soft=0.9)))[0].taken_as_complete


def test_duplicates_are_dropped_if_annotations_are_complete() -> None:
    """A missed object would otherwise replace the repeat instead of being at its place in the annotations."""
    texts = [answer(entry(1, LEAF), entry(2, LEAF))]
    (found,) = outcomes(texts, 0.5, duplicates="replace")
    assert found.taken_as_complete and taught_text(found, tiny_vocab()) == AS_COMPLETE
