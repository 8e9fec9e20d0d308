"""A run that was killed and resumed is the run that was not; what cannot be resumed exactly is refused."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from coordexp.config import load_config
from coordexp.errors import CheckpointError, DataError
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment
from coordexp.training.checkpoint import (
    MANIFEST,
    RESOLVED_CONFIG,
    check_carry_buffers,
    load_carry_buffer,
    resolve_resume,
    save_carry_buffer,
    segment_from_json,
    segment_to_json,
)
from coordexp.training.trainer import CoordExpTrainer
from tiny_run import gt_segments, load_tiny, run_config, same_weights, step_lines, train, weights

# Rows of 150 tokens for four samples of 24 to 110 each: segments wait in the buffer from the first step on.
WAITING: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 4,
    "training__max_steps": 4,
    "training__save_strategy": "steps",
    "training__save_steps": 2,
    "training__lr_scheduler_type": "linear",
    "rollout_matching__decoding": {"temperature": 1.0},
}


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def kill_at(step: int) -> Any:
    def arm(trainer: CoordExpTrainer) -> None:
        prepare = trainer.window_builder.prepare

        def prepare_or_die(micro_batches: Any, global_step: int) -> Any:
            if global_step == step:
                raise Killed
            return prepare(micro_batches, global_step)

        trainer.window_builder.prepare = prepare_or_die

    return arm


def figures(trainer: CoordExpTrainer) -> list[dict[str, float]]:
    return [{name: v for name, v in line.items() if not name.startswith("time/")} for line in step_lines(trainer)]


def waiting(trainer: CoordExpTrainer) -> list[dict[str, Any]]:
    return [segment_to_json(segment) for segment in trainer.window_builder.buffer.segments]


@pytest.mark.parametrize("stage", [1, 2])
def test_killed_and_resumed_equals_never_killed(stage: int, tmp_path: Path) -> None:
    whole = train(run_config(tmp_path, stage, "whole", **WAITING))
    config = run_config(tmp_path, stage, "killed", training__resume_from_checkpoint=True, **WAITING)
    with pytest.raises(Killed):
        train(config, on_built=kill_at(3))
    saved = json.loads((tmp_path / "killed" / "checkpoint-2" / "carry_buffer_rank0.json").read_text())
    assert len(saved) >= 2, "nothing waited, so the buffer was not tested"
    random.seed(99)  # a new process has another random state
    np.random.seed(99)
    resumed = train(config)
    assert figures(resumed) == figures(whole) and len(figures(whole)) == 4
    assert same_weights(weights(resumed.model), weights(whole.model))
    assert waiting(resumed) == waiting(whole) != []


def test_resume_true_starts_anew_where_there_is_nothing(tmp_path: Path) -> None:
    trainer = train(run_config(tmp_path, 1, training__resume_from_checkpoint=True))
    assert [line["step"] for line in step_lines(trainer)] == [1, 2]


def test_a_finished_run_resumed_does_nothing_more(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 2, "training__resume_from_checkpoint": True}
    first = train(run_config(tmp_path, 1, **keys))
    again = train(run_config(tmp_path, 1, **keys))
    assert again.state.global_step == 2  # transformers alone would take a third step, and a fourth the next time
    assert same_weights(weights(first.model), weights(again.model))
    assert figures(again) == figures(first)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_resuming_another_model_is_refused(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 2, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, **keys))
    weights_file = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    state = load_file(weights_file)
    state.pop("model.language_model.norm.weight")
    save_file(state, weights_file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing \['model\.language_model\.norm\.weight'\]"):
        train(run_config(tmp_path, 1, **keys))


def test_a_tied_language_head_is_no_cause_for_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 1, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, training__max_steps=1, **keys))
    with caplog.at_level(logging.WARNING):
        resumed = train(run_config(tmp_path, 1, **keys))
    assert "missing keys" not in caplog.text
    assert resumed.model.lm_head.weight is resumed.model.get_input_embeddings().weight


def test_the_buffer_is_on_disk_before_the_checkpoint_counts_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the model is being saved: the buffer is there, the older checkpoint serves."""
    saves: list[str] = []
    save_model = CoordExpTrainer.save_model

    def save_or_die(self: CoordExpTrainer, output_dir: str | None = None, _internal_call: bool = False) -> None:
        saves.append(Path(str(output_dir)).name)
        if len(saves) == 2:
            raise Killed
        save_model(self, output_dir, _internal_call)

    monkeypatch.setattr(CoordExpTrainer, "save_model", save_or_die)
    keys = WAITING | {"training__save_steps": 1, "training__max_steps": 3}
    with pytest.raises(Killed):
        train(run_config(tmp_path, 1, **keys))
    assert saves == ["checkpoint-1", "checkpoint-2"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint-2").iterdir()) == ["carry_buffer_rank0.json"]
    assert resolve_resume(tmp_path / "run", True) == tmp_path / "run" / "checkpoint-1"


def checkpoint(folder: Path, step: int, state: str | None = "{}") -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return path


@pytest.mark.parametrize("unfinished", [None, "", '{"global_step": 1'])
def test_unfinished_checkpoints_are_passed_over_and_named(
    unfinished: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 8)
    good = checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10, unfinished)
    (tmp_path / "checkpoint-last").mkdir()
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        assert resolve_resume(tmp_path, True) == good
    assert "checkpoint-10 is unfinished" in caplog.text


