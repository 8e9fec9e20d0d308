"""A killed and resumed run equals an uninterrupted one; a run that cannot be resumed exactly is refused."""

from __future__ import annotations

import io
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from coordexp.checkpoints.folder import RESOLVED_CONFIG
from coordexp.checkpoints.run_folder import MANIFEST
from coordexp.config import load_config
from coordexp.config.resume import changes
from coordexp.config.schema import TrainingConfig
from coordexp.data import dataset_cache
from coordexp.data.files import VARIABLE
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.errors import CheckpointError, ConfigError, DataError
from coordexp.packing import CarryBuffer
from coordexp.records import RolloutRequest, Segment
from coordexp.runs.start import decide_start
from coordexp.training import saving
from coordexp.training.checked_run import check_run
from coordexp.training.checkpoint import (
    SEAL,
    check_resume,
    delete_old,
    readable,
    resolve_resume,
    seal_checkpoint,
    warn_of_checkpoints_ahead,
)
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.run import build_trainer
from coordexp.training.saving import load_carry_buffer, segment_from_json, segment_to_json
from support.tiny_run import (
    Killed,
    figures,
    gt_segments,
    kill_at,
    load_tiny,
    run_config,
    same_weights,
    tiny_scenes,
    train,
    weights,
)

ROOT = Path(__file__).parents[3]
# Rows of 150 tokens for four samples of 24 to 110 each: segments wait in the buffer from the first step on.
WAITING: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 4,
    "training__max_steps": 6,
    "training__save_strategy": "steps",
    "training__save_steps": 2,
    "training__lr_scheduler_type": "linear",
    "rollout_matching__decoding": {"temperature": 1.0},
}


def waiting(trainer: CoordExpTrainer) -> list[dict[str, Any]]:
    return [segment_to_json(segment) for segment in trainer.run.buffer.segments]


@pytest.mark.parametrize("stage", [1, 2, "two_channel"])
def test_resumed_run_equals_uninterrupted_run(stage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint falls between two log lines, and a step has two micro-steps."""
    keys = WAITING | {"training__logging_steps": 3, "training__gradient_accumulation_steps": 2}
    whole = train(run_config(tmp_path, stage, "whole", **keys))
    config = run_config(tmp_path, stage, "killed", training__resume_from_checkpoint=True, **keys)
    with pytest.raises(Killed):
        train(config, on_built=kill_at(5))
    saved = json.loads((tmp_path / "killed" / "checkpoint-4" / "carry_buffer_rank0.json").read_text())
    assert len(saved) >= 2, "no segment waited, so the buffer was not tested"
    random.seed(99)  # a new process has another random state
    np.random.seed(99)
    with caplog.at_level(logging.WARNING):
        resumed = train(config)
    assert "missing keys" not in caplog.text, "a tied language head is stored once"
    assert resumed.model.lm_head.weight is resumed.model.get_input_embeddings().weight
    assert figures(resumed) == figures(whole) and len(figures(whole)) == 2
    assert same_weights(weights(resumed.model), weights(whole.model))
    assert waiting(resumed) == waiting(whole) != []
    mean, uninterrupted = (one.state.log_history[-1]["train_loss"] for one in (resumed, whole))
    assert mean == uninterrupted, "of the whole run, not of its end alone"


def test_a_resumed_run_on_cached_and_weighted_files_equals_an_uninterrupted_one_on_plain_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name, fractional weights, repeats of a rare class, views: killed within the second epoch. What
    is killed and resumed reads cached records in another process."""
    new, old = tmp_path / "new" / "train.jsonl", tmp_path / "old" / "train.jsonl"
    scenes = read_jsonl(tiny_scenes())
    write_jsonl(scenes[:4], new)
    write_jsonl(scenes[4:], old)
    keys = WAITING | {
        "custom__train_jsonl": [{"path": str(new), "weight": 2}, {"path": str(old), "weight": 0.5}],
        "custom__object_ordering": "random",
        "data__repeat_threshold": 0.4,
        "data__augment": {"horizontal_flip": 0.5, "scale": [0.6, 3.0], "colour": 0.3},
        "training__logging_steps": 1,
    }
    whole = train(run_config(tmp_path, 1, "whole", **keys))
    assert whole.batches.samples_per_epoch > 4 * 2 + 8 / 2, "no class was rare enough"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 0)
    config = run_config(tmp_path, 1, "killed", training__resume_from_checkpoint=True, data__num_workers=1, **keys)
    with pytest.raises(Killed):
        train(config, on_built=kill_at(5))
    resumed = train(config)
    assert list((tmp_path / "cache").rglob("*.arrow"))
    assert figures(resumed) == figures(whole)
    assert waiting(resumed) == waiting(whole) != []
    assert same_weights(weights(resumed.model), weights(whole.model))
    assert sum(line["train/augment_left_out_total"] for line in figures(whole)) > 0
    assert {one["sample_id"].split(":")[0] for one in waiting(whole)} <= {"new/train.jsonl", "old/train.jsonl"}


