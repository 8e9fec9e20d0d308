"""The first, short runs: their log, why F1 is 0, and the answers that are kept."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from coordexp.checkpoints.run_folder import LAST_EVALUATION
from coordexp.data.dataset_check import check_jsonl
from coordexp.data.jsonl import write_jsonl
from coordexp.errors import DataError
from coordexp.evaluation.answers import read_answers
from coordexp.records import GTObject, ImageRecord
from coordexp.training.progress import RichProgress
from coordexp.training.run import check_run
from coordexp.viewer.collect import collect
from support.answers import CAT, answer, entry
from support.tiny_run import InMemoryBackend, load_tiny, run_config, step_lines, train


@pytest.mark.parametrize(("every", "logged"), [(10, [3]), (2, [2, 3])])
def test_the_last_interval_is_logged_also_if_it_is_incomplete(every: int, logged: list[int], tmp_path: Path) -> None:
    steps = 3
    trainer = train(run_config(tmp_path, 1, training__max_steps=steps, training__logging_steps=every))
    lines = step_lines(trainer)
    assert [line["step"] for line in lines] == logged
    assert all(line["loss"] > 0 and line["time/learner_s"] > 0 for line in lines)
    assert sum(line["train/samples_total"] for line in lines) == trainer.args.train_batch_size * steps
    (end,) = [line for line in trainer.state.log_history if "train_loss" in line]
    covered = [step - before for before, step in pairwise([0, *logged])]
    assert end["train_loss"] == pytest.approx(
        sum(line["loss"] * count for line, count in zip(lines, covered, strict=True)) / steps
    )


def test_samples_per_second_count_what_a_short_epoch_has(tmp_path: Path) -> None:
    """Twelve images, sixteen samples a step: every step is an epoch of twelve."""
    keys = {"training__per_device_train_batch_size": 8, "training__gradient_accumulation_steps": 2}
    trainer = train(run_config(tmp_path, 1, **keys))
    (end,) = [line for line in trainer.state.log_history if "train_loss" in line]
    assert end["train_samples_per_second"] * end["train_runtime"] == pytest.approx(24)


@pytest.mark.parametrize("key", ["train_jsonl", "val_jsonl"])
def test_shares_that_were_read_as_pixels_are_refused_as_data_check_does(key: str, tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    shares = GTObject("crack", "bbox_2d", (0, 0, 1, 2))
    write_jsonl([ImageRecord("d:1", tmp_path / "a.png", 640, 480, (shares,))], tmp_path / "d.jsonl")
    assert check_jsonl(tmp_path / "d.jsonl").errors == 1
    with pytest.raises(DataError, match=rf"custom.{key}: .*d.jsonl: all 1 objects are within the first pixel"):
        check_run(run_config(tmp_path, 1, **{f"custom__{key}": str(tmp_path / "d.jsonl")}))


def test_a_run_names_classes_of_validation_that_no_training_annotation_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    for file, name in (("train", "cat"), ("val", "Cat")):
        one = ImageRecord("d:1", tmp_path / "a.png", 64, 64, (GTObject(name, "bbox_2d", (0, 0, 500, 500)),))
        write_jsonl([one], tmp_path / f"{file}.jsonl")
    keys = {f"custom__{file}_jsonl": str(tmp_path / f"{file}.jsonl") for file in ("train", "val")}
    check_run(run_config(tmp_path, 1, **keys))
    assert "val.jsonl: 1 of 1 class names are in no training annotation: 'Cat' (training has 'cat')" in caplog.text
    caplog.clear()
    check_run(run_config(tmp_path, 1, **keys | {"custom__val_jsonl": keys["custom__train_jsonl"]}))
    assert "in no training annotation" not in caplog.text


@pytest.mark.parametrize(("batch", "notes"), [(1, []), (2, ["2 of 4 samples were not trained on"])])
def test_a_run_says_how_many_samples_it_left_untrained(batch: int, notes: list[str], tmp_path: Path) -> None:
    """A row has room for one sample, so of each micro-step of two, one waits for a later row."""
    said: list[str] = []

    def listen(trainer: Any) -> None:
        trainer.on_note = said.append

    keys = {"training__packing": True, "training__per_device_train_batch_size": batch, "global_max_length": 80}
    trainer = train(run_config(tmp_path, 1, **keys), on_built=listen)
    assert [note.partition(":")[0] for note in said] == notes
    read = sum(line["train/samples_total"] for line in step_lines(trainer))
    trained = sum(line["packing/segments_total"] for line in step_lines(trainer))
    assert (read, trained) == (2 * batch, 2)


def test_an_evaluation_says_which_names_are_annotated_nowhere_and_keeps_its_answers(tmp_path: Path) -> None:
    notes: list[str] = []

    def listen(trainer: Any) -> None:
        trainer.on_note = notes.append

    backend = InMemoryBackend(load_tiny().vocab, lambda _: answer(entry(1, CAT), entry(2, CAT)))
    keys = {"training__eval_strategy": "steps", "training__eval_steps": 1, "training__max_steps": 1}
    trainer = train(run_config(tmp_path, 1, **keys), backend, listen)
    (note,) = notes
    assert note.startswith("10 predictions have names that are annotated nowhere: 'black cat' (10); F1 counts them")
    folder = Path(str(trainer.args.output_dir))
    answers = read_answers(folder / LAST_EVALUATION)
    assert len(answers) == 5 and {obj.desc for one in answers for obj in one.pred} == {"black cat"}
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": trainer.state.log_history}))
    shown = collect(folder)
    assert len(shown.records) == 5 and "answers of the last evaluation while the run trained" in shown.notes[0]


def test_the_time_left_after_an_evaluation_follows_from_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 1 s, an evaluation of 100 s, then steps of 1 s again: 5 s are left after 15 of 20 steps."""
    now = [0.0]
    monkeypatch.setattr("coordexp.data.progress_bar.time.monotonic", lambda: now[0])
    monkeypatch.setattr("coordexp.data.progress_bar.LINE_EVERY_S", 0.5)
    file = io.StringIO()
    progress = RichProgress(Console(file=file, width=200), "run")
    state: Any = SimpleNamespace(global_step=0, max_steps=20, is_world_process_zero=True, best_model_checkpoint=None)
    nothing: Any = None

    def steps(count: int) -> Iterator[int]:
        for _ in range(count):
            now[0] += 1
            state.global_step += 1
            progress.on_step_end(nothing, state, SimpleNamespace(should_log=False))
            yield state.global_step

    progress.on_train_begin(nothing, state, nothing)
    list(steps(10))
    for done in range(101):
        progress.answered(done, 100)
        now[0] += 1
    progress.on_evaluate(nothing, state, nothing, metrics={"eval_rollout/f1": 0.0})
    list(steps(5))
    assert file.getvalue().splitlines()[-1].startswith("run: step 15/20, eta 5 s")
    assert "evaluation, 50/100 images, eta 50 s" in file.getvalue()
