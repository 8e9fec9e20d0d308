"""Rollouts of a real colocated vLLM engine equal those of transformers' ``generate``, token for token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.data.dataset import Sample
from coordexp.data.images import open_rgb
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.engine.wire.arguments import with_image_size
from coordexp.errors import AlignmentError, DataError, RolloutError
from coordexp.matching import MatchingConfig
from coordexp.modeling.inputs import PromptEncoder
from coordexp.modeling.load import LoadedModel
from coordexp.records import ImageRecord, RolloutRequest
from coordexp.rollouts import RolloutRound, SeedContext, rollout_session
from coordexp.training.step_answers import AnswerReader, RolloutQueue
from coordexp.weight_sync.receiver import InPlaceTargets
from support.answers import CAT, record
from support.forked import ENGINES
from support.rollout_servers import (
    COLOCATED,
    GUARD,
    GUARDED_TOKENS,
    colocated,
    disturb,
    greedy_answers,
    greedy_tokens,
    load_served,
    requests_of,
    vllm_config,
)
from support.settings import first_trigger
from support.tiny_run import same_weights, step_lines, tiny_samples, train, weights
from support.torchrun import SGD, assert_same_weights, train_by_two

SEEDS = SeedContext(1, 0, 0, 0)


@pytest.fixture(scope="module")
def trainer() -> LoadedModel:
    return load_served()


@pytest.fixture(scope="module")
def requests_(trainer: LoadedModel) -> list[RolloutRequest]:
    return requests_of(trainer, 6)


class ImageDoor:
    """Opens images, optionally enlarged or rotated, so that the engine's prompt differs from the trainer's."""

    def __init__(self) -> None:
        self.enlarge = 1
        self.turn: Image.Transpose | None = None

    def __call__(self, path: Path) -> Image.Image:
        image = open_rgb(path)
        image = image.resize((image.width * self.enlarge, image.height * self.enlarge))
        return image if self.turn is None else image.transpose(self.turn)


DOOR = ImageDoor()


@pytest.fixture(scope="module")
def backend(trainer: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedBackend]:
    folder = tmp_path_factory.mktemp("colocated")
    backend = colocated(trainer, folder, DOOR, rollout_matching__decoding__temperature=0.0)
    yield backend
    backend.close()


def test_no_answers_before_the_first_push(backend: ColocatedBackend, requests_: list[RolloutRequest]) -> None:
    with pytest.raises(RolloutError, match="sync_weights"):
        backend.generate(requests_[:1], SEEDS)


def test_memory_is_profiled_on_the_largest_image_of_a_prompt(backend: ColocatedBackend) -> None:
    """And not on the processor's largest, which takes an hour on a CPU if it is 4096 x 4096."""
    with rollout_session(backend, 1):
        image = backend.engine.vllm.model_config.multimodal_config.limit_per_prompt["image"]
    wanted = with_image_size(backend.engine_arguments)["limit_mm_per_prompt"]["image"]
    assert {"count": image.count, "width": image.width, "height": image.height} == wanted


@pytest.mark.parametrize("words", [1, 12], ids=["short prompts", "long prompts"])
def test_answers_equal_the_trainers_after_every_push(
    words: int, backend: ColocatedBackend, trainer: LoadedModel, requests_: list[RolloutRequest]
) -> None:
    """Also of prompts of more than two blocks of 128 tokens: vLLM's CPU engine caches whole blocks only."""
    if words > 1:
        encoder = PromptEncoder(trainer.processor, "Find every object in the picture and write it down. " * words, None)
        requests_ = [encoder.encode(sample.record) for sample in tiny_samples(trainer, 2)]
        assert min(len(request.prompt_token_ids) for request in requests_) > 2 * 128
    answers = []
    for version in (7, 8):
        with rollout_session(backend, version):
            rollouts = backend.generate(requests_, SEEDS)
            again = backend.generate(requests_, SEEDS)
        assert [r.prompt_token_ids for r in rollouts] == [r.prompt_token_ids for r in requests_]
        assert {rollout.weight_version for rollout in rollouts} == {version}
        answers.append([list(rollout.response_token_ids) for rollout in rollouts])
        assert answers[-1] == greedy_answers(trainer, requests_, 12)
        assert answers[-1] == [list(rollout.response_token_ids) for rollout in again]
        assert [r.truncated for r in rollouts] == [len(ids) == 12 for ids in answers[-1]]
        disturb(trainer, version)  # the same prompts again: every cached prefix and image embedding is outdated
    assert words > 1 or answers[0] != answers[1]


