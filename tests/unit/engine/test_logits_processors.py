"""vLLM's logits processors: the repeat guard, driven by real batch updates, and the limit to the vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.wire.arguments import REQUEST_KEY, activation_environment
from coordexp.errors import RolloutError
from coordexp.rollouts.repeat_guard import GuardRule, Trigger
from support.qwen_tokenizer import qwen_vocab
from support.tiny_run import load_tiny, tiny_checkpoint

pytest.importorskip("vllm", reason="the processor is a class of vLLM's interface")

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from coordexp.engine.server.served_engine import ServedEngine
from coordexp.engine.wire.arguments import check_processors, end_at_turn_end
from coordexp.engine.worker.drafting import guard_report, processor_of
from coordexp.engine.worker.logits_processors import KnownTokensProcessor, RepeatTerminateProcessor
from support.settings import first_trigger

SETTINGS = RepeatTerminateConfig(
    enabled=True, min_new_tokens=0, max_consecutive_token_repeats=3, ngram_size=2, ngram_repeats=2
)


def vllm_config(checkpoint: Path) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(tokenizer=str(checkpoint)))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> RepeatTerminateProcessor:
    for name, value in activation_environment(SETTINGS).items():
        monkeypatch.setenv(name, value)
    return RepeatTerminateProcessor(vllm_config(tiny_checkpoint()), torch.device("cpu"), False)


def params(name: str | None) -> SamplingParams:
    return SamplingParams(extra_args=None if name is None else {REQUEST_KEY: name})


class Batch:
    """vLLM's side: rows of requests; it extends their output lists in place."""

    def __init__(self, processor: RepeatTerminateProcessor) -> None:
        self.processor = processor
        self.eos = processor.eos_id
        self.vocab = 2000

    def update(self, added: Any = (), removed: Any = (), moved: Any = (), size: int = 8) -> None:
        self.processor.update_state(BatchUpdate(size, list(removed), list(added), list(moved)))

    def forced(self, rows: int) -> list[int]:
        """Rows that may only end, at this step."""
        before = torch.zeros(rows, self.vocab)
        after = self.processor.apply(before.clone())
        found = []
        for row in range(rows):
            if not torch.equal(after[row], before[row]):
                assert after[row].argmax() == self.eos and torch.isneginf(after[row]).sum() == self.vocab - 1
                found.append(row)
        return found


@pytest.fixture
def batch(processor: RepeatTerminateProcessor) -> Batch:
    return Batch(processor)


def test_a_triggered_row_is_forced_one_step_later_and_others_are_unchanged(batch: Batch) -> None:
    a, b, forced = [], [], []
    batch.update(added=[(0, params("a"), [1, 1, 1, 1], a), (1, params("b"), [1], b)])
    for x, y in [(5, 7), (5, 8), (5, 9), (6, 9)]:
        forced.append(batch.forced(2))
        a.append(x)
        b.append(y)
    assert forced == [[], [], [], [0]]
    assert batch.processor.pop_triggers(["a", "b"]) == {"a": Trigger(GuardRule.TOKEN_RUN, 3)}
    assert batch.processor.pop_triggers(["a", "b"]) == {}, "each is reported once"


def test_history_follows_rows_that_swap_or_move(batch: Batch) -> None:
    a, b, c = [5, 5], [1, 2, 3], [4]
    batch.update(added=[(0, params("a"), None, a), (1, params("b"), None, b), (2, params("c"), None, c)])
    assert batch.forced(3) == []
    batch.update(moved=[(0, 1, MoveDirectionality.SWAP)])
    a.append(5)
    assert batch.forced(3) == [1]
    batch.update(removed=[0], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])  # b is done, c takes its row
    c += [4, 4]
    assert batch.forced(2) == [0, 1]


def test_a_row_reused_by_another_request_has_no_history_and_its_prompt_does_not_count(batch: Batch) -> None:
    batch.update(added=[(0, params(None), None, [5, 5, 5])])
    assert batch.forced(1) == [0], "guarded too without an id"
    batch.update(added=[(0, params("b"), [5] * 50, [])])
    assert batch.forced(1) == []


def test_a_preempted_request_keeps_its_whole_history(batch: Batch) -> None:
    answer = [1, 2, 5, 5]
    batch.update(added=[(0, params("a"), None, answer)])
    assert batch.forced(1) == []
    batch.update(removed=[0])
    answer.append(5)
    batch.update(added=[(3, params("a"), None, answer)])
    assert batch.forced(4) == [3]


def test_tokens_that_vllm_discards_are_forgotten(batch: Batch) -> None:
    answer = [5, 5]
    batch.update(added=[(0, params("a"), None, answer)])
    assert batch.forced(1) == []
    answer[1:] = [6]
    assert batch.forced(1) == []
    answer.clear()
    assert batch.forced(1) == []
    answer += [7, 7, 7]
    assert batch.forced(1) == [0]


def test_a_finished_row_is_not_changed(batch: Batch) -> None:
    """With asynchronous scheduling vLLM computes one step beyond the end."""
    batch.update(added=[(0, params("a"), None, [5, 5, batch.eos, batch.eos, batch.eos])])
    assert batch.forced(1) == []
    assert batch.processor.pop_triggers(["a"]) == {}


def test_placeholder_tokens_are_not_counted(batch: Batch) -> None:
    batch.update(added=[(0, params("a"), None, [5, -1])])
    with pytest.raises(RolloutError, match="async_scheduling"):
        batch.forced(1)


