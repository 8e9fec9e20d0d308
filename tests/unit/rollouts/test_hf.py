"""Rollouts with transformers: independent of batching, reproducible by seed, ended by the repeat guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.modeling.load import LoadedModel
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import DatasetSeeds, RolloutRound, SeedContext
from coordexp.rollouts.answer_state import AnswerGrammar
from coordexp.rollouts.hf import AnswerStates, HFBackend, RepetitionStopProcessor, sampling_processors
from coordexp.rollouts.hf_drafting import DraftedAnswer
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard
from support.settings import decoding, first_trigger
from support.tiny_run import load_tiny, tiny_samples

SEEDS = SeedContext(training_seed=1, global_step=2, micro_step_idx=0, rank=0)
TOKENS = 10


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny(sharpen=4.0)


@pytest.fixture(scope="module")
def requests_(loaded: LoadedModel) -> list[RolloutRequest]:
    return [sample.request for sample in tiny_samples(loaded, 7)]


@pytest.fixture
def calls(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Arguments and mode of each call of ``model.generate``."""
    seen: list[dict[str, Any]] = []
    model: Any = loaded.model
    generate = model.generate

    def watched(**arguments: Any) -> torch.Tensor:
        state = {"grad": torch.is_grad_enabled(), "training": loaded.model.training}
        seen.append({**arguments, **state})
        return generate(**arguments)

    monkeypatch.setattr(loaded.model, "generate", watched)
    yield seen


class StandInVocab:
    """The tiny model's vocabulary with another stop token or fewer tokens."""

    def __init__(self, loaded: LoadedModel, eos_id: int, length: int) -> None:
        self.eos_id, self._length, self._vocab = eos_id, length, loaded.vocab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vocab, name)

    def __len__(self) -> int:
        return self._length


def backend(loaded: LoadedModel, batch: int = 3, vocab: Any = None, skip: bool = False, **options: Any) -> HFBackend:
    asked = decoding(**{"max_new_tokens": TOKENS, **options})
    return HFBackend(loaded.model, vocab or loaded.vocab, asked, batch, loaded.image_token_id, skip_forced_tokens=skip)


both = pytest.mark.parametrize("skip", [False, True], ids=["every token", "skipping"])


def ids(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.response_token_ids for rollout in rollouts]


@pytest.mark.scenario("Microbatching increases decode parallelism without changing outputs format")
@both
def test_batched_greedy_equals_one_by_one(loaded: LoadedModel, requests_: list[RolloutRequest], skip: bool) -> None:
    assert len({len(request.prompt_token_ids) for request in requests_}) > 2  # so that rows are padded
    batched = backend(loaded, batch=7, skip=skip).generate(requests_, SEEDS)
    alone = [backend(loaded, batch=1).generate([request], SEEDS)[0] for request in requests_]
    assert ids(batched) == ids(alone)
    assert len(set(ids(batched))) > 1, "answers that do not depend on the image would show nothing"


@pytest.mark.parametrize("batch", [7, 3])
def test_progress_is_reported_within_a_batch(loaded: LoadedModel, requests_: list[RolloutRequest], batch: int) -> None:
    free = ids(backend(loaded).generate(requests_, SEEDS))
    # Use a token of some answers but not all as the stop token, so they end at different steps.
    eos = next(token for token in free[0] if any(token not in answer for answer in free))
    vocab = StandInVocab(loaded, eos_id=eos, length=len(loaded.vocab))
    ending = backend(loaded, batch=batch, vocab=vocab, skip=True)
    told: list[int] = []
    watched = ids(ending.generate(requests_, SEEDS, told.append))
    assert watched == ids(ending.generate(requests_, SEEDS)), "reporting progress changed an answer"
    assert told == sorted(told) and told[-1] == 7
    starts = range(0, 7, batch)
    assert {min(start + batch, 7) for start in starts} <= set(told), "a finished batch is reported"
    early = [sum(len(answer) < TOKENS - 1 for answer in watched[start : start + batch]) for start in starts]
    within = [start + ended for start, ended in zip(starts, early, strict=True) if 0 < ended < batch]
    assert within and set(within) <= set(told), "and every answer that ended before its batch did"