def test_other_weights_are_another_run(tmp_path: Path) -> None:
    files = [{"path": str(tiny_scenes()), "weight": 2}]
    keys = {"training__save_strategy": "steps", "training__save_steps": 1, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, **keys, training__max_steps=1, custom__train_jsonl=files))
    files[0]["weight"] = 3
    with pytest.raises(ConfigError, match=r"custom\.train_jsonl: .*weight: 2\.0.*weight: 3\.0.*: other weights"):
        train(run_config(tmp_path, 1, **keys, training__max_steps=2, custom__train_jsonl=files))
    with pytest.raises(ConfigError, match=r"data\.repeat_threshold: null in the checkpoint, 0\.9 now"):
        train(run_config(tmp_path, 1, **keys, training__max_steps=2, data__repeat_threshold=0.9))


def test_the_log_of_a_run_says_what_an_epoch_has(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, custom__train_jsonl=[{"path": str(tiny_scenes()), "weight": 1.5}])
    console = Console(file=io.StringIO(), width=200)
    trainer, _ = build_trainer(check_run(config), console)
    assert trainer.batches.samples_per_epoch == 18
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "an epoch has 18 samples of 12 records\n  scenes.jsonl: 12 records, weight 1.5: 18 samples\n" in said


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
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
    seal(tmp_path / "run" / "checkpoint-2", 2)
    with pytest.raises(CheckpointError, match=r"1 weights are missing \['model\.language_model\.norm\.weight'\]"):
        train(run_config(tmp_path, 1, **keys))