def test_weights_changed_in_transit_are_detected(
    backend: ColocatedBackend, trainer: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollout_session(backend, 2):
        receiver = backend.engine.ask_worker(lambda worker: worker.receiver)
    model, load = receiver.model, receiver.model.load_weights
    monkeypatch.setattr(
        model,
        "load_weights",
        lambda named: load([(n, t + 1e-3 if n.endswith("visual.pos_embed.weight") else t) for n, t in named]),
    )
    # As before the first push: everything goes through the loader, and the parameters are read back.
    receiver.in_place = InPlaceTargets(receiver.layout, enabled=True)
    backend.pusher.compared = False
    with (
        pytest.raises(RolloutError, match=r"checksum .* its answers would not be the trainer's"),
        rollout_session(backend, 3),
    ):
        pass
    monkeypatch.undo()
    with rollout_session(backend, 3):
        assert backend.pusher.compared


def test_a_window_is_answered_at_once_or_by_request(backend: ColocatedBackend, requests_: list[RolloutRequest]) -> None:
    rounds = [RolloutRound(tuple(requests_[:4]), SEEDS), RolloutRound((), SeedContext(1, 0, 1, 0)),
              RolloutRound(tuple(requests_[4:]), SeedContext(1, 0, 2, 0))]  # fmt: skip
    with rollout_session(backend, 1):
        answers = list(backend.generate_rounds(rounds))
        one_by_one = {r.sample_id: backend.generate([r], SEEDS)[0].response_token_ids for r in requests_}
    assert {(a.round_idx, a.index) for a in answers} == {(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (2, 1)}
    for answer in answers:
        request = rounds[answer.round_idx].requests[answer.index]
        assert answer.rollout.sample_id == request.sample_id
        assert answer.rollout.response_token_ids == one_by_one[request.sample_id]
    report = backend.last_report()
    assert report["weight_version"] == 1 and report["cap"] == 3 and report["sync_mode"] == "full"


def test_at_most_decode_batch_size_sequences_decode_at_once(
    backend: ColocatedBackend, requests_: list[RolloutRequest]
) -> None:
    engine = backend.engine.vllm
    with rollout_session(backend, 1):
        stream = backend.generate_rounds([RolloutRound(tuple(requests_), SEEDS)])
        first = next(stream)
        assert engine.get_num_unfinished_requests() <= 3  # the rest has not even been handed over
        assert len([first, *stream]) == 6


def test_an_unreadable_image_is_named_and_the_engine_stays_usable(
    backend: ColocatedBackend, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    """Also if other images were prepared and never admitted, and after a window that is left early."""
    broken = replace(requests_[4], image=tmp_path / "none.png", sample_id="the broken one")
    with rollout_session(backend, 1):
        expected = [rollout.response_token_ids for rollout in backend.generate(requests_, SEEDS)]
        with pytest.raises(DataError, match=r"none\.png.* of sample the broken one"):
            backend.generate([*requests_[:4], broken, requests_[5]], SEEDS)
        assert not backend.engine.vllm.has_unfinished_requests()
        assert not [thread for thread in threading.enumerate() if thread.name == "prompts"]
        stream: Any = backend.generate_rounds([RolloutRound(tuple(requests_), SEEDS)])
        next(stream)
        stream.close()
        assert not backend.engine.vllm.has_unfinished_requests()
        assert [rollout.response_token_ids for rollout in backend.generate(requests_, SEEDS)] == expected


@pytest.mark.scenario("vLLM backend produces token ids suitable for strict alignment")
def test_a_prompt_that_the_engine_tokenises_differently_is_refused(
    backend: ColocatedBackend, trainer: LoadedModel, requests_: list[RolloutRequest]
) -> None:
    """By the step that would train on its answer."""
    queue = RolloutQueue(backend, AnswerReader(trainer.vocab, MatchingConfig()), 1)
    samples = [Sample(record([CAT], request.sample_id), request) for request in requests_[:2]]
    answers = queue.take([samples], 1, {})
    assert [answer.rollout.prompt_token_ids for answer in answers.all] == [s.request.prompt_token_ids for s in samples]
    DOOR.enlarge = 2
    try:
        with pytest.raises(AlignmentError, match="they part at token"):
            queue.take([samples], 2, {})
    finally:
        DOOR.enlarge = 1


def test_exif_orientation_is_applied_like_in_the_trainer(
    backend: ColocatedBackend, trainer: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    encoder = PromptEncoder(trainer.processor, "Find every object.", None)
    turned = []
    for orientation in (3, 6):
        with Image.open(requests_[0].image) as image:
            exif = Image.Exif()
            exif[0x0112] = orientation
            path = tmp_path / f"{orientation}.jpg"
            image.convert("RGB").resize((96, 64)).save(path, exif=exif)
        width, height = open_rgb(path).size
        turned.append(encoder.encode(ImageRecord(path.name, path, width, height, ())))
    with rollout_session(backend, 1):
        answers = [list(rollout.response_token_ids) for rollout in backend.generate(turned, SEEDS)]
        eos = trainer.vocab.eos_id
        assert answers == [ids[: ids.index(eos)] if eos in ids else ids for ids in greedy_tokens(trainer, turned, 12)]
        backend.engine.vllm.reset_mm_cache()
        DOOR.turn = Image.Transpose.ROTATE_90
        try:
            with pytest.raises(AlignmentError, match=r"6\.jpg.*image_grid_thw"):
                backend.generate(turned[1:], SEEDS)
        finally:
            DOOR.turn = None


def test_a_too_long_prompt_is_named_and_the_engine_stays_usable(
    backend: ColocatedBackend, requests_: list[RolloutRequest]
) -> None:
    DOOR.enlarge = 16
    try:
        with rollout_session(backend, 1), pytest.raises(RolloutError, match="rollout_backend: hf"):
            backend.generate(requests_[:1], SEEDS)
    finally:
        DOOR.enlarge = 1
    with rollout_session(backend, 1):
        assert len(backend.generate(requests_[:2], SEEDS)) == 2


def test_closing_ends_the_engine_and_its_process_group(backend: ColocatedBackend) -> None:
    backend.close()
    assert not dist.is_initialized()


@pytest.mark.scenario("Default behavior preserved (colocate)")
@pytest.mark.scenario("vLLM backend produces token ids suitable for strict alignment")
def test_training_with_a_colocated_engine_equals_training_with_hf(tmp_path: Path) -> None:
    keys = {"training__per_device_train_batch_size": 2, "training__gradient_accumulation_steps": 2,
            "training__eval_strategy": "steps", "training__eval_steps": 2}  # fmt: skip
    config = vllm_config(tmp_path, "colocated", **COLOCATED, **keys)
    assert config.rollout_matching is not None and config.rollout_matching.vllm.mode == "colocate"  # not written down
    own = train(vllm_config(tmp_path, "own", **keys))
    by_vllm = train(config)
    try:
        assert isinstance(by_vllm.backend, ColocatedBackend)
        # Exactly the same answers make exactly the same targets, gradients and weights.
        assert same_weights(weights(own.model), weights(by_vllm.model))
        for a, b in zip(step_lines(own), step_lines(by_vllm), strict=True):
            assert a["loss"] == b["loss"] and a["rollout/gen_new_tokens_total"] == b["rollout/gen_new_tokens_total"]
        lines = [json.loads(line) for line in (tmp_path / "colocated" / "rollout_log_rank0.jsonl").open()]
        assert [(line["global_step"], line["weight_version"], line["mode"]) for line in lines] == [
            (0, 0, "colocate"), (1, 1, "colocate"),
        ]  # fmt: skip
        assert lines[0]["seeds"]["0"] == [SeedContext(config.training.seed, 0, 0, 0).seed_of(i) for i in (0, 1)]
    finally:
        by_vllm.close()


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_have_one_engine_each_or_share_one(tensor_parallel_size: int, tmp_path: Path) -> None:
    own = train(vllm_config(tmp_path, "own", training__per_device_train_batch_size=4, **SGD))
    keys = COLOCATED | SGD | {"rollout_matching__vllm__tensor_parallel_size": tensor_parallel_size}
    config = vllm_config(tmp_path, "two", training__per_device_train_batch_size=2, **keys)
    train_by_two(config, behind=ENGINES)
    assert_same_weights(config, own)


@pytest.mark.parametrize("skip", [False, True], ids=["every token", "forced tokens skipped"])
def test_sampling_is_reproducible_and_follows_the_seed(
    skip: bool, trainer: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"rollout_matching__decoding": {"temperature": 2.0, "skip_forced_tokens": skip}}
    with closing(colocated(trainer, tmp_path, **keys)) as backend, rollout_session(backend, 0):
        first, again = (backend.generate(requests_[:3], SEEDS) for _ in range(2))
        other = backend.generate(requests_[:3], SeedContext(1, 1, 0, 0))
    assert [r.response_token_ids for r in first] == [r.response_token_ids for r in again]
    assert [r.response_token_ids for r in first] != [r.response_token_ids for r in other]
    assert max(max(r.response_token_ids) for r in first) < len(trainer.vocab)


def test_samples_do_not_depend_on_how_prompts_are_divided(
    trainer: LoadedModel, requests_: list[RolloutRequest], tmp_path: Path
) -> None:
    """vLLM samples after every part of a prompt, drops the token and rewinds the request's random numbers; on a CPU it
    could not, and ended."""
    keys: dict[str, Any] = {"rollout_matching__decoding__temperature": 2.0, "rollout_matching__decode_batch_size": 6}
    longest = max(len(request.prompt_token_ids) for request in requests_)
    answers = []
    for number, tokens in enumerate((None, longest + 5)):
        arguments = {"max_num_batched_tokens": tokens, "max_num_seqs": 8}
        divided: dict[str, Any] = {"rollout_matching__vllm__engine_args": arguments}
        with (
            closing(colocated(trainer, tmp_path / str(number), **keys, **divided)) as backend,
            rollout_session(backend, 0),
        ):
            answers.append([answer.response_token_ids for answer in backend.generate(requests_, SEEDS)])
    assert answers[0] == answers[1]


def test_repeating_answers_end_at_the_same_step_in_any_batch(trainer: LoadedModel, tmp_path: Path) -> None:
    """Where the guard ends the whole answers of transformers."""
    settings = RepeatTerminateConfig(**GUARD)
    keys = {
        "rollout_matching__repeat_terminate": GUARD,
        "rollout_matching__max_new_tokens": GUARDED_TOKENS,
        "rollout_matching__decoding__temperature": 0.0,
    }
    requests = requests_of(trainer, 12)
    free = greedy_tokens(trainer, requests, GUARDED_TOKENS)
    triggers = [first_trigger(answer, settings) for answer in free]
    assert None in triggers and len({one.num_new_tokens for one in triggers if one is not None}) > 1
    with closing(colocated(trainer, tmp_path, **keys)) as backend:
        for version, size in enumerate((len(requests), 5)):
            rollouts = []
            with rollout_session(backend, version):
                for start in range(0, len(requests), size):
                    rollouts += backend.generate(requests[start : start + size], SEEDS)
            for rollout, without, trigger in zip(rollouts, free, triggers, strict=True):
                cut = len(without) if trigger is None else trigger.num_new_tokens
                assert list(rollout.response_token_ids) == without[:cut], rollout.sample_id
                assert rollout.repeat_terminated is (trigger is not None)
                assert rollout.truncated is (trigger is None and len(without) == GUARDED_TOKENS)
        assert backend.take_metrics()["rollout/repeat_terminate_active"] == 1.0
