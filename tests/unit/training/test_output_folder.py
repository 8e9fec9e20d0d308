"""A resumed run keeps the configuration that it was trained with, and no run replaces another's results unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordexp.checkpoints.folder import RESOLVED_CONFIG
from coordexp.checkpoints.run_folder import MANIFEST
from coordexp.config import load_config
from coordexp.config.base import parse_dotted, section_of
from coordexp.config.engine_args import ENGINE_ARGS
from coordexp.config.resume import GONE_AS_NOW, HARMLESS, changes
from coordexp.config.schema import RunConfig
from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.errors import ConfigError, RunFinished
from coordexp.runs.start import decide_start
from coordexp.training.checked_run import check_run
from coordexp.training.run import run_training
from support.tiny_run import Killed, kill_at, run_config, tiny_checkpoint, tiny_scenes, train

ROOT = Path(__file__).parents[3]
SAVING: dict[str, Any] = {"training__save_strategy": "steps", "training__save_steps": 1}
RESUMING: dict[str, Any] = SAVING | {"training__resume_from_checkpoint": True}


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock's."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "run.lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a run of two steps, with both checkpoints and its model. Use a copy."""
    folder = tmp_path_factory.mktemp("finished")
    model = shutil.copytree(tiny_checkpoint(), folder / "model")
    write_jsonl(read_jsonl(tiny_scenes()), folder / "train.jsonl")
    keys = {"model__model": str(model), "custom__train_jsonl": str(folder / "train.jsonl")}
    run_training(run_config(folder, 1, **SAVING, **keys), Console(quiet=True), overrides=["training.seed=42"])
    return folder