@pytest.mark.parametrize("name", ["save_model", "random_states", "seal_checkpoint"])
def test_a_run_killed_while_saving_resumes_from_the_older_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only one is kept: the older is deleted after the newer is complete."""
    act, calls = getattr(saving, name), iter(range(10))

    def act_or_die(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise Killed
        return act(*arguments, **options)

    monkeypatch.setattr(saving, name, act_or_die)
    keys = WAITING | {"training__save_steps": 1, "training__max_steps": 3, "training__save_total_limit": 1}
    with pytest.raises(Killed):
        train(run_config(tmp_path, 1, **keys))
    second = tmp_path / "run" / "checkpoint-2"
    assert (second / "carry_buffer_rank0.json").is_file() and not (second / SEAL).exists()
    assert resolve_resume(tmp_path / "run", True) == tmp_path / "run" / "checkpoint-1"
    monkeypatch.undo()
    train(run_config(tmp_path, 1, **keys, training__resume_from_checkpoint=True))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]


def seal(folder: Path, step: int) -> None:
    seal_checkpoint(folder, step, resumable=True, writes=True)


def checkpoint(folder: Path, step: int, *, sealed: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "shards").mkdir(parents=True)
    for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", "shards/0.distcp"):
        (path / name).write_text("{}")
    if sealed:
        seal(path, step)
    return path


DAMAGES = [
    (SEAL, None, "is unfinished: it has no complete.json"),
    (SEAL, "", "has an unreadable complete.json"),
    (SEAL, '{"step": 1}', "has an unreadable complete.json"),
    ("rng_state_1.pth", None, "is damaged: rng_state_1.pth is missing"),
    ("shards/0.distcp", None, "is damaged: shards/0.distcp is missing"),
    ("trainer_state.json", "", "is damaged: trainer_state.json has 0 bytes of 2"),
]


@pytest.mark.parametrize(("name", "content", "says"), DAMAGES, ids=[says for *_, says in DAMAGES])
def test_an_incomplete_checkpoint_is_skipped_and_refused_by_name(
    name: str, content: str | None, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path, 8)
    good, bad = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    assert resolve_resume("elsewhere", str(bad)) == bad
    if content is None:
        (bad / name).unlink()
    else:
        (bad / name).write_text(content)
    (tmp_path / "checkpoint-last").mkdir()
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        assert resolve_resume(tmp_path, True) == good
    assert f"checkpoint-10 {says}" in caplog.text and "skipping it" in caplog.text
    with pytest.raises(CheckpointError, match=rf"resume_from_checkpoint: .*checkpoint-10 {says}.*name {good}"):
        resolve_resume("elsewhere", str(bad))


def test_a_process_that_is_gone_is_not_a_damaged_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of FSDP read a checkpoint together."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="reset by peer"), readable(Path("checkpoint-1"), "model.safetensors"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5535: Connection reset by peer")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_alone_reads_the_whole_checkpoint(rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier job of two processes left its variables."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for step, name in ((1, "rng_state_0.pth"), (2, "rng_state_1.pth"), (3, "trainer_state.json")):
        (checkpoint(tmp_path, step) / name).write_text("[]")
        with pytest.raises(CheckpointError, match=f"is damaged: {name} is not what was saved"):
            resolve_resume("elsewhere", str(tmp_path / f"checkpoint-{step}"))


@pytest.mark.parametrize(("resume", "sealed"), [(True, False), (False, True), (None, True)])
def test_without_the_key_or_a_complete_checkpoint_a_run_starts_from_the_beginning(
    resume: bool | None, sealed: bool, tmp_path: Path
) -> None:
    checkpoint(tmp_path, 5, sealed=sealed)
    assert resolve_resume(tmp_path, resume) is None


def test_model_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 2, "training__save_only_model": True}
    train(run_config(tmp_path, 1, **keys))
    with pytest.raises(CheckpointError, match=r"checkpoint-2 holds the model alone \(training.save_only_model: true\)"):
        resolve_resume("elsewhere", str(tmp_path / "run" / "checkpoint-2"))
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint: true found no.*checkpoint-2 .*the model alone"):
        resolve_resume(tmp_path / "run", True)


@pytest.mark.parametrize(
    ("limit", "newest", "best", "unfinished", "kept"),
    [
        (None, 4, None, [], [1, 2, 3, 4]),
        (1, 4, None, [], [4]),
        (2, 4, None, [], [3, 4]),
        (2, 4, None, [3], [2, 4]),  # incomplete ones do not count and are deleted first
        (1, 4, 1, [], [1, 4]),  # the best is kept at any limit
        (2, 4, 1, [], [1, 4]),
        (1, 2, None, [], [2]),  # resumed from step 1: steps 3 and 4 belong to the earlier run
        (1, 2, None, [4], [2, 4]),  # unfinished and not older: left alone
    ],
)
def test_old_checkpoints_are_deleted_once_the_new_one_is_complete(
    limit: int | None, newest: int, best: int | None, unfinished: list[int], kept: list[int], tmp_path: Path
) -> None:
    folders = {step: checkpoint(tmp_path, step, sealed=step not in unfinished) for step in (1, 2, 3, 4)}
    delete_old(tmp_path, limit, newest=folders[newest], best=None if best is None else folders[best])
    assert [step for step, folder in folders.items() if folder.exists()] == kept


def test_an_unfinished_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    left = checkpoint(tmp_path / "run", 2, sealed=False)
    train(run_config(tmp_path, 1, training__save_strategy="steps", training__save_steps=2))
    assert not (left / "shards").exists() and resolve_resume("elsewhere", str(left)) == left


def test_later_checkpoints_than_the_named_one_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 7)
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        warn_of_checkpoints_ahead(tmp_path, 3)
    assert "has checkpoint-7" in caplog.text and "ahead of step 3" in caplog.text


def test_unusable_or_resumed_checkpoints_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not unfinished ones, and not those before the resumed step."""
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 7, sealed=False)
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        warn_of_checkpoints_ahead(tmp_path, 3)
    assert "earlier run" not in caplog.text


def test_an_invalid_named_checkpoint_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordexp.modeling.load.read_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match="checkpoint-5 is not a folder; name a complete checkpoint-N folder"):
        train(run_config(tmp_path, 1, training__resume_from_checkpoint=str(tmp_path / "checkpoint-5")))


@pytest.fixture(scope="module")
def segments() -> list[Segment]:
    return gt_segments(load_tiny(), 4)


def requests_of(segments: list[Segment]) -> Any:
    by_id = {s.sample_id: RolloutRequest(s.sample_id, Path(), (), s.prompt_token_ids, s.model_inputs) for s in segments}
    return by_id.__getitem__