@pytest.mark.scenario("Microbatching increases decode parallelism without changing outputs format")
@pytest.mark.parametrize(("batch", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (5, [5, 2]), (64, [7])])
def test_batches_are_filled_across_micro_steps(
    loaded: LoadedModel, requests_: list[RolloutRequest], calls: list[dict[str, Any]], batch: int, sizes: list[int]
) -> None:
    """Every answer is the one that its micro-step alone would have had, sampled or not."""
    parts = (requests_[:3], [], requests_[3:4], requests_[4:])
    rounds = [RolloutRound(tuple(part), replace(SEEDS, micro_step_idx=step)) for step, part in enumerate(parts)]
    for temperature in (0.0, 1.0):
        sampler = backend(loaded, batch=batch, temperature=temperature)
        alone = [sampler.generate(one.requests, one.seeds) for one in rounds]
        seeds = sampler.last_report()["seeds"]
        sampler.sync_weights(1)
        calls.clear()
        seen = list(sampler.generate_rounds(rounds))
        assert [len(call["input_ids"]) for call in calls] == sizes
        assert not any(call["grad"] or call["training"] for call in calls)
        assert sampler.last_report()["seeds"] == seeds
        assert len(seen) == 7
        for one in seen:
            assert one.rollout.response_token_ids == alone[one.round_idx][one.index].response_token_ids


