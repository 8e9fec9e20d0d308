"""The repeat guard in transformers' ``generate``: an answer ends where the guard ends it offline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.modeling.load import LoadedModel
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import SeedContext
from coordexp.rollouts.hf import HFBackend, RepetitionStopProcessor
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard
from support.guards import first_trigger
from support.settings import decoding
from support.tiny_run import load_tiny, tiny_samples

SEEDS = SeedContext(training_seed=1, global_step=0, micro_step_idx=0, rank=0)
TOKENS = 48
EOS = 7


def guard(**keys: Any) -> RepeatTerminateConfig:
    quiet = {"min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0, "ngram_repeats": 0}
    return RepeatTerminateConfig(**{"enabled": True, **quiet, **keys})


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny(sharpen=4.0)


@pytest.fixture(scope="module")
def requests_(loaded: LoadedModel) -> list[RolloutRequest]:
    return [sample.request for sample in tiny_samples(loaded, 7)]


def answers(
    loaded: LoadedModel, requests: list[RolloutRequest], settings: RepeatTerminateConfig | None, **options: Any
) -> list[Rollout]:
    asked = decoding(**{"max_new_tokens": TOKENS, **options})
    backend = HFBackend(loaded.model, loaded.vocab, asked, 4, loaded.image_token_id, settings)
    return backend.generate(requests, SEEDS)


GUARDS = [
    guard(max_consecutive_token_repeats=4),
    guard(ngram_size=3, ngram_repeats=3),
    guard(ngram_size=2, ngram_repeats=2, min_new_tokens=20),
    guard(max_consecutive_token_repeats=30, ngram_size=16, ngram_repeats=2),
]


@pytest.mark.parametrize("settings", GUARDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.05}], ids=str)
def test_answer_ends_where_the_guard_triggers(
    loaded: LoadedModel, requests_: list[RolloutRequest], settings: RepeatTerminateConfig, options: dict[str, Any]
) -> None:
    free = answers(loaded, requests_, None, **options)
    guarded = answers(loaded, requests_, settings, **options)
    for without, with_guard in zip(free, guarded, strict=True):
        trigger = first_trigger(with_guard.response_token_ids, settings)
        assert with_guard.repeat_terminated == (trigger is not None and not with_guard.truncated)
        if trigger is not None and with_guard.repeat_terminated:
            assert trigger.num_new_tokens == len(with_guard.response_token_ids)
        if options.get("temperature") is None:  # a row that ends early changes what a sampler draws for the others
            expected = first_trigger(without.response_token_ids, settings)
            cut = len(without.response_token_ids) if expected is None else expected.num_new_tokens
            assert with_guard.response_token_ids == without.response_token_ids[:cut]


def test_only_repeating_sequences_are_ended(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    """In one batch, repeating answers end, each at its own step; the others are unchanged."""
    free, guarded = answers(loaded, requests_, None), answers(loaded, requests_, GUARDS[3])
    offending = [one.repeat_terminated for one in guarded]
    assert True in offending and False in offending
    assert len({len(one.response_token_ids) for one in guarded if one.repeat_terminated}) > 1
    for without, with_guard in zip(free, guarded, strict=True):
        if not with_guard.repeat_terminated:
            assert with_guard == without


def test_disabled_guard_changes_nothing(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    settings = GUARDS[0].model_copy(update={"enabled": False})
    assert answers(loaded, requests_, settings) == answers(loaded, requests_, None)


@pytest.mark.parametrize(("settings", "active"), [(None, 0), (GUARDS[0], 1)])
def test_a_metric_reports_whether_the_guard_is_active(
    loaded: LoadedModel, settings: RepeatTerminateConfig | None, active: int
) -> None:
    backend = HFBackend(loaded.model, loaded.vocab, decoding(), 4, loaded.image_token_id, settings)
    assert backend.take_metrics()["rollout/repeat_terminate_active"] == active


def test_the_prompt_is_never_counted(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    """Prompts hold long runs of image tokens."""
    prompt = requests_[0].prompt_token_ids
    assert first_trigger(prompt, guard(max_consecutive_token_repeats=4)) is not None
    stop = RepetitionStopProcessor(lambda: RepeatGuard(guard(max_consecutive_token_repeats=2)), EOS, prompt_length=5)
    scores = torch.zeros(1, 10)
    ids = torch.full((1, 5), 3)
    assert torch.equal(stop(ids, scores), scores)
    assert torch.equal(stop(torch.cat([ids, torch.tensor([[3]])], 1), scores), scores)
    assert not torch.equal(stop(torch.cat([ids, torch.tensor([[3, 3]])], 1), scores), scores)


def test_padding_after_the_end_is_not_a_repetition() -> None:
    stop = RepetitionStopProcessor(lambda: RepeatGuard(guard(max_consecutive_token_repeats=2)), EOS, prompt_length=1)
    scores = torch.zeros(2, 10)
    for length in range(1, 6):
        ids = torch.tensor([[1, 2, EOS, EOS, EOS, EOS], [1, 2, 3, 4, 5, 6]])[:, :length]
        assert torch.equal(stop(ids, scores), scores)
    assert not stop.stopped(0, (2,))


def test_object_keys_end_an_answer(loaded: LoadedModel) -> None:
    text = '{"object_1": {"desc": "cat"}, "object_2": {"desc": "cat"}, "object_3": {'
    answer = loaded.vocab.encode(text)
    settings = guard(max_object_keys=2)
    reader = ObjectKeyReader(loaded.vocab.pieces)
    stop = RepetitionStopProcessor(lambda: RepeatGuard(settings, reader), loaded.vocab.eos_id, prompt_length=0)
    scores = torch.zeros(1, len(loaded.vocab))
    ended_at = None
    for length in range(len(answer) + 1):
        after = stop(torch.tensor([answer[:length]], dtype=torch.int64), scores)
        if int(after.argmax()) == loaded.vocab.eos_id:
            ended_at = length
            break
    trigger = first_trigger(answer, settings, reader)
    assert trigger is not None and ended_at == trigger.num_new_tokens
    assert loaded.vocab.decode(answer[:ended_at]).rstrip(" {").endswith('"object_3":')


@pytest.mark.parametrize("settings", [GUARDS[0], GUARDS[1]])
def test_each_beam_is_guarded_by_its_own_history(
    loaded: LoadedModel, requests_: list[RolloutRequest], settings: RepeatTerminateConfig
) -> None:
    """Beams swap rows and split; a verdict must follow the tokens, not the row."""
    found = answers(loaded, requests_, settings, num_beams=3)
    assert any(one.repeat_terminated for one in found)
    for one in found:
        trigger = first_trigger(one.response_token_ids, settings)
        assert one.repeat_terminated == (trigger is not None and not one.truncated)
        if one.repeat_terminated:
            assert trigger is not None and trigger.num_new_tokens == len(one.response_token_ids)
