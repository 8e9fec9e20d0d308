"""TensorBoard's pictures and histograms, read back from the event file that training wrote."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coordexp.data import read_jsonl
from coordexp.matching import match_objects
from coordexp.recording import writer
from coordexp.recording.writer import FOUND, MATCHED, MAX_PICTURES, MISSED, SIDE, RolloutPictures, draw_rollout
from coordexp.training.checked_run import check_run
from coordexp.training.run import build_trainer
from support.answers import CAT, DOG, answer, entry, outcome_of, record, tiny_vocab
from support.tiny_run import finder, run_config, tiny_scenes, train


def events(folder: Path) -> EventAccumulator:
    (file,) = folder.rglob("events.out.tfevents.*")
    return EventAccumulator(str(file), size_guidance={"images": 0, "histograms": 0}).Reload()


def test_recorded_rollouts_are_drawn(tmp_path: Path) -> None:
    config = run_config(
        tmp_path, 2, rollout_matching__monitor_dump={"enabled": True, "every_steps": 2, "max_samples": 2},
        training__report_to=["tensorboard"], training__gradient_accumulation_steps=2,
    )  # fmt: skip
    train(config, finder()).close()
    found = events(tmp_path / "run")
    assert found.Tags()["images"] == ["rollouts/sample_0", "rollouts/sample_1"]
    first, picture = found.Images("rollouts/sample_0")
    assert (first.step, picture.step) == (1, 2)
    pixels = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)).convert("RGB"))
    drawn = [np.asarray(Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string)).convert("RGB"))
             for tag in found.Tags()["images"]]  # fmt: skip
    matched = tuple(bytes.fromhex(MATCHED[1:]))
    assert max(pixels.shape[:2]) == SIDE  # small images are enlarged, so that labels fit
    assert any((one == matched).all(axis=-1).any() for one in drawn)
    _, lengths = found.Histograms("rollouts/answer_tokens")
    assert lengths.histogram_value.num == 4 and lengths.histogram_value.max > 1
    assert set(found.Tags()["histograms"]) == {
        "rollouts/answer_tokens", "rollouts/objects_per_answer", "rollouts/missed_per_image"
    }  # fmt: skip


def test_a_picture_shows_the_objects_in_the_order_that_was_matched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the samples of a coming epoch, in another order, were read before it is drawn."""
    drawn: list[Any] = []
    config = run_config(
        tmp_path, 2, training__max_steps=3, training__report_to=["tensorboard"], custom__object_ordering="random",
        rollout_matching__monitor_dump={"enabled": True, "every_steps": 1, "max_samples": 2},
    )  # fmt: skip

    def on_built(trainer) -> None:
        dataset, notify = trainer.batches.dataset, trainer.step.notify

        def look_ahead_and_notify(event):
            dataset.set_epoch(trainer.state.global_step + 5)
            notify(event)

        trainer.step.notify = look_ahead_and_notify

    monkeypatch.setattr(writer, "draw_rollout", lambda *both: drawn.append(both) or draw_rollout(*both))
    train(config, finder(), on_built).close()
    assert len(drawn) == 6
    assert all(match_objects(outcome.parsed.objects, one.objects) == outcome.match for one, outcome in drawn)
    in_file = {one.sample_id: one.objects for one in read_jsonl(tiny_scenes())}
    assert any(one.objects != in_file[one.sample_id] for one, _ in drawn), "some are in another order"


def test_matched_and_missed_objects_have_their_colours(tmp_path: Path) -> None:
    Image.new("RGB", (64, 48), "gray").save(tmp_path / "a.png")
    image = replace(record([CAT, DOG]), image=tmp_path / "a.png", width=64, height=48)
    outcome = outcome_of(answer(entry(1)), [CAT, DOG], tiny_vocab())  # the cat, and no dog
    assert outcome.match.fn_gt_idx == (1,)
    pixels = draw_rollout(image, outcome)
    assert pixels.shape == (288, 384, 3)

    def columns(colour: str) -> np.ndarray:
        return np.flatnonzero((pixels == tuple(bytes.fromhex(colour[1:]))).all(axis=-1).any(axis=0))

    missed_from = DOG.bins[0] / 999 * 383
    assert columns(MATCHED).size and columns(MISSED).min() == pytest.approx(missed_from, abs=2)
    assert columns(FOUND).size == 0  # the prediction, equal to the truth, is drawn over it


@pytest.mark.parametrize(
    ("keys", "has_board"),
    [
        ({"training__report_to": "none", "rollout_matching__monitor_dump": {"enabled": True}}, True),
        ({"training__report_to": ["tensorboard"]}, False),  # nothing is recorded, so nothing is drawn
    ],
)
def test_nothing_is_drawn_by_default(tmp_path: Path, keys: dict, has_board: bool) -> None:
    trainer, _ = build_trainer(check_run(run_config(tmp_path, 2, **keys)), Console(quiet=True))
    boards = [one for one in trainer.callback_handler.callbacks if isinstance(one, RolloutPictures)]
    assert bool(boards) == has_board
    assert all(board._writer() is None for board in boards)
    assert MAX_PICTURES == 4
    trainer.close()
