"""The processor that keeps answers within the tokenizer's vocabulary, on logits of a padded language head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.errors import RolloutError
from support.qwen_tokenizer import qwen_vocab
from support.tiny_run import load_tiny, tiny_checkpoint

pytest.importorskip("vllm", reason="the processor is a class of vLLM's interface")

from vllm.v1.sample.logits_processor import LogitsProcessors

from coordexp.engine.logits_processors import KnownTokensProcessor, check_processors, processor_of


@pytest.fixture
def processor() -> KnownTokensProcessor:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(tokenizer=str(tiny_checkpoint())))
    return KnownTokensProcessor(config, torch.device("cpu"), False)


def test_only_ids_beyond_the_tokenizer_become_impossible(processor: KnownTokensProcessor) -> None:
    known = len(load_tiny().vocab)
    assert processor.num_known == known
    logits_NV = torch.randn(3, known + 7)
    after_NV = processor.apply(logits_NV.clone())
    assert torch.equal(after_NV[:, :known], logits_NV[:, :known])
    assert torch.isneginf(after_NV[:, known:]).all() and not processor.is_argmax_invariant()


def test_a_head_without_padding_is_left_alone(processor: KnownTokensProcessor) -> None:
    logits_NV = torch.randn(2, processor.num_known)
    assert torch.equal(processor.apply(logits_NV.clone()), logits_NV)


def worker(processors: Any) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(input_batch=SimpleNamespace(logitsprocs=processors)))


def test_a_worker_reports_what_it_applies(processor: KnownTokensProcessor) -> None:
    assert processor_of(worker(LogitsProcessors([processor])), KnownTokensProcessor) is processor
    assert processor_of(worker(LogitsProcessors([])), KnownTokensProcessor) is None
    assert processor_of(SimpleNamespace(model_runner=object()), KnownTokensProcessor) is None  # another model runner


@pytest.mark.parametrize(
    ("known", "names", "holds_names", "message"),
    [
        (9, False, False, None),
        (9, True, True, None),
        (None, False, False, r"workers \[1\] dropped .*KnownTokensProcessor"),
        (9, False, True, "dropped .*AllowedLabelsProcessor"),
    ],
)
def test_a_worker_that_dropped_a_processor_is_refused(
    known: int | None, names: bool, holds_names: bool, message: str | None
) -> None:
    sound = {"num_known_tokens": len(qwen_vocab()), "closed_names": True}
    workers = [sound, {"num_known_tokens": known, "closed_names": names}]
    if message is None:
        check_processors(workers, None, holds_names)
    else:
        with pytest.raises(RolloutError, match=message):
            check_processors(workers, None, holds_names)
