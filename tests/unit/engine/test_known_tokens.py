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

from coordexp.engine.logits_processors import KnownTokensProcessor, check_known_tokens, num_known_tokens


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


def test_a_worker_tells_what_it_really_applies(processor: KnownTokensProcessor) -> None:
    assert num_known_tokens(worker(LogitsProcessors([processor]))) == processor.num_known
    assert num_known_tokens(worker(LogitsProcessors([]))) is None
    assert num_known_tokens(SimpleNamespace(model_runner=object())) is None  # another model runner


def test_a_worker_that_dropped_it_is_refused() -> None:
    check_known_tokens([{"num_known_tokens": len(qwen_vocab())}] * 2)
    with pytest.raises(RolloutError, match=r"workers \[1\] dropped the logits processor"):
        check_known_tokens([{"num_known_tokens": 9}, {"num_known_tokens": None}])
