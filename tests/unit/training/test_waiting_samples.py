"""Samples that wait for a packed row over a resume: their images are not in the checkpoint, but read again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordexp.errors import CheckpointError
from coordexp.records import RolloutRequest, Segment
from coordexp.training.checked_run import check_run
from coordexp.training.run import build_trainer
from coordexp.training.saving import segment_from_json, segment_to_json
from support.tiny_run import gt_segments, load_tiny, run_config, tiny_scenes, train


@pytest.fixture(scope="module")
def segments() -> list[Segment]:
    return gt_segments(load_tiny(), 4)


@pytest.mark.parametrize(("shown", "says"), [(0, None), (3, "its image changed since the checkpoint was written")])
def test_another_image_of_the_same_size_is_an_error(shown: int, says: str | None, segments: list[Segment]) -> None:
    """Its prompt is the same. A library that resizes by one grey level differently is no error."""
    waiting, other = segments[0], segments[shown]
    assert other.prompt_token_ids == waiting.prompt_token_ids
    inputs = {**other.model_inputs, "pixel_values": other.model_inputs["pixel_values"].clamp(max=254) + 1}
    request = RolloutRequest(waiting.sample_id, Path(), (), waiting.prompt_token_ids, inputs)
    saved = segment_to_json(waiting)
    if says is not None:
        with pytest.raises(CheckpointError, match=says):
            segment_from_json(saved, lambda _: request)
        del saved["shades"]  # by an earlier version
    assert segment_from_json(saved, lambda _: request).model_inputs is inputs


def test_samples_of_a_file_with_another_name_still_wait(tmp_path: Path) -> None:
    """Data that moved may do so: its content is compared."""
    folder = shutil.copytree(tiny_scenes().parent, tmp_path / "scenes")
    keys: dict[str, Any] = {
        "global_max_length": 150, "training__per_device_train_batch_size": 4, "training__save_strategy": "steps",
        "training__save_steps": 2,
    }  # fmt: skip
    before = train(run_config(tmp_path, 1, **keys, custom__train_jsonl=str(folder / "scenes.jsonl")))
    (folder / "scenes.jsonl").rename(folder / "renamed.jsonl")
    keys |= {"custom__train_jsonl": str(folder / "renamed.jsonl"), "training__max_steps": 4}
    config = run_config(tmp_path, 1, **keys, training__resume_from_checkpoint=True)
    resumed, _ = build_trainer(check_run(config), Console(quiet=True))
    found, waited = (
        [segment_to_json(segment) for segment in trainer.run.buffer.segments] for trainer in (resumed, before)
    )
    assert found == waited != []
