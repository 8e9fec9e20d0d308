"""Rewritten answers and soft objects in whole runs: both trainers, records that replay, a buffer that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordexp.coords import TURN_END, serialize_objects
from coordexp.inference.replay import replay_records
from coordexp.recording.rollout_record import read_records
from coordexp.records import GTObject
from support.tiny_run import (
    InMemoryBackend,
    load_tiny,
    nearly_right,
    run_config,
    same_weights,
    step_lines,
    tiny_checkpoint,
    tiny_samples,
    tiny_scenes,
    train,
    weights,
)

RECORDED = {"enabled": True, "min_free_gb": 0.0, "every_steps": 1}


def finder() -> InMemoryBackend:
    loaded = load_tiny()
    truth = {sample.record.image: sample.record.objects for sample in tiny_samples(loaded)}
    return InMemoryBackend(loaded.vocab, lambda request: nearly_right(truth[request.image]))


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
    assert {"REWRITTEN_STRUCT", "REWRITTEN_DESC", "PREFIX_COORD"} <= roles and "PREFIX_STRUCT" not in roles
    replayed = list(replay_records(folder, config, model=tiny_checkpoint(), limit=2))
    assert [one.differences for one in replayed] == [(), ()]
    # Descriptions of matched objects are taught (those of missed ones have no weight in this configuration).
    assert sum((one.losses or {})["loss/token_ce/desc_ce"] for one in replayed) > 0


def test_rewritten_answers_change_training(tmp_path: Path) -> None:
    """The key reaches the target: without it the same answers train other weights."""
    ends = []
    for answer in ("as_written", "rewritten"):
        config = run_config(tmp_path, 2, answer, rollout_matching__target={"answer": answer})
        ends.append(weights(train(config, finder()).model))
    assert not same_weights(*ends)


def inventor() -> InMemoryBackend:
    """Finds everything, and one object that is not annotated."""
    loaded = load_tiny()
    truth = {sample.record.image: sample.record.objects for sample in tiny_samples(loaded)}
    more = GTObject("red circle", "bbox_2d", (990, 990, 999, 999))
    return InMemoryBackend(loaded.vocab, lambda request: serialize_objects([*truth[request.image], more]) + TURN_END)


def of_one_object(folder: Path) -> Path:
    """The tiny scenes with their first annotation alone."""
    path = folder / "one-object.jsonl"
    lines = [json.loads(line) for line in tiny_scenes().read_text().splitlines()]
    for line in lines:
        line["images"] = [str(tiny_scenes().parent / image) for image in line["images"]]
        line["objects"] = line["objects"][:1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


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


@pytest.mark.parametrize("stage", [1, 2])
def test_a_resumed_run_with_soft_objects_equals_an_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    data = softened(tmp_path, 0.5)
    common = {
        "custom__train_jsonl": str(data), "training__max_steps": 4, "training__per_device_train_batch_size": 3,
        "global_max_length": 160, "training__packing_buffer": 64,
    }  # fmt: skip
    target = {} if stage == 1 else {"rollout_matching__target": {"answer": "rewritten"}}
    backend = None if stage == 1 else InMemoryBackend(load_tiny().vocab, lambda request: "")
    whole = train(run_config(tmp_path, stage, "whole", **common, **target), backend)
    saving = {**common, "training__save_strategy": "steps", "training__save_steps": 2}
    first = run_config(tmp_path, stage, "broken", **saving, **target)
    train(first, backend)
    buffers = json.loads((tmp_path / "broken" / "checkpoint-2" / "carry_buffer_rank0.json").read_text())
    assert any(0.5 in segment["target"]["weights"]["struct_ce"] for segment in buffers), (
        "no soft segment waits: the test shows nothing"
    )
    (tmp_path / "broken" / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    resumed = train(
        run_config(tmp_path, stage, "broken", training__resume_from_checkpoint=True, **saving, **target), backend
    )
    assert same_weights(weights(whole.model), weights(resumed.model))


def test_softness_reaches_the_loss(tmp_path: Path) -> None:
    losses = []
    for soft in (1.0, 0.1):
        config = run_config(tmp_path, 1, f"soft-{soft}", custom__train_jsonl=str(softened(tmp_path, soft)),
                            training__max_steps=1)  # fmt: skip
        losses.append(step_lines(train(config))[0])
    text = next(name for name in losses[0] if name.endswith("token_ce/desc_ce"))
    assert losses[1][text] < losses[0][text]
