"""A small demo: every stage, its results, and resuming after an interruption."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image
from rich.console import Console

from coordexp.cli.demo import START, WAYS, DemoSize, run_demo
from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl
from coordexp.errors import DataError, RunStopped
from support.cli_runs import files_of_at_most
from support.forked import Handle, coordexp, forked

SMALL = DemoSize(train_scenes=32, val_scenes=4, max_steps=2, pictures=2)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo")
    return output, run_demo(output, Console(quiet=True), SMALL)


def test_summary_has_the_same_metrics_for_every_run(demo):
    output, results = demo
    summary = json.loads((output / "summary.json").read_text())
    assert summary == results
    expected = {"f1", "precision", "recall", "mean_matched_iou", "duplicate_rate", "invalid_rate"}
    for run in ("before", *(way.key for way in WAYS)):
        assert expected <= summary[run].keys() and summary[run]["images"] == SMALL.val_scenes
    assert summary["settings"]["optimizer_steps"] == {way.run: 2 for way in WAYS}


def test_the_shipped_checkpoint_matches_the_shipped_configuration(demo):
    before = demo[1]["before"]
    assert before["invalid_rate"] < 0.1 and before["truncated_rate"] == 0
    # it was trained on incomplete annotations: good outlines, missing objects
    assert 0 < before["pred_objects"] < before["gt_objects"] and before["mean_matched_iou"] > 0.7


def test_the_completed_set_adds_soft_objects_to_incomplete_annotations(demo):
    data = demo[0] / "data" / "train"
    whole, incomplete, completed = (
        read_jsonl(data / f"{name}.jsonl") for name in ("scenes", "incomplete", "completed")
    )
    counts = [sum(len(record.objects) for record in records) for records in (whole, incomplete, completed)]
    assert counts[1] < 0.8 * counts[0] and counts[2] >= counts[1]
    for part, more in zip(incomplete, completed, strict=True):
        annotated = [obj for obj in more.objects if obj.soft is None]
        assert sorted(map(repr, annotated)) == sorted(map(repr, part.objects))


def test_pictures_show_ground_truth_and_every_run_side_by_side(demo):
    panels = 2 + len(WAYS)
    with Image.open(demo[0] / "comparison.png") as sheet:
        assert sheet.width % panels == 0 and sheet.width >= panels * 128


def test_the_page_shows_targets_and_curves(demo):
    page = (demo[0] / "view.html").read_text(encoding="utf-8")
    assert "MATCHED_COORD" in page and "data:image/jpeg;base64," in page and '"curves":{"' in page


def test_all_runs_used_the_same_images_and_changed_the_weights(demo):
    output, _ = demo
    totals = {}
    for run in (way.run for way in WAYS):
        history = [line for line in json.loads((output / run / "log_history.json").read_text()) if "loss" in line]
        totals[run] = [line["train/samples_total"] for line in history]
        assert len(history) == 2
    assert totals["stage2"] == totals["sft"] == totals["completed"]
    start = (asset(START) / "model.safetensors").read_bytes()
    assert (output / "stage2" / "model.safetensors").read_bytes() != start


def test_files_of_others_in_its_folder_are_refused_and_left_as_they_are(tmp_path: Path):
    mine = {"stage2.yaml": "model: {model: checkpoints/mine}\n", "stage2/notes.txt": "mine\n"}
    for name, text in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="has files that no coordexp demo wrote; name a new folder with --out"):
        run_demo(tmp_path, Console(quiet=True), SMALL)
    assert {name: (tmp_path / name).read_text() for name in mine} == mine
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage2", "stage2.yaml"]


def test_a_full_disk_leaves_no_folder_that_the_next_demo_refuses(tmp_path: Path):
    for _ in range(2):
        with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
            run_demo(tmp_path, Console(quiet=True), SMALL)
    assert not list(tmp_path.iterdir())


def test_a_second_demo_has_the_same_results(demo):
    output, results = demo
    again = run_demo(output, Console(quiet=True), SMALL)
    for name in results.keys() - {"settings"}:
        assert again[name]["f1"] == results[name]["f1"]


def ends_in_a_step(*_: object):
    raise RunStopped("stopped by SIGINT after step 1 of 2", signal.SIGINT)


@pytest.mark.parametrize("run", [ends_in_a_step, lambda *_: SimpleNamespace(asked_to_end=signal.SIGINT)])
def test_ctrl_c_ends_the_demo_also_in_the_last_step_of_a_run(demo, monkeypatch: pytest.MonkeyPatch, run):
    """That run is finished, and the demo went on with the next one."""
    monkeypatch.setattr("coordexp.training.run.run_training", run)
    with pytest.raises(RunStopped) as ended:
        run_demo(demo[0], Console(quiet=True), SMALL)
    assert str(ended.value) == (
        "stopped by SIGINT in the run plain SFT, with everything saved; to continue, start it again: coordexp demo "
        f"--out {demo[0]}"
    )
    assert ended.value.signal == signal.SIGINT


def test_a_killed_training_resumes_from_the_newest_checkpoint(demo, tmp_path: Path):
    values = yaml.safe_load((demo[0] / "stage2.yaml").read_text())
    values["training"] |= {"output_dir": str(tmp_path / "run"), "max_steps": 4, "save_steps": 1}
    config = tmp_path / "killed.yaml"
    config.write_text(yaml.safe_dump(values))
    command, log = ["train", str(config)], tmp_path / "log"
    victim = Handle(forked(coordexp, command, log=log))
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoint-2" / "complete.json").exists():
        assert victim.poll() is None and time.monotonic() < deadline, "training ended or hung before its second step"
        time.sleep(0.05)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait(timeout=60)
    assert Handle(forked(coordexp, command, log=log)).wait(timeout=300) == 0, log.read_text()
    assert "resuming from" in log.read_text()
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [line["step"] for line in state["log_history"] if "loss" in line] == [1, 2, 3, 4]