def test_the_guard_triggers_at_the_same_step_as_offline(batch: Batch) -> None:
    answer: list[int] = []
    batch.update(added=[(0, params("a"), None, answer)])
    stream = iter(whole := [3, 1, 2, 4, 2, 4, 4, 4])
    while not batch.forced(1):
        answer.append(next(stream))
    trigger = first_trigger(whole, SETTINGS)
    assert trigger is not None and len(answer) == trigger.num_new_tokens
    assert batch.processor.pop_triggers(["a"]) == {"a": trigger}


def test_only_the_end_of_turn_ends_an_answer() -> None:
    """Not the other end tokens of a checkpoint's generation_config.json, 0 to 2 here."""
    vocab, tokenizer = load_tiny().vocab, SimpleNamespace(convert_tokens_to_ids={"<|im_end|>": 426}.__getitem__)
    engine = SimpleNamespace(
        input_processor=SimpleNamespace(generation_config_fields={"eos_token_id": [0, 1, 2, 426]}, tokenizer=tokenizer)
    )
    end_at_turn_end(engine)
    params = SamplingParams()
    params.update_from_generation_config(engine.input_processor.generation_config_fields, vocab.eos_id)
    assert vocab.eos_id == 426 and params.stop_token_ids == [] and params.all_stop_token_ids == {426}


@pytest.mark.parametrize(
    "given",
    [
        {"ignore_eos": True}, {"min_tokens": 8}, {"bad_words": ["a"]}, {"allowed_token_ids": [1, 2]},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_requests_that_may_forbid_the_end_are_refused(
    processor: RepeatTerminateProcessor, given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(given))} and the repeat guard exclude each other"):
        processor.validate_params(SamplingParams(**given))
    processor.validate_params(SamplingParams())


def test_log_probabilities_of_chosen_tokens_are_refused_where_forced_tokens_are_skipped() -> None:
    engine = SimpleNamespace(generate=lambda *args, **options: "answers")
    asked = SamplingParams(logprobs=2, logprob_token_ids=[5, 6])
    with pytest.raises(ValueError, match="leave logprob_token_ids out"):
        ServedEngine(engine, 1, guarded=False, drafts=True).generate("prompt", asked, "id")
    for drafts, params in ((False, asked), (True, SamplingParams(logprobs=2))):
        assert ServedEngine(engine, 1, guarded=False, drafts=drafts).generate("prompt", params, "id") == "answers"


def test_the_guard_does_not_load_without_a_configuration() -> None:
    with pytest.raises(RolloutError, match="external_plugins"):
        RepeatTerminateProcessor(vllm_config(tiny_checkpoint()), torch.device("cpu"), False)


def worker_with(processors: list[Any] | None) -> Any:
    runner = SimpleNamespace()
    if processors is not None:
        runner.input_batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=iter(processors)))
    return SimpleNamespace(model_runner=runner)


def test_a_worker_reports_the_guard_that_it_applies(processor: RepeatTerminateProcessor) -> None:
    assert guard_report(worker_with([object(), processor])) == {"active": True, "config": SETTINGS.model_dump()}
    assert guard_report(worker_with([object()])) == {"active": False, "config": None}, "configured, but dropped"


@pytest.fixture
def known_tokens() -> KnownTokensProcessor:
    return KnownTokensProcessor(vllm_config(tiny_checkpoint()), torch.device("cpu"), False)


def test_only_ids_beyond_the_tokenizer_are_masked(known_tokens: KnownTokensProcessor) -> None:
    known = len(load_tiny().vocab)
    assert known_tokens.num_known == known
    logits_NV = torch.randn(3, known + 7)
    after_NV = known_tokens.apply(logits_NV.clone())
    assert torch.equal(after_NV[:, :known], logits_NV[:, :known])
    assert torch.isneginf(after_NV[:, known:]).all() and not known_tokens.is_argmax_invariant()


def test_a_head_without_padding_is_not_changed(known_tokens: KnownTokensProcessor) -> None:
    logits_NV = torch.randn(2, known_tokens.num_known)
    assert torch.equal(known_tokens.apply(logits_NV.clone()), logits_NV)


def test_a_worker_reports_the_processors_that_it_applies(known_tokens: KnownTokensProcessor) -> None:
    assert processor_of(worker_with([object(), known_tokens]), KnownTokensProcessor) is known_tokens
    assert processor_of(worker_with([object()]), KnownTokensProcessor) is None
    assert processor_of(worker_with(None), KnownTokensProcessor) is None  # another model runner


@pytest.mark.parametrize(
    ("known", "names", "takes_class_names", "message"),
    [
        (9, False, False, None),
        (9, True, True, None),
        (None, False, False, r"worker 1 dropped .*KnownTokensProcessor.*VLLM_USE_V2_MODEL_RUNNER=0"),
        (9, False, True, "dropped .*RequestClassNamesProcessor"),
    ],
)
def test_a_worker_that_dropped_a_processor_is_refused(
    known: int | None, names: bool, takes_class_names: bool, message: str | None
) -> None:
    sound = {"num_known_tokens": len(qwen_vocab()), "closed_names": True}
    workers = [sound, {"num_known_tokens": known, "closed_names": names}]
    if message is None:
        check_processors(workers, None, takes_class_names)
    else:
        with pytest.raises(RolloutError, match=message):
            check_processors(workers, None, takes_class_names)