@pytest.mark.parametrize("resume", [None, False])
def test_without_the_key_a_run_starts_anew(resume: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    assert resolve_resume(tmp_path, resume) is None


def test_a_named_checkpoint_must_be_whole(tmp_path: Path) -> None:
    good, bad = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2, None)
    assert resolve_resume("elsewhere", str(good)) == good
    for folder in (bad, tmp_path / "checkpoint-3"):
        with pytest.raises(CheckpointError, match=r"training\.resume_from_checkpoint: .*trainer_state\.json"):
            resolve_resume("elsewhere", str(folder))


def test_a_named_checkpoint_that_is_none_stops_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordexp.modeling.load._read_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError):
        train(run_config(tmp_path, 1, training__resume_from_checkpoint=str(tmp_path / "checkpoint-5")))


@pytest.fixture(scope="module")
def segments() -> list[Segment]:
    return gt_segments(load_tiny(), 4)


def requests_of(segments: list[Segment]) -> Any:
    by_id = {s.sample_id: RolloutRequest(s.sample_id, Path(), (), s.prompt_token_ids, s.model_inputs) for s in segments}
    return by_id.__getitem__


def test_a_segment_survives_json_to_the_bit(segments: list[Segment]) -> None:
    for segment in segments:
        again = segment_from_json(json.loads(json.dumps(segment_to_json(segment))), requests_of(segments))
        assert segment_to_json(again) == segment_to_json(segment)
        assert again.model_inputs is segment.model_inputs
        for name in ("roles_T", "coord_pos_K", "coord_bin_K", "box_pos_M4", "box_bin_M4"):
            before, after = getattr(segment.target, name), getattr(again.target, name)
            assert (after.dtype, after.shape) == (before.dtype, before.shape) and np.array_equal(after, before)


def test_fractional_targets_survive_json(segments: list[Segment]) -> None:
    data = segment_to_json(segments[0])
    data["target"]["coord_bin_K"] = [1 / 3 + index for index in range(len(data["target"]["coord_bin_K"]))]
    again = segment_from_json(json.loads(json.dumps(data)), requests_of(segments))
    assert again.target.coord_bin_K.tolist() == data["target"]["coord_bin_K"]


def test_a_buffer_comes_back_oldest_first(segments: list[Segment], tmp_path: Path) -> None:
    buffer = CarryBuffer(200, 10)
    buffer.insert(*segments)
    save_carry_buffer(buffer, tmp_path / "checkpoint-1")
    again = CarryBuffer(200, 10)
    load_carry_buffer(again, tmp_path / "checkpoint-1", requests_of(segments))
    assert [s.sample_id for s in again.segments] == [s.sample_id for s in segments]