@pytest.fixture
def earlier(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run's own folder; model and data stay where they are."""
    shutil.copytree(finished / "run", tmp_path / "run")
    before = content(tmp_path / "run")
    yield tmp_path
    assert content(tmp_path / "run") == before, "a refused start changed the folder"


def again(folder: Path, finished: Path, /, **keys: Any) -> RunConfig:
    inputs = {"model__model": str(finished / "model"), "custom__train_jsonl": str(finished / "train.jsonl")}
    return run_config(folder, 1, **RESUMING | inputs | keys)


CHANGED = [
    ({"training__learning_rate": 0.01}, ("training.learning_rate: 0.001", "0.01")),
    ({"training__seed": 7}, ("training.seed: 42", "7")),
    ({"training__per_device_train_batch_size": 3}, ("training.per_device_train_batch_size",)),
    ({"template__prompt": "Hello"}, ("template.prompt: Detect.", "Hello")),
    ({"custom__coord_soft_ce_w1": {"enabled": True}}, ("custom.coord_soft_ce_w1: null",)),
    ({"model__model": str(tiny_checkpoint())}, ("model.model",)),
    ({"custom__train_sample_limit": 3}, ("custom.train_sample_limit: null", "3")),
    ({"global_max_length": 400}, ("global_max_length: 512", "400")),
    ({"training__packing_buffer": 400}, ("training.packing_buffer",)),
    ({"tuner__train_type": "lora"}, ("tuner.train_type: full", "start a new run from model.model")),
]


@pytest.mark.parametrize(("keys", "named"), CHANGED, ids=[next(iter(keys)) for keys, _ in CHANGED])
def test_a_resume_that_would_learn_otherwise_is_refused(
    keys: dict[str, Any], named: tuple[str, ...], earlier: Path, finished: Path
) -> None:
    if "model__model" in keys:  # other weights under another name; the same ones would be a moved folder
        model = shutil.copytree(finished / "model", earlier / "other")
        with (model / "config.json").open("a") as file:
            file.write("\n")
        keys = {"model__model": str(model)}
    with pytest.raises(ConfigError) as refused:
        check_run(again(earlier, finished, training__max_steps=4, **keys))
    text = str(refused.value)
    assert [part for part in named if part not in text] == []
    assert "started with training.seed=42" in text
    with_changes = again(earlier, finished, training__max_steps=4, training__resume_with_changes=True, **keys)
    if "training.resume_with_changes" in text:
        check_run(with_changes)
    else:
        with pytest.raises(ConfigError, match=next(iter(keys)).replace("__", r"\.")):
            check_run(with_changes)


def test_other_data_under_the_same_name_is_refused_and_moved_data_is_not(earlier: Path, finished: Path) -> None:
    moved = earlier / "elsewhere.jsonl"
    write_jsonl(read_jsonl(tiny_scenes()), moved)
    keys = {"training__max_steps": 4, "custom__train_jsonl": str(moved)}
    check_run(again(earlier, finished, **keys))
    write_jsonl(list(read_jsonl(tiny_scenes()))[:-1], moved)
    with pytest.raises(ConfigError, match=r"custom\.train_jsonl"):
        check_run(again(earlier, finished, **keys))


def test_what_a_checkpoint_was_trained_on_is_not_what_a_later_start_read(finished: Path, tmp_path: Path) -> None:
    """A start with other data, that it may have, and that saves nothing."""
    shutil.copytree(finished / "run", tmp_path / "run")
    data = tmp_path / "other.jsonl"
    write_jsonl(list(read_jsonl(tiny_scenes()))[:-1], data)
    other = {"training__max_steps": 3, "custom__train_jsonl": str(data)}
    with pytest.raises(Killed):
        train(again(tmp_path, finished, **other, training__resume_with_changes=True), on_built=kill_at(2))
    with pytest.raises(ConfigError, match=r"custom\.train_jsonl: .*: other content"):
        decide_start(again(tmp_path, finished, **other))
    own = again(tmp_path, finished, training__max_steps=3)
    assert [one.key for one in decide_start(own).applied] == ["training.max_steps"]
    train(own)
    first, last = json.loads((tmp_path / "run" / MANIFEST).read_text())["resumes"]
    assert "custom.train_jsonl" in first["changes"] and list(last["changes"]) == ["training.max_steps"]


@pytest.mark.parametrize(
    ("was", "now", "is_harmless"),
    [([[0], [1]], [[2], [3]], True), ([[0], [1]], [[0, 1], [2]], False), ([], [[0], [1]], True), ([], [[0, 1]], False)],
)
def test_the_number_of_a_servers_devices_belongs_to_what_it_samples(
    was: list[list[int]], now: list[list[int]], is_harmless: bool
) -> None:
    """Which devices they are does not. Without any, a server has one engine on the CPU."""
    keys = {"rollout_matching.decoding.temperature": 0.7, "launch.server_devices": now}
    run = load_config(asset("configs/stage2_rollout_aligned/server.yaml"), overrides=keys)
    earlier = run.model_dump(mode="json")
    earlier["launch"]["server_devices"] = was
    (change,) = changes(earlier, run)
    assert (change.key, change.harmless) == ("launch.server_devices", is_harmless)


def test_a_finished_run_is_left_alone(earlier: Path, finished: Path) -> None:
    with pytest.raises(RunFinished, match="2 steps"):
        run_training(again(earlier, finished), Console(quiet=True))


@pytest.mark.parametrize("keep", ["checkpoint-1", "model.safetensors"])
def test_a_new_run_does_not_replace_another(keep: str, earlier: Path, finished: Path) -> None:
    for path in (earlier / "run").glob("checkpoint-*" if keep == "model.safetensors" else "*.safetensors"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = content(earlier / "run")
    with pytest.raises(ConfigError, match=rf"training\.output_dir.*{keep}.*training\.overwrite_output_dir"):
        check_run(again(earlier, finished, training__resume_from_checkpoint=None))
    assert content(earlier / "run") == before
    if keep == "model.safetensors":  # a kill while the model was saved, of a run without checkpoints
        (earlier / "run" / "trainer_state.json").unlink()
        with pytest.raises(ConfigError, match="no checkpoint to continue from; name another folder, or replace it"):
            check_run(again(earlier, finished))
    shutil.rmtree(earlier / "run")
    shutil.copytree(finished / "run", earlier / "run")


def test_harmless_changes_are_applied_and_listed(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    keys = {"training__max_steps": 3, "training__logging_steps": 2, "rollout_matching__max_new_tokens": 10}
    console = Console(record=True, quiet=False, width=500, file=open("/dev/null", "w"))  # noqa: SIM115
    trainer = run_training(again(tmp_path, finished, **keys), console)
    assert trainer.state.global_step == 3
    said = console.export_text()
    assert all(key.replace("__", ".") in said for key in keys)
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    (resume,) = manifest["resumes"]
    assert (resume["step"], resume["changes"]["training.max_steps"]) == (2, {"was": "2", "now": "3"})


def test_changes_on_purpose_are_recorded(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    keys = {"training__max_steps": 3, "training__learning_rate": 0.01, "training__resume_with_changes": True}
    trainer = run_training(again(tmp_path, finished, **keys), Console(quiet=True))
    assert trainer.state.log_history[-2]["learning_rate"] == 0.01
    (resume,) = json.loads((tmp_path / "run" / MANIFEST).read_text())["resumes"]
    assert resume["changes"]["training.learning_rate"] == {"was": "0.001", "now": "0.01"}
    assert "learning_rate: 0.01" in (tmp_path / "run" / "checkpoint-3" / RESOLVED_CONFIG).read_text()
    assert "learning_rate: 0.001" in (tmp_path / "run" / "checkpoint-2" / RESOLVED_CONFIG).read_text()


def test_overwriting_deletes_the_earlier_results(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    earlier = ["adapter_config.json", "first_evaluation.jsonl", "last_evaluation.jsonl"]
    for name in earlier:
        (tmp_path / "run" / name).write_text("{}")
    keys = {"training__resume_from_checkpoint": None, "training__overwrite_output_dir": True, "training__seed": 7,
            "training__max_steps": 1}  # fmt: skip
    trainer = run_training(again(tmp_path, finished, **keys), Console(quiet=True))
    assert trainer.state.global_step == 1
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not any((tmp_path / "run" / name).exists() for name in earlier)
    keys |= {"model__model": str(tmp_path / "run" / "checkpoint-1")}
    with pytest.raises(ConfigError, match=r"overwrite_output_dir: would delete model\.model"):
        check_run(again(tmp_path, finished, **keys))


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"training\.output_dir.*is a file"):
        check_run(run_config(tmp_path, 1, training__output_dir=str(tmp_path / "file" / "inside")))


def test_a_schedule_without_its_arguments_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.lr_scheduler_kwargs.*cosine_with_min_lr"):
        check_run(run_config(tmp_path, 1, training__lr_scheduler_type="cosine_with_min_lr"))
    kwargs = {"training__lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    check_run(run_config(tmp_path, 1, training__lr_scheduler_type="cosine_with_min_lr", **kwargs))


def test_every_harmless_key_exists() -> None:
    for key in HARMLESS:
        section: Any = RunConfig
        own, _, argument = key.partition(".engine_args.")
        assert not argument or argument in ENGINE_ARGS
        for part in parse_dotted(own):
            assert section is not None and part in section.model_fields, key
            section = section_of(section.model_fields[part].annotation)


def test_keys_of_an_earlier_version_that_did_what_is_done_now_are_no_changes() -> None:
    run = load_config(ROOT / "configs" / "stage2_rollout_aligned" / "colocate.yaml")
    earlier = run.model_dump(mode="json")
    assert not list(changes(earlier, run))
    for key, value in {**GONE_AS_NOW, "training.greater_is_better": True}.items():  # of rollout/f1
        *sections, last = parse_dotted(key)
        section: Any = earlier
        for part in sections:
            section = section.get(part) or {}  # without augment and stage2_ab, as that version wrote it
        section[str(last)] = value
    vllm = earlier["rollout_matching"]["vllm"]
    vllm |= {"engine_args": None, "max_num_seqs": 64}  # as 0.1.0 wrote them
    assert [(one.key, one.harmless) for one in changes(earlier, run)] == [("rollout_matching.vllm.max_num_seqs", True)]
    earlier["rollout_matching"]["coord_decode_mode"] = "st"
    earlier["training"] |= {"greater_is_better": False, "eval_delay": 3.0}
    found = {one.key: one.harmless for one in changes(earlier, run) if "vllm" not in one.key}
    decided = {"rollout_matching.coord_decode_mode": False, "training.greater_is_better": False}
    assert found == {**decided, "training.eval_delay": True}