def test_a_segment_survives_json_bit_for_bit(segments: list[Segment]) -> None:
    fractional = segment_to_json(segments[0])
    fractional["target"]["coord_bin_K"] = [1 / 3 + bin_ for bin_ in fractional["target"]["coord_bin_K"]]
    fractional["target"]["weights"]["struct_ce"][-3] = 0.25  # as of a soft object
    for segment in (*segments, segment_from_json(fractional, requests_of(segments))):
        again = segment_from_json(json.loads(json.dumps(segment_to_json(segment))), requests_of(segments))
        assert segment_to_json(again) == segment_to_json(segment)
        assert again.model_inputs is segment.model_inputs
        for name in ("roles_T", "coord_pos_K", "coord_bin_K", "box_pos_M4", "box_bin_M4"):
            before, after = getattr(segment.target, name), getattr(again.target, name)
            assert (after.dtype, after.shape) == (before.dtype, before.shape) and np.array_equal(after, before)


@pytest.mark.parametrize("content", [None, "", "[{]", '[{"sample_id": "x"}]', "[3]"])
def test_a_missing_or_damaged_buffer_is_an_error(content: str | None, segments: list[Segment], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    if content is not None:
        (folder / "carry_buffer_rank0.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"carry_buffer_rank0\.json cannot be read .*an older checkpoint"):
        load_carry_buffer(CarryBuffer(200, 10), folder, requests_of(segments))


def test_a_prompt_that_changed_is_an_error(segments: list[Segment]) -> None:
    data = segment_to_json(segments[0]) | {"prompt_token_ids": [1, 2, 3]}
    with pytest.raises(CheckpointError, match="prompt changed"):
        segment_from_json(data, requests_of(segments))


def test_a_waiting_sample_missing_in_the_dataset_is_an_error(tmp_path: Path) -> None:
    keys = WAITING | {"training__max_steps": 2, "training__resume_from_checkpoint": True}
    train(run_config(tmp_path, 1, **keys))
    saved = json.loads((tmp_path / "run" / "checkpoint-2" / "carry_buffer_rank0.json").read_text())
    first = min(int(data["sample_id"].rpartition(":")[2]) for data in saved)
    with pytest.raises(DataError, match="carry buffer holds sample"):
        fewer = {"custom__train_sample_limit": max(1, first - 1), "training__resume_with_changes": True}
        train(run_config(tmp_path, 1, **keys | fewer))


@pytest.mark.parametrize(
    ("written", "buffers", "packing", "world_size", "says"),
    [(1, True, True, 1, None), (2, True, True, 2, None), (1, False, False, 1, None),
     (2, True, True, 1, "written by 2 processes, resumed by 1"),
     (1, True, True, 2, "written by 1 processes, resumed by 2"),
     (1, True, False, 1, "written with training.packing: true"),
     (1, False, True, 1, "written with training.packing: false")],
)  # fmt: skip
def test_waiting_segments_are_never_dropped(
    written: int, buffers: bool, packing: bool, world_size: int, says: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder, training = written_by(tmp_path, written, buffers), TrainingConfig(output_dir=tmp_path, packing=packing)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    if says is None:
        check_resume(folder, training)
    else:
        with pytest.raises(CheckpointError, match=says):
            check_resume(folder, training)


def written_by(folder: Path, processes: int, buffers: bool) -> Path:
    path = checkpoint(folder, 1, sealed=False)
    for rank in range(processes if buffers else 0):
        (path / f"carry_buffer_rank{rank}.json").write_text("[]")
    seal(path, 1)
    told = json.loads((path / SEAL).read_text())
    (path / SEAL).write_text(json.dumps(told | {"world_size": processes}))
    return path


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"gradient_accumulation_steps": 3}, "and a step has 6 samples instead of 12"), ({"effective_batch_size": 8}, "")],
)
def test_another_number_of_processes_is_logged_if_allowed(
    keys: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written_by(tmp_path, 4, buffers=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_resume(folder, TrainingConfig(output_dir=tmp_path, packing=False, **keys))
    assert "written by 4 processes and is resumed by 2" in caplog.text
    assert says in caplog.text and bool(says) == ("order of samples" in caplog.text)


@pytest.mark.parametrize(("size", "says"), [(4, ""), (6, "and a step has 12 samples instead of 8")])
def test_samples_of_a_step_are_compared_with_those_of_the_checkpoint(
    size: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another number of processes with another batch size may be the same step."""
    folder = written_by(tmp_path, 4, buffers=False)
    (folder / RESOLVED_CONFIG).write_text("training: {per_device_train_batch_size: 2}\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_resume(folder, TrainingConfig(output_dir=tmp_path, packing=False, per_device_train_batch_size=size))
    assert says in caplog.text and bool(says) == ("order of samples" in caplog.text)


def test_other_packages_than_those_of_the_start_are_listed(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"training__save_strategy": "steps", "training__save_steps": 1, "training__max_steps": 1}
    train(run_config(tmp_path, 1, **keys))
    path = tmp_path / "run" / "checkpoint-1" / MANIFEST
    manifest = json.loads(path.read_text())
    again = run_config(tmp_path, 1, **keys | {"training__max_steps": 2, "training__resume_from_checkpoint": True})
    assert [one.key for one in decide_start(again).applied] == ["training.max_steps"]
    path.write_text(json.dumps(manifest | {"packages": {**manifest["packages"], "torch": "1.0", "gone": "2.0"}}))
    torch, gone = (str(one) for one in decide_start(again).applied if one.key.startswith("package"))
    assert torch.startswith("package torch: 1.0 in the checkpoint, ") and gone.endswith("(no such key) now")
    path.write_text(json.dumps(manifest | {"coordexp": "0.0.9", "git": {"commit": "1234567890", "dirty": True}}))
    (code,) = (str(one) for one in decide_start(again).applied if one.key.startswith("version"))
    assert code.startswith("version of coordexp: 0.0.9, commit 12345678 with changes in the checkpoint, 0.1.0")
    for file in (MANIFEST, RESOLVED_CONFIG):  # nothing that cannot be compared is passed over in silence
        for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
            (folder / file).unlink(missing_ok=True)
        assert f"{file}: missing in the checkpoint" in str(decide_start(again).applied[-1])


@pytest.mark.parametrize(
    ("file", "temperature", "refused"),
    [("server_3v1", 0.7, ["decode_batch_size", "vllm.server.servers"]), ("server_3v1", 0.0, []), ("hf", 0.7, [])],
)
def test_what_cuts_the_calls_of_servers_belongs_to_what_they_sample(
    file: str, temperature: float, refused: list[str]
) -> None:
    """Servers count up from the seed of each call; other backends have one seed per request."""
    path = ROOT / "configs" / "stage2_rollout_aligned" / f"{file}.yaml"
    run = load_config(path, overrides={"rollout_matching.decoding.temperature": temperature})
    earlier = run.model_dump(mode="json")
    earlier["rollout_matching"]["decode_batch_size"] += 1
    server = earlier["rollout_matching"]["vllm"]["server"]
    servers = server["servers"] if server else []
    if servers:
        servers.append({**servers[0], "base_url": "http://other:8000"})
    found = {one.key.removeprefix("rollout_matching."): one.harmless for one in changes(earlier, run)}
    assert sorted(found) == ["decode_batch_size", *(["vllm.server.servers"] if servers else [])]
    assert [key for key, is_harmless in sorted(found.items()) if not is_harmless] == refused
    if servers:  # another host has the same place
        servers.pop()
        servers[0]["base_url"] = "http://moved:8000"
        assert [one.harmless for one in changes(earlier, run) if one.key.endswith("servers")] == [True]


def test_a_manifest_describes_the_run_before_its_first_step(tmp_path: Path) -> None:
    config = run_config(tmp_path, 2, training__seed=13)
    with pytest.raises(Killed):
        train(config, on_built=kill_at(0))
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert manifest["seed"] == 13 and manifest["world_size"] == 1
    assert set(manifest["packages"]) >= {"torch", "transformers", "accelerate"} and all(manifest["packages"].values())
    assert {"created_at", "command", "python", "platform", "coordexp", "git", "schema_version"} <= manifest.keys()
    if manifest["git"] is not None:  # None where the tests run from an unpacked archive
        assert len(manifest["git"]["commit"]) == 40
    assert load_config(tmp_path / "run" / RESOLVED_CONFIG) == config


def test_keys_of_another_version_that_were_null_were_not_set() -> None:
    run = load_config(ROOT / "configs" / "stage2_rollout_aligned" / "colocate.yaml")
    earlier = run.model_dump(mode="json")
    earlier["rollout_matching"]["vllm"] |= {"cpu_offload_gb": None, "kv_cache_dtype": "fp8"}
    (only,) = changes(earlier, run)
    assert str(only) == "rollout_matching.vllm.kv_cache_dtype: fp8 in the checkpoint, (no such key) now"
