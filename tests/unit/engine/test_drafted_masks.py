"""Drafts of a whole batch, and the repeat guard over drafted positions, next to vLLM's model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.coords import serialize_objects
from coordexp.engine.wire.arguments import REQUEST_KEY, activation_environment
from coordexp.records import GTObject
from support.answers import tiny_vocab
from support.tiny_run import tiny_checkpoint

pytest.importorskip("vllm", reason="the masks are applied in vLLM's model runner")

from vllm import SamplingParams

from coordexp.engine.worker.drafting import MOST_DRAFTED, TURN_START, AnswerDrafter, DraftedMasks

SETTINGS = RepeatTerminateConfig(
    enabled=True, min_new_tokens=0, max_consecutive_token_repeats=3, ngram_size=0, ngram_repeats=0
)
VOCAB = 2000


def test_drafts_of_a_large_batch_are_shortened() -> None:
    checkpoint = str(tiny_checkpoint())
    vocab = tiny_vocab()
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(tokenizer=checkpoint, max_model_len=500),
        speculative_config=SimpleNamespace(num_speculative_tokens=32),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),  # as on a CPU
    )
    answer = serialize_objects([GTObject("cat", "bbox_2d", (1, 2, 3, 4))])[:-1]
    ids = np.array(vocab.encode(f"{TURN_START}assistant\n{answer}"))
    sampled = [int(ids[-1])]

    def drafts(rows: int) -> list[list[int]]:
        batch = np.tile(np.pad(ids, (0, 40)), (rows, 1))
        return AnswerDrafter(config).propose([sampled] * rows, np.full(rows, len(ids)), batch)

    (alone,) = drafts(1)
    assert vocab.decode(alone).startswith(', "object_2": {')
    crowd = drafts(MOST_DRAFTED // len(alone) * 2)
    assert 0 < sum(map(len, crowd)) <= MOST_DRAFTED
    assert all(draft == alone[: len(draft)] and draft for draft in crowd)
    # On a GPU a step of every row's last token and its draft fits into a captured CUDA graph.
    config.compilation_config.cudagraph_capture_sizes = [33, 66, 99]
    assert drafts(1) == [alone]
    for rows in (5, 20, 99, 200):
        positions = rows + sum(map(len, drafts(rows)))
        assert rows <= positions <= max(99, rows)


def guarded(masks: DraftedMasks, answer: list[int], draft: list[int]) -> list[int]:
    """Positions, after ``answer`` and after each token of ``draft``, at which the answer may only end."""
    params = SamplingParams(extra_args={REQUEST_KEY: "a"})
    request = SimpleNamespace(sampling_params=params, output_token_ids=answer)
    batch = SimpleNamespace(req_ids=["a"], spec_token_ids=[draft])
    logits = torch.zeros(len(draft) + 1, VOCAB)
    nothing: Any = SimpleNamespace(sampled_token_ids=torch.full((1, len(draft) + 1), -1))
    masks.sample(
        SimpleNamespace(input_batch=batch, requests={"a": request}),
        logits,
        SimpleNamespace(num_draft_tokens=[len(draft)]),
        lambda logits, metadata: nothing,
    )
    assert masks.guard is not None
    ends = torch.isneginf(logits).sum(dim=1) == VOCAB - 1
    return [k for k in range(len(draft) + 1) if ends[k] and logits[k].argmax() == masks.guard.eos_id]


def test_the_guard_reads_the_list_that_the_request_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may give a request it resumes another list of tokens, and continues in that one."""
    for name, value in activation_environment(SETTINGS).items():
        monkeypatch.setenv(name, value)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(tokenizer=str(tiny_checkpoint())))
    masks = DraftedMasks(config, torch.device("cpu"))
    answer = [4, 5]
    assert guarded(masks, answer, [5, 6]) == []
    assert guarded(masks, answer, [5, 5]) == [2]
    answer.append(5)
    assert guarded(masks, answer, [5, 6]) == [1]
    assert guarded(masks, [4, 5, 6, 7], [7, 7]) == [2], "the tokens of the earlier list no longer count"
    assert guarded(masks, [4, 7, 7, 7], [8]) == [0]
