"""Scenarios of whole training steps: rollouts, packing, one forward, decode batching, backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.coords import TURN_END
from coordexp.modeling.load import LoadedModel
from coordexp.parsing import parse_rollout
from coordexp.records import Rollout, RolloutRequest, TokenRole
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.step import PreparedStep
from support.tiny_run import (
    InMemoryBackend,
    QuietBackend,
    finder,
    load_tiny,
    run_config,
    same_weights,
    step_lines,
    tiny_samples,
    train,
    watch_steps,
    weights,
)

FOUR = {"training__per_device_train_batch_size": 4, "training__max_steps": 1}


class Watch:
    """Calls of ``generate``, trained forwards, prepared steps and backward losses of a run."""

    def __init__(self) -> None:
        self.generated: list[dict[str, Any]] = []
        self.forwards: list[dict[str, Any]] = []
        self.steps: list[PreparedStep] = []
        self.losses: list[torch.Tensor] = []

    def __call__(self, trainer: CoordExpTrainer) -> None:
        model: Any = trainer.model
        generate = model.generate
        backward = trainer.run.accelerator.backward

        def watched_generate(**arguments: Any) -> torch.Tensor:
            self.generated.append(arguments)
            return generate(**arguments)

        def watched_backward(loss: torch.Tensor, **arguments: Any) -> None:
            self.losses.append(loss.detach())
            backward(loss, **arguments)

        model.generate = watched_generate
        self.steps = watch_steps(trainer)
        trainer.run.accelerator.backward = watched_backward
        model.model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _forward(self, model: torch.nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.forwards.append(arguments)


@pytest.mark.scenario("Packing enabled does not break rollout-matching training")
def test_a_packed_step_equals_the_unpacked_step(tmp_path: Path) -> None:
    packed, plain = Watch(), Watch()
    with_packing = train(run_config(tmp_path, 2, "packed", **FOUR), on_built=packed)
    one_by_one = {"training__packing": False, "training__per_device_train_batch_size": 1,
                  "training__gradient_accumulation_steps": 4}  # fmt: skip
    without = train(run_config(tmp_path, 2, "plain", **FOUR | one_by_one), on_built=plain)
    (row,) = packed.steps[0].rows
    assert [len(row.segments) for row in plain.steps[0].rows] == [1, 1, 1, 1]
    assert len(row.segments) == 4
    # Rollouts un-packed: one row per sample. The forward packed: one row for all.
    assert [len(call["input_ids"]) for call in packed.generated] == [3, 1]
    assert [forward["input_ids"].tolist() for forward in packed.forwards] == [[row.token_ids_L.tolist()]]
    # The masks still mean the same tokens: loss and all of its terms equal those of separate forwards.
    line, unpacked = step_lines(with_packing)[0], step_lines(without)[0]
    assert math.isfinite(line["loss"])
    for name in [name for name in line if name.startswith("loss")]:
        assert line[name] == pytest.approx(unpacked[name], rel=1e-5), name


@pytest.mark.scenario("Packing is never applied during rollout generation")
@pytest.mark.parametrize("packing", [True, False])
def test_each_rollout_is_generated_from_its_own_padded_prompt(packing: bool, tmp_path: Path) -> None:
    watch = Watch()
    train(run_config(tmp_path, 2, **FOUR, training__packing=packing), on_built=watch)
    outcomes = watch.steps[0].outcomes
    rows = [
        (row[mask.bool()].tolist(), mask)
        for call in watch.generated
        for row, mask in zip(call["input_ids"], call["attention_mask"], strict=True)
    ]
    assert [prompt for prompt, _ in rows] == [list(outcome.rollout.prompt_token_ids) for outcome in outcomes]
    assert all(mask.ndim == 1 and set(mask.tolist()) <= {0, 1} for _, mask in rows)
    assert all(len(call["image_grid_thw"]) == len(call["input_ids"]) for call in watch.generated)
    assert not [call for call in watch.generated if "position_ids" in call]


@pytest.mark.scenario("Training uses one sequence and one forward pass")
def test_one_forward_and_one_loss_per_micro_step(tmp_path: Path) -> None:
    watch = Watch()
    config = run_config(tmp_path, 2, **FOUR, training__gradient_accumulation_steps=2)
    trainer = train(config, finder(), watch)
    (prepared,) = watch.steps
    assert len(watch.forwards) == len(prepared.rows) == len(watch.losses) == 2
    trained = [segment for row in prepared.rows for segment in row.segments]
    assert [s.target for s in trained] == [outcome.target for outcome in prepared.outcomes]  # each Y_train exactly once
    assert len({segment.sample_id for segment in trained}) == 8
    assert all(loss.ndim == 0 for loss in watch.losses)
    assert step_lines(trainer)[0]["loss"] == pytest.approx(sum(loss.item() for loss in watch.losses), rel=1e-5)
    roles = {TokenRole(role) for segment in trained for role in segment.target.roles_T}
    assert {TokenRole.MASKED, TokenRole.MATCHED_COORD, TokenRole.GT_COORD, TokenRole.EOS} <= roles


@pytest.mark.scenario("Beam search selects exactly one rollout response")
def test_training_continues_from_the_best_beam(tmp_path: Path) -> None:
    watch = Watch()
    beam = {"rollout_matching__decode_mode": "beam", "rollout_matching__num_beams": 3}
    trainer = train(run_config(tmp_path, 2, **FOUR, **beam), on_built=watch)
    loaded = load_tiny()  # the weights of the first step
    samples = {sample.record.sample_id: sample.request for sample in tiny_samples(loaded)}
    outcomes = watch.steps[0].outcomes
    (line,) = step_lines(trainer)
    assert len(outcomes) == 4 and line["rollout/decode_beam"] == 1 and "rollout/decode_greedy" not in line
    for outcome in outcomes:
        best = best_beam(loaded, samples[outcome.rollout.sample_id], beams=3)
        assert outcome.rollout.response_token_ids == best
        assert outcome.parsed == parse_rollout(best, loaded.vocab, ended=not outcome.rollout.truncated)


def best_beam(loaded: LoadedModel, request: RolloutRequest, beams: int) -> tuple[int, ...]:
    prompt, eos = torch.tensor([request.prompt_token_ids]), loaded.vocab.eos_id
    model: Any = loaded.model
    found = model.generate(
        input_ids=prompt, mm_token_type_ids=(prompt == loaded.image_token_id).int(), **request.model_inputs,
        max_new_tokens=12, num_beams=beams, num_return_sequences=beams, do_sample=False, eos_token_id=eos,
        pad_token_id=eos, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    answer = found.sequences[found.sequences_scores.argmax()][prompt.shape[1] :].tolist()
    return tuple(answer[: answer.index(eos)] if eos in answer else answer)


@pytest.mark.scenario("Eval per-device knobs do not override rollout decode batching")
@pytest.mark.parametrize("per_device", [1, 2, 8])
def test_decode_batch_size_is_the_batch_size_in_training_and_evaluation(per_device: int, tmp_path: Path) -> None:
    watch = Watch()
    config = run_config(tmp_path, 2, **FOUR, training__per_device_eval_batch_size=per_device,
                        training__eval_strategy="steps", training__eval_steps=1)  # fmt: skip
    train(config, on_built=watch)
    assert config.rollout_matching is not None and config.rollout_matching.decode_batch_size == 3
    # Four training samples, then five validation samples.
    assert [len(call["input_ids"]) for call in watch.generated] == [3, 1, 3, 2]


@pytest.mark.scenario("Canonical Stage-2 key controls decode microbatching")
@pytest.mark.parametrize("size", [2, 3])
def test_decode_batch_size_limits_the_sequences_of_a_two_channel_run(size: int, tmp_path: Path) -> None:
    watch = Watch()
    keys = {"rollout_matching__decode_batch_size": size, "stage2_ab__schedule__b_ratio": 1.0,
            "training__per_device_train_batch_size": 5, "training__max_steps": 1}  # fmt: skip
    trainer = train(run_config(tmp_path, "two_channel", **keys), on_built=watch)
    assert trainer.rollout_matching_cfg["decode_batch_size"] == size
    decoded = [len(call["input_ids"]) for call in watch.generated]
    assert (max(decoded), sum(decoded)) == (size, 5)


class Replay(QuietBackend):
    """A second implementation of the interface: repeats another backend's answers, without a model."""

    def __init__(self, said: Sequence[Rollout]) -> None:
        self._said = {rollout.sample_id: rollout for rollout in said}

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
        return [self._said[request.sample_id] for request in requests]