def test_model_is_trainable_between_two_batches(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    loaded.model.train()
    rounds = [RolloutRound(tuple(requests_), SEEDS)]
    for _ in backend(loaded, batch=3, max_new_tokens=1).generate_rounds(rounds):
        assert torch.is_grad_enabled() and loaded.model.training
    loaded.model.eval()


@both
@pytest.mark.parametrize("batch", [1, 7])
def test_each_request_has_its_own_seed_in_every_batch(
    loaded: LoadedModel, requests_: list[RolloutRequest], batch: int, skip: bool
) -> None:
    """A run that is resumed with another ``decode_batch_size`` goes on with the same sampled answers."""
    sampler = backend(loaded, batch=batch, temperature=1.0, skip=skip)
    answers = ids(sampler.generate(requests_, SEEDS))
    seeds = [1457209702, 1185506594, 681383637, 2094823808, 1335550789, 1898354267, 632542152]
    assert sampler.last_report()["seeds"] == seeds
    assert answers == ids(backend(loaded, batch=2, temperature=1.0).generate(requests_, SEEDS))


@both
@pytest.mark.parametrize("batch", [1, 7])
def test_dataset_answers_do_not_depend_on_the_batch(
    loaded: LoadedModel, requests_: list[RolloutRequest], batch: int, skip: bool
) -> None:
    sampler = backend(loaded, batch=batch, temperature=1.0, skip=skip)
    whole = ids(backend(loaded, batch=3, temperature=1.0).generate(requests_, DatasetSeeds(5, 10)))
    assert ids(sampler.generate(requests_, DatasetSeeds(5, 10))) == whole
    assert ids(sampler.generate(requests_[4:], DatasetSeeds(5, 14))) == whole[4:]
    assert ids(sampler.generate(requests_)) == ids(sampler.generate(requests_, DatasetSeeds(0, 0)))


@pytest.mark.parametrize(("batch", "skip", "prompts"), [(3, False, 9), (8, False, 9), (3, True, 3), (8, True, 4)])
def test_further_answers_are_sampled_next_to_a_greedy_one(
    loaded: LoadedModel, requests_: list[RolloutRequest], calls: list[dict[str, Any]], batch: int, skip: bool,
    prompts: int,
) -> None:  # fmt: skip
    """Answers of the same requests: the first is that of a greedy backend, the others do not depend on their number.
    With drafts, answers of a batch share their prompt's pass."""
    asked = tuple(requests_[:3])
    rounds = [RolloutRound(asked, DatasetSeeds(5, 10, k, k), greedy=k == 0) for k in range(3)]

    def answered(rounds: list[RolloutRound]) -> dict[tuple[int, int], tuple[int, ...]]:
        answers = backend(loaded, batch=batch, skip=skip, temperature=1.0).generate_rounds(rounds)
        return {(one.round_idx, one.index): one.rollout.response_token_ids for one in answers}

    found = answered(rounds)
    assert sum(len(call["input_ids"]) for call in calls) == prompts
    assert [found[0, i] for i in range(3)] == ids(backend(loaded).generate(asked, DatasetSeeds(1, 0)))
    assert all(len({found[k, i] for k in range(3)}) == 3 for i in range(3)), "each answer has samples of its own"
    assert answered(rounds[:2]) == {place: tokens for place, tokens in found.items() if place[0] < 2}


def test_sampled_frequencies_match_probabilities(loaded: LoadedModel) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    options = decoding(temperature=2.0, top_k=4, top_p=0.8)
    expected = torch.zeros(5)  # top_k drops the last; the first three of four have 0.85 of the mass, two have 0.66
    expected[:3] = (logits[:3] / 2).softmax(-1)
    scores: Any = logits.expand(4000, 5)
    ids_so_far: Any = torch.zeros(4000, 1, dtype=torch.int64)
    for processor in sampling_processors(options, range(4000), torch.device("cpu")):
        scores = processor(ids_so_far, scores)
    drawn = scores.argmax(-1)
    assert torch.isinf(scores).sum() == 4000 * 4, "one token a row is left"
    torch.testing.assert_close(drawn.bincount(minlength=5) / 4000, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_depends_only_on_its_seed_and_leaves_the_global_random_state(
    loaded: LoadedModel, requests_: list[RolloutRequest], temperature: float
) -> None:
    sampler, found = backend(loaded, temperature=temperature), []
    for seed, step in ((5, 2), (6, 2), (6, 3)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(ids(sampler.generate(requests_[:3], SeedContext(1, step, 0, 0))))
        assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == seed
    assert found[0] == found[1] and (found[2] == found[0]) == (temperature == 0)


def test_top_k_minus_one_keeps_every_token(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    """transformers' own default is 50."""
    sampler = backend(loaded, batch=64, temperature=1e6, max_new_tokens=1)
    rollouts = sampler.generate([requests_[0]] * 64 + [requests_[0]] * 64, SEEDS)
    assert len({answer for rollout in rollouts for answer in rollout.response_token_ids}) > 90


@both
def test_ids_outside_of_the_tokenizer_are_never_sampled(
    loaded: LoadedModel, requests_: list[RolloutRequest], skip: bool
) -> None:
    """Qwen's checkpoints have more embedding rows than tokens; one such id would decode to nothing."""
    known = 600
    vocab = StandInVocab(loaded, eos_id=loaded.vocab.eos_id, length=known)
    sampler = backend(loaded, batch=64, vocab=vocab, skip=skip, temperature=1e6, max_new_tokens=4)
    rollouts = sampler.generate([requests_[0]] * 64, SEEDS)
    assert max(max(answer) for answer in ids(rollouts) if answer) < known


def test_batched_beams_equal_beams_one_by_one(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    batched = backend(loaded, batch=4, num_beams=3).generate(requests_[:4], SEEDS)
    assert ids(batched) == [
        backend(loaded, batch=1, num_beams=3).generate([r], SEEDS)[0].response_token_ids for r in requests_[:4]
    ]


@pytest.mark.scenario("Backend implementation swap preserves rollout contract")
@both
def test_answer_is_trimmed_at_the_stop_token(loaded: LoadedModel, requests_: list[RolloutRequest], skip: bool) -> None:
    free = ids(backend(loaded, batch=7).generate(requests_, SEEDS))
    stop = free[0][4]  # a token that this model really writes becomes the stop token
    vocab = StandInVocab(loaded, eos_id=stop, length=len(loaded.vocab))
    stopped = backend(loaded, batch=7, vocab=vocab, skip=skip).generate(requests_, SEEDS)
    for request, rollout, unstopped in zip(requests_, stopped, free, strict=True):
        assert (rollout.sample_id, rollout.prompt_token_ids) == (request.sample_id, request.prompt_token_ids)
        ended = stop in unstopped
        expected = unstopped[: unstopped.index(stop)] if ended else unstopped
        assert rollout.response_token_ids == expected
        assert rollout.truncated is not ended
        assert rollout.text == loaded.vocab.decode(expected)


@pytest.mark.parametrize(
    "leak",
    [{"no_repeat_ngram_size": 1}, {"min_new_tokens": 9}, {"repetition_penalty": 9.0}, {"num_beams": 3},
     {"do_sample": True, "temperature": 50.0}, {"suppress_tokens": list(range(1000))}, {"max_length": 3}],
    ids=lambda leak: next(iter(leak)),
)  # fmt: skip
def test_generation_config_of_the_checkpoint_is_ignored(
    loaded: LoadedModel, requests_: list[RolloutRequest], leak: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = ids(backend(loaded).generate(requests_[:2], SEEDS))
    of_checkpoint = type(loaded.model.generation_config)(**leak)
    monkeypatch.setattr(loaded.model, "generation_config", of_checkpoint)
    assert ids(backend(loaded).generate(requests_[:2], SEEDS)) == clean
    assert loaded.model.generation_config is of_checkpoint


def test_the_repetition_penalty_is_applied(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    plain = ids(backend(loaded).generate(requests_, SEEDS))
    assert ids(backend(loaded, repetition_penalty=5.0).generate(requests_, SEEDS)) != plain


@pytest.mark.parametrize("fails", [False, True])
def test_train_and_eval_modes_are_restored(
    loaded: LoadedModel, requests_: list[RolloutRequest], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    model = loaded.model
    model.train()
    model.model.visual.eval()  # a frozen tower stays in eval mode
    before = [module.training for module in model.modules()]
    assert True in before and False in before
    if fails:
        monkeypatch.setattr(model, "generate", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backend(loaded).generate(requests_[:1], SEEDS)
    else:
        backend(loaded, max_new_tokens=1).generate(requests_[:1], SEEDS)
    assert [module.training for module in model.modules()] == before
    model.eval()


def test_answers_carry_the_synced_weight_version(loaded: LoadedModel, requests_: list[RolloutRequest]) -> None:
    engine = backend(loaded, max_new_tokens=1)
    versions = [engine.generate(requests_[:1], SEEDS)[0].weight_version]
    engine.sync_weights(17)
    versions.append(engine.generate(requests_[:1], SEEDS)[0].weight_version)
    assert versions == [0, 17]


# -- the repeat guard: an answer ends where the guard ends it offline --------------------------------------------------

EOS = 7


def guard(**keys: Any) -> RepeatTerminateConfig:
    quiet = {"min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 0, "ngram_repeats": 0}
    return RepeatTerminateConfig(**{"enabled": True, **quiet, **keys})


def answers(
    loaded: LoadedModel, requests: list[RolloutRequest], settings: RepeatTerminateConfig | None, **options: Any
) -> list[Rollout]:
    asked = decoding(**{"max_new_tokens": 48, **options})
    backend = HFBackend(loaded.model, loaded.vocab, asked, 4, loaded.image_token_id, settings)
    return backend.generate(requests, replace(SEEDS, global_step=0))


GUARDS = [
    guard(max_consecutive_token_repeats=4),
    guard(ngram_size=3, ngram_repeats=3),
    guard(ngram_size=2, ngram_repeats=2, min_new_tokens=20),
    guard(max_consecutive_token_repeats=30, ngram_size=16, ngram_repeats=2),
]


@pytest.fixture(scope="module", params=[{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.05}], ids=str)
def unguarded(
    loaded: LoadedModel, requests_: list[RolloutRequest], request: pytest.FixtureRequest
) -> tuple[dict[str, Any], list[Rollout]]:
    """Options of decoding and the answers with them."""
    return request.param, answers(loaded, requests_, None, **request.param)


@pytest.mark.parametrize("settings", GUARDS)
def test_answer_ends_where_the_guard_triggers(
    loaded: LoadedModel, requests_: list[RolloutRequest], settings: RepeatTerminateConfig,
    unguarded: tuple[dict[str, Any], list[Rollout]],
) -> None:  # fmt: skip
    options, free = unguarded
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
    if settings is GUARDS[3] and not options:  # in one batch some repeat, each up to its own step, and others do not
        assert {one.repeat_terminated for one in guarded} == {True, False}
        assert len({len(one.response_token_ids) for one in guarded if one.repeat_terminated}) > 1


def test_the_guard_of_drafted_answers_reads_the_tokens_that_the_host_has(loaded: LoadedModel) -> None:
    settings, on_device = guard(max_consecutive_token_repeats=2), torch.empty(1, len(loaded.vocab), device="meta")
    state, prompt_ids = AnswerGrammar(loaded.vocab).start(), torch.tensor([1, 2, 3])
    answer = DraftedAnswer(state, prompt_ids, EOS, max_new_tokens=9, guard=RepeatGuard(settings))
    for most_likely in (40, 41, 41, 42):  # a value on the meta device could not be read
        answer.read(on_device, [most_likely])
    assert answer.tokens == [40, 41, 41, EOS]
    assert answer.ended


def test_forced_tokens_are_skipped_under_autocast_with_float32_weights(
    loaded: LoadedModel, requests_: list[RolloutRequest]
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, skipping = (ids(backend(loaded, skip=skip).generate(requests_[:3], SEEDS)) for skip in (False, True))
    assert plain == skipping


@pytest.mark.parametrize(
    ("settings", "active"), [(None, 0), (GUARDS[0], 1), (GUARDS[0].model_copy(update={"enabled": False}), 0)]
)
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


def test_states_follow_answers_and_whole_answers_are_read_only_where_rows_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, moves = AnswerStates(0, lambda state, token: state + token, EOS, prompt_length=1), []
    move = AnswerStates._moved
    monkeypatch.setattr(AnswerStates, "_moved", lambda self, answers: moves.append(len(answers)) or move(self, answers))
    ids = torch.tensor([[9], [9]])
    assert states(ids) == [0, 0]
    for tokens, found in (([1, 2], [1, 2]), ([3, EOS], [4, None]), ([5, EOS], [9, None])):
        ids = torch.cat([ids, torch.tensor(tokens)[:, None]], 1)
        assert states(ids) == found
    assert not moves
    assert states(torch.cat([ids[[1, 0]], torch.tensor([[EOS], [6]])], 1)) == [None, 15]
    assert moves == [2]


def test_object_keys_end_an_answer(loaded: LoadedModel) -> None:
    text = '{"object_1": {"desc": "cat"}, "object_2": {"desc": "cat"}, "object_3": {'
    answer = loaded.vocab.encode(text)
    settings = guard(max_object_keys=2)
    reader = ObjectKeyReader(loaded.vocab.pieces)
    stop = RepetitionStopProcessor(lambda: RepeatGuard(settings, reader), loaded.vocab.eos_id, prompt_length=0)
    scores = torch.zeros(1, len(loaded.vocab))
    steps = (stop(torch.tensor([answer[:n]], dtype=torch.int64), scores) for n in range(len(answer) + 1))
    ended_at = next((n for n, after in enumerate(steps) if int(after.argmax()) == loaded.vocab.eos_id), None)
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
