"""Records are written while training runs, within bounds, and lost ones are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config.rollout import MonitorDumpConfig
from coordexp.data import read_jsonl
from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig
from coordexp.recording.rollout_record import RolloutRecord, Settings, read_records, replay
from coordexp.recording.writer import RECORDS_FAILED, WRITTEN, RolloutRecorder, is_due
from coordexp.records import Segment
from coordexp.targets import TransportConfig, empty_target
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.rows import blank_row
from support.answers import CAT, DOG, answer, entry, outcome_of, record, request, tiny_vocab
from support.tiny_run import finder, load_tiny, run_config, step_lines, tiny_scenes, train

SETTINGS = Settings(MatchingConfig(), TransportConfig(), "desc_first")


def samples(count: int, start: int = 0) -> list[Sample]:
    records = [record([CAT, DOG], f"sample {start + i}") for i in range(count)]
    return [Sample(image, request(image)) for image in records]


def offer(recorder: RolloutRecorder, global_step: int, *batches: list[Sample], logging_steps: int = 1) -> None:
    one = outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab())
    recorder.offer(global_step, logging_steps, batches, [one for batch in batches for _ in batch])


def recorder_in(folder: Path) -> RolloutRecorder:
    return RolloutRecorder(folder, SETTINGS, MonitorDumpConfig())


def segment_of(sample: Sample, target: Any) -> Segment:
    return Segment(sample.record.sample_id, sample.request.prompt_token_ids, target, {})


def totals(recorder: RolloutRecorder) -> tuple[int, int]:
    counters = recorder.take_counters()
    return counters[WRITTEN], counters[RECORDS_FAILED]


@pytest.mark.parametrize(
    ("every", "logging_steps", "due"),
    [
        (None, 5, [0, 4, 9]),
        (4, 5, [0, 3, 7]),
        (1, 5, list(range(10))),
        (100, 1, [0]),
    ],
)
def test_cadence(every: int | None, logging_steps: int, due: list[int]) -> None:
    config = MonitorDumpConfig(every_steps=every)
    assert [step for step in range(10) if is_due(config, step, logging_steps)] == due


def test_records_of_due_steps_are_written_with_their_place(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path / "new", SETTINGS, MonitorDumpConfig(max_samples=3))
    offer(recorder, 0, samples(2), samples(2, start=2), logging_steps=2)
    offer(recorder, 1, samples(1), logging_steps=3)  # not due
    offer(recorder, 2, samples(1), logging_steps=3)
    found = read_records(tmp_path / "new")
    assert recorder.path.name == "rollouts_rank0.jsonl"
    places = [(r.where.global_step, r.where.micro_step, r.where.sample_idx, r.sample_id) for r in found]
    assert places == [(0, 0, 0, "sample 0"), (0, 0, 1, "sample 1"), (0, 1, 2, "sample 2"), (2, 0, 0, "sample 0")]
    assert [(r.where.num_samples, r.where.rank) for r in found] == [(4, 0), (4, 0), (4, 0), (1, 0)]
    assert totals(recorder) == (4, 0) and totals(recorder) == (0, 0)
    assert all(replay(r, tiny_vocab()) == () for r in found)


def test_a_blank_row_is_not_recorded_as_a_sample(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    (sample,) = samples(1)
    outcome = outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab())
    recorder.offer(0, 1, [[sample]], [outcome])
    eos = len(outcome.target.token_ids) - 1
    recorder.offer_losses(0, blank_row([[sample]]).segments, [()])
    recorder.offer_losses(0, [segment_of(sample, outcome.target)], [((eos, 0.5),)])
    assert [found.token_loss for found in read_records(tmp_path)] == [((eos, 0.5),)]


def test_each_of_two_answers_to_one_sample_gets_its_own_losses(tmp_path: Path) -> None:
    """A sample may be in a step twice (a weight, another rank's padding), or again before a waiting one is trained."""
    recorder = recorder_in(tmp_path)
    (sample,) = samples(1)
    outcomes = [outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab()) for _ in range(3)]
    recorder.offer(0, 1, [[sample], [sample]], outcomes[:2])
    first, second, later = (segment_of(sample, one.target) for one in outcomes)
    recorder.offer_losses(0, [second], [((0, 0.25),)])
    assert not recorder.wants_losses([later]) and recorder.wants_losses([later, first])
    recorder.offer_losses(3, [later, first], [((0, 9.0),), ((0, 0.5),)])
    assert [found.token_loss for found in read_records(tmp_path)] == [((0, 0.5),), ((0, 0.25),)]