@pytest.mark.scenario("Backend implementation swap preserves rollout contract")
def test_another_backend_with_the_same_answers_trains_the_same(tmp_path: Path) -> None:
    watch = Watch()
    by_hf = train(run_config(tmp_path, 2, "hf", **FOUR), on_built=watch)
    said = [outcome.rollout for outcome in watch.steps[0].outcomes]
    by_replay = train(run_config(tmp_path, 2, "replay", **FOUR), Replay(said))
    assert same_weights(weights(by_hf.model), weights(by_replay.model))
    assert step_lines(by_hf)[0]["loss"] == step_lines(by_replay)[0]["loss"]


BOX = '"bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_40|>"]'
MALFORMED = {
    "wrong arity": ('{"object_1": {"desc": "a", "bbox_2d": ["<|coord_1|>"]}}' + TURN_END, ["wrong_arity"]),
    "no desc": ('{"object_1": {' + BOX + "}}" + TURN_END, ["missing_desc"]),
    "inverted": ('{"object_1": {"desc": "a", ' + BOX.replace("_30|", "_0|") + "}}" + TURN_END, ["box_inverted"]),
    "cut off": ('{"object_1": {"desc": "a", "bbox_2d": ["<|coord_1|>", "<|co', ["truncated"]),
    "broken": ('{"object_1": {"desc": "a", ' + BOX + "]}}" + TURN_END, ["malformed"]),
    "broken, then another": (
        '{"object_1": {"desc": "a", ' + BOX + ']}, "object_2": {"desc": "a", ' + BOX + "}}" + TURN_END,
        ["malformed", "after_break"],
    ),
    "words before": ('Sure! "object_1": {"desc": "a", ' + BOX + "}}" + TURN_END, ["preamble"]),
}