def test_a_missing_buffer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"carry_buffer_rank0\.json: missing.*number of processes"):
        load_carry_buffer(CarryBuffer(10, 1), checkpoint(tmp_path, 1), lambda _: pytest.fail("nothing to encode"))


def test_a_run_without_its_buffer_is_not_resumed(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 2, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, **keys))
    os.unlink(tmp_path / "run" / "checkpoint-2" / "carry_buffer_rank0.json")
    with pytest.raises(CheckpointError, match="missing"):
        train(run_config(tmp_path, 1, **keys))


@pytest.mark.parametrize("content", ["", "[{]", '[{"sample_id": "x"}]', "[3]"])
def test_a_damaged_buffer_is_an_error(content: str, segments: list[Segment], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    (folder / "carry_buffer_rank0.json").write_text(content)
    with pytest.raises(CheckpointError, match="not a carry buffer"):
        load_carry_buffer(CarryBuffer(200, 10), folder, requests_of(segments))


def test_a_prompt_that_changed_is_an_error(segments: list[Segment]) -> None:
    data = segment_to_json(segments[0]) | {"prompt_token_ids": [1, 2, 3]}
    with pytest.raises(CheckpointError, match="prompt changed"):
        segment_from_json(data, requests_of(segments))


def test_a_waiting_sample_that_left_the_dataset_is_an_error(tmp_path: Path) -> None:
    keys = WAITING | {"training__max_steps": 2, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, **keys))
    saved = json.loads((tmp_path / "run" / "checkpoint-2" / "carry_buffer_rank0.json").read_text())
    first = min(int(data["sample_id"].rpartition(":")[2]) for data in saved)
    with pytest.raises(DataError, match="carry buffer holds sample"):
        train(run_config(tmp_path, 1, **keys | {"custom__train_sample_limit": max(1, first - 1)}))


@pytest.mark.parametrize(
    ("written", "packing", "world_size", "says"),
    [(1, True, 1, None), (2, True, 2, None), (0, True, 1, None), (1, True, 2, None),  # missing ones: see above
     (0, False, 1, None),
     (2, True, 1, "written by 2 processes, resumed by 1"),
     (1, False, 1, "training.packing is false")],
)  # fmt: skip
def test_waiting_segments_are_never_left_behind(
    written: int, packing: bool, world_size: int, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    folder = checkpoint(tmp_path, 1)
    for rank in range(written):
        (folder / f"carry_buffer_rank{rank}.json").write_text("[]")
    if says is None:
        check_carry_buffers(folder, packing)
    else:
        with pytest.raises(CheckpointError, match=says):
            check_carry_buffers(folder, packing)


def test_the_manifest_says_what_made_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, 2, training__seed=13)
    train(config)
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert manifest["seed"] == 13 and manifest["world_size"] == 1
    assert set(manifest["packages"]) >= {"torch", "transformers", "accelerate"} and all(manifest["packages"].values())
    assert {"created_at", "command", "python", "platform", "coordexp", "git", "schema_version"} <= manifest.keys()
    if manifest["git"] is not None:  # None where the tests run from an unpacked archive
        assert len(manifest["git"]["commit"]) == 40
    resolved = load_config(tmp_path / "run" / RESOLVED_CONFIG)
    assert resolved == config


def test_the_manifest_is_there_when_the_first_step_fails(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(run_config(tmp_path, 1), on_built=kill_at(0))
    assert (tmp_path / "run" / MANIFEST).is_file()


def test_checkpoints_can_be_moved(tmp_path: Path) -> None:
    """Resume names a folder anywhere; nothing inside points back to where it was written."""
    keys = WAITING | {"training__max_steps": 4}
    whole = train(run_config(tmp_path, 1, "whole", **keys))
    moved = Path(shutil.move(tmp_path / "whole" / "checkpoint-2", tmp_path / "elsewhere"))
    resumed = train(run_config(tmp_path, 1, "other", **keys, training__resume_from_checkpoint=str(moved)))
    assert same_weights(weights(resumed.model), weights(whole.model))
