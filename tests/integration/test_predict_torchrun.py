"""``coordexp predict`` under torchrun: each of two processes answers its share, and the files are those of one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from coordexp.data import read_jsonl
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import read_answers
from support.cli_runs import run_cli, small_checkpoint, write_run
from support.torchrun import torchrun


def by_two(*argv: object) -> None:
    done = torchrun("-m", "coordexp", *argv)
    assert done.returncode == 0, done.output[-3000:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_processes_write_the_same_files_as_one_also_after_a_kill(
    temperature: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples depend on the seed and the image, not on ranks, batches or the place of a kill."""
    write_scenes(tmp_path, 7, SPARSE, 5)
    keys = {"rollout_matching__decoding": {"temperature": temperature}}
    run = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model"), **keys)
    data, one, two = tmp_path / "scenes.jsonl", tmp_path / "one", tmp_path / "two"
    assert run_cli(capsys, "predict", run, data, "--out", one).code == 0
    whole = read_answers(one)
    assert len({answer.text for answer in whole}) > (1 if temperature else 0), "equal answers would show nothing"
    by_two("predict", run, data, "--out", two)
    assert read_answers(two) == whole
    assert not list(two.glob("predictions.rank*.jsonl"))
    shorter = "rollout_matching.max_new_tokens=9"
    assert run_cli(capsys, "predict", run, data, "--out", tmp_path / "short", shorter).code == 0
    by_two("predict", run, data, "--out", two, "--overwrite", shorter)
    assert read_answers(two) == read_answers(tmp_path / "short")
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copy(one / "prediction.json", killed)
    lines = (one / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (killed / "predictions.jsonl").write_bytes(b"".join([lines[0], lines[3], lines[4]]))
    by_two("predict", run, data, "--out", killed)
    assert read_answers(killed) == whole


def test_two_processes_complete_annotations_like_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_scenes(tmp_path, 5, SPARSE, 5)
    half, one, two = (tmp_path / f"{name}.jsonl" for name in ("half", "one", "two"))
    assert run_cli(capsys, "data", "drop", data, "--keep", "0.3", "--out", half).code == 0
    command = ["data", "complete", half, "--model", asset("checkpoints/demo-stage1"), "--batch-size", "2", "--out"]
    assert run_cli(capsys, *command, one).code == 0
    by_two(*command, two)
    assert read_jsonl(two) == [replace(r, sample_id=r.sample_id.replace("one", "two")) for r in read_jsonl(one)]
    assert any(obj.soft is not None for record in read_jsonl(two) for obj in record.objects)
