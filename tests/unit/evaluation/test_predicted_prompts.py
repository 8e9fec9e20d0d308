"""Predictions are answers to our own prompts, or there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coordexp.coords import serialize_objects
from coordexp.data.dataset import RecordDataset
from coordexp.errors import AlignmentError
from coordexp.evaluation.answering import evaluate_dataset
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import RolloutBackend
from support.answers import CAT, record, request
from support.qwen_tokenizer import qwen_vocab


class Resizing:
    """An engine that reads another prompt than it was given, as one that resizes images by rules of its own."""

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any, on_answer: Any = None) -> list[Rollout]:
        ids = tuple(qwen_vocab().encode(serialize_objects([CAT])))
        return [Rollout(r.sample_id, (*r.prompt_token_ids, 1), ids, "", False) for r in requests]


def test_an_answer_to_another_prompt_is_refused() -> None:
    data = RecordDataset([record([CAT], "s0")], request, "file")
    backend: RolloutBackend = Resizing()  # pyright: ignore[reportAssignmentType]
    with pytest.raises(AlignmentError, match=r"s0: .*token"):
        evaluate_dataset(data, backend, qwen_vocab(), batch_size=1, seed=0)
