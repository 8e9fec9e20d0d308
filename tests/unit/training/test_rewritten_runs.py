"""Rewritten answers and soft objects in whole runs; annotations that count as complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.coords import TURN_END, serialize_objects
from coordexp.data.dataset import Sample
from coordexp.data.jsonl import read_jsonl
from coordexp.inference.replay import replay_records
from coordexp.matching import MatchingConfig
from coordexp.recording.rollout_record import read_records
from coordexp.records import GTObject
from coordexp.targets import SampleOutcome, TargetPolicy, TransportConfig
from coordexp.training.step_answers import AnswerReader, RolloutQueue, TargetOptions, decide_policy
from support.answers import CAT, DOG, LEAF, answer, entry, record, request, taught_text, tiny_vocab
from support.tiny_run import (
    InMemoryBackend,
    finder,
    run_config,
    step_lines,
    tiny_checkpoint,
    tiny_processor_and_vocab,
    tiny_scenes,
    train,
)

RECORDED = {"enabled": True, "every_steps": 1}


@pytest.mark.parametrize("stage", [2, "two_channel"])
def test_both_trainers_learn_from_rewritten_answers_and_their_records_replay(stage, tmp_path: Path) -> None:
    keys = {"stage2_ab__schedule__b_ratio": 1.0} if stage == "two_channel" else {}
    config = run_config(
        tmp_path, stage, rollout_matching__target={"answer": "rewritten"}, rollout_matching__monitor_dump=RECORDED,
        custom__train_sample_limit=2, training__max_steps=6, training__learning_rate=3e-3, **keys,
    )  # fmt: skip
    trainer = train(config, finder())
    trainer.close()
    lines = step_lines(trainer)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    folder = Path(config.training.output_dir) / "rollout_records"
    records = read_records(folder)
    assert records and all(record.settings.target.answer == "rewritten" for record in records)
    roles = {role for record in records for role, _ in record.target.roles}
    assert {"REWRITTEN_STRUCT", "REWRITTEN_DESC", "MATCHED_COORD"} <= roles and "MATCHED_STRUCT" not in roles
    replayed = list(replay_records(folder, config, model=tiny_checkpoint(), limit=2))
    assert [one.differences for one in replayed] == [(), ()]
    # Descriptions of matched objects are taught (those of missed ones have no weight in this configuration).
    assert sum((one.losses or {})["loss/token_ce/desc_ce"] for one in replayed) > 0


def inventor() -> InMemoryBackend:
    """Finds everything, and one object that is not annotated."""
    truth = {one.sample_id: one.objects for one in read_jsonl(tiny_scenes())}
    more = GTObject("red circle", "bbox_2d", (990, 990, 999, 999))
    vocab = tiny_processor_and_vocab().vocab
    return InMemoryBackend(vocab, lambda request: serialize_objects([*truth[request.sample_id], more]) + TURN_END)


@pytest.mark.parametrize(
    ("share", "complete"),
    [(0.3, True), (0.9, False)],  # a half of each answer's objects or more, where an image holds any
)
def test_unmatched_objects_are_dropped_if_annotations_are_complete(
    share: float, complete: bool, tmp_path: Path
) -> None:
    config = run_config(
        tmp_path, 2, training__max_steps=2,
        rollout_matching__target={"answer": "rewritten", "complete_above": share},
        rollout_matching__monitor_dump=RECORDED,
    )  # fmt: skip
    trainer = train(config, inventor())
    trainer.close()
    lines = step_lines(trainer)
    wrong = sum(line["rollout/fp_total"] for line in lines)
    assert wrong > 0 and sum(line["rollout/left_out_total"] for line in lines) == (wrong if complete else 0)
    assert [line["rollout/taken_as_complete_rate"] for line in lines] == [float(complete)] * 2
    folder = Path(config.training.output_dir) / "rollout_records"
    records = read_records(folder)
    assert {record.settings.target.unmatched for record in records} == {"drop" if complete else "mask"}
    assert all(one.differences == () for one in replay_records(folder, config)), "each by its own step's policy"


def softened(folder: Path, soft: float) -> Path:
    """The tiny scenes with every second object soft."""
    lines = [json.loads(line) for line in tiny_scenes().read_text().splitlines()]
    for line in lines:
        line["images"] = [str(tiny_scenes().parent / image) for image in line["images"]]
        for obj in line["objects"][::2]:
            obj["soft"] = soft
    path = folder / f"soft-{soft}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_softness_reaches_the_loss(tmp_path: Path) -> None:
    losses = []
    for soft in (1.0, 0.1):
        config = run_config(tmp_path, 1, f"soft-{soft}", custom__train_jsonl=str(softened(tmp_path, soft)),
                            training__max_steps=1)  # fmt: skip
        losses.append(step_lines(train(config))[0])
    text = next(name for name in losses[0] if name.endswith("token_ce/desc_ce"))
    assert losses[1][text] < losses[0][text]


# -- target.complete_above: if most predictions match, the step's annotations count as complete ------------------------

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


def test_pairs_of_a_box_and_a_polygon_are_counted() -> None:
    cat_as_polygon = GTObject("cat", "poly", (10, 20, 200, 20, 200, 220, 10, 220))
    (mixed,) = outcomes([answer(entry(1, cat_as_polygon), entry(2, LEAF))], None)
    (same,) = outcomes([answer(entry(1), entry(2, LEAF))], None)
    assert (mixed.num_mixed_kind, same.num_mixed_kind) == (1, 0)


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