def test_a_dropped_answer_does_not_get_losses_of_a_later_one(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    (sample,) = samples(1)
    closed = outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab())
    recorder.offer(0, 1, [[sample]], [replace(closed, target=empty_target(sample.record.sample_id))])
    later = segment_of(sample, closed.target)
    assert not recorder.wants_losses([later])
    recorder.offer_losses(5, [later], [((0, 0.5),)])
    assert [found.token_loss for found in read_records(tmp_path)] == [None]


@pytest.mark.parametrize(
    ("name", "blocked"),
    [
        ("\udcff.png", False),  # a file name that is not UTF-8
        ("a.png", True),  # a folder cannot be appended to
    ],
)
def test_lost_records_are_counted_and_warn_once(
    name: str, blocked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if blocked:
        (tmp_path / "rollouts_rank0.jsonl").mkdir()
    recorder = recorder_in(tmp_path)
    image = record([CAT], image=Path(name))
    answered = [outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab()) for _ in range(3)]
    recorder.offer(0, 1, [[Sample(image, request(image))] * 3], answered)
    trained = [Segment(image.sample_id, (7, 8, 9), one.target, {}) for one in answered]
    recorder.offer_losses(0, trained, [((0, 0.5),)] * 3)  # of records that are counted already
    assert totals(recorder) == (0, 3) and caplog.text.count("was not written") == 1
    assert not recorder.path.is_file()


def test_resuming_appends_after_complete_lines(tmp_path: Path) -> None:
    for step in (0, 1):
        recorder = recorder_in(tmp_path)
        offer(recorder, step, samples(2))
        with recorder.path.open("ab") as file:
            file.write(b'{"killed here' * 20_000)
    recorder = recorder_in(tmp_path)
    offer(recorder, 1, samples(1, start=5))
    assert [(r.where.global_step, r.sample_id) for r in read_records(tmp_path)] == [
        (0, "sample 0"), (0, "sample 1"), (1, "sample 1"), (1, "sample 5"),
    ]  # fmt: skip


def test_records_of_training_can_be_replayed(tmp_path: Path) -> None:
    loaded = load_tiny()
    config = run_config(
        tmp_path, 2, rollout_matching__monitor_dump={"enabled": True, "max_samples": 1},
        training__gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = train(config, finder())
    trainer.close()
    in_file = {one.sample_id: one.objects for one in read_jsonl(tiny_scenes())}
    found = read_records(tmp_path / "run" / "rollout_records")
    assert [(r.where.global_step, r.where.num_samples) for r in found] == [(0, 4), (1, 4)]
    for line in found:
        assert replay(line, loaded.vocab) == ()
        assert line.ground_truth == in_file[line.sample_id] and line.prompt.num_tokens > 10
    assert {"rollout/records_written_total", "rollout/records_failed_total"} <= step_lines(trainer)[-1].keys()
    assert set(found[0].loss_by_role or {}) >= {"MATCHED_COORD", "GT_STRUCT", "GT_COORD", "CLOSE", "EOS"}
    assert dict(found[0].token_loss or ()) == pytest.approx(alone(found[0], trainer), abs=2e-3)


def alone(record: RolloutRecord, trainer: CoordExpTrainer) -> dict[int, float]:
    """The first step's losses by a forward of its own over the sample, with the weights before any training."""
    loaded = load_tiny()
    dataset: Any = trainer.batches.dataset
    places = (i for i in range(len(dataset)) if dataset.record(i).sample_id == record.sample_id)
    request = dataset[next(places)].request
    ids = torch.tensor([[*request.prompt_token_ids, *record.target.token_ids]])
    with torch.no_grad():
        logits = loaded.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == loaded.image_token_id).int(),
            pixel_values=request.model_inputs["pixel_values"],
            image_grid_thw=request.model_inputs["image_grid_thw"],
            use_cache=False,
        ).logits[0, len(request.prompt_token_ids) - 1 : -1].float()  # fmt: skip
    roles = [role for role, count in record.target.roles for _ in range(count)]
    bin_at = dict(zip(record.target.coord_pos, record.target.coord_bin, strict=True))
    coord_ids = list(loaded.vocab.coord_token_ids)
    scored = {"GT_STRUCT", "CLOSE", "EOS"}  # the shipped objective leaves the tail's descriptions out
    losses = {at: -logits[at].log_softmax(-1)[record.target.token_ids[at]].item()
              for at, role in enumerate(roles) if role in scored}  # fmt: skip
    return losses | {at: -logits[at, coord_ids].log_softmax(-1)[round(k)].item() for at, k in bin_at.items()}