@pytest.mark.scenario("Parse failures are visible without crashing")
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_answers_are_counted_and_the_step_completes(kind: str, tmp_path: Path) -> None:
    text, reasons = MALFORMED[kind]
    loaded = load_tiny()
    good = finder()
    bad = {sample.record.sample_id for sample in tiny_samples(loaded)[::2]}
    answers: Callable[[RolloutRequest], str] = lambda r: text if r.sample_id in bad else good._answers(r)  # noqa: E731
    watch = Watch()
    trainer = train(run_config(tmp_path, 2, **FOUR | {"training__max_steps": 2}),
                    InMemoryBackend(loaded.vocab, answers), watch)  # fmt: skip
    lines = step_lines(trainer)
    assert len(lines) == 2 and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    outcomes = [outcome for prepared in watch.steps for outcome in prepared.outcomes]
    spoiled = [outcome for outcome in outcomes if outcome.rollout.sample_id in bad]
    assert spoiled and len(spoiled) < len(outcomes)
    for reason in reasons:
        assert sum(line.get(f"rollout/dropped/{reason}", 0) for line in lines) == len(spoiled)
    assert sum(line["rollout/parse_dropped_invalid"] for line in lines) == len(reasons) * len(spoiled)
    for outcome in spoiled:
        assert outcome.target.appended_gt_idx == outcome.match.fn_gt_idx  # missed objects are taught in the tail
        assert TokenRole.EOS in outcome.target.roles_T
