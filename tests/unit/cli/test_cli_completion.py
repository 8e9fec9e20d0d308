"""``coordexp data complete`` with the shipped checkpoint restores removed objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data import read_jsonl
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation import match_by_desc
from coordexp.evaluation.answers import Detection
from support.cli_runs import run_cli

DEMO = asset("checkpoints/demo-stage1")


@pytest.fixture
def half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    scenes = write_scenes(tmp_path, 6, SPARSE, 4)
    run_cli(capsys, "data", "drop", scenes, "--keep", "0.5", "--out", tmp_path / "half.jsonl")
    return tmp_path / "half.jsonl"


def test_removed_objects_are_added_back_as_soft(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sheet = half.with_name("full.jsonl"), half.with_name("sheet.png")
    command = ["data", "complete", half, "--model", DEMO, "--out", out, "--sheet", sheet, "--json"]
    outcome = run_cli(capsys, *command)
    assert outcome.code == 0, outcome.err
    counts = json.loads(outcome.out)
    added = counts["outcomes"]["added"]
    whole, before, after = read_jsonl(half.with_name("scenes.jsonl")), read_jsonl(half), read_jsonl(out)
    right = gone = 0
    for complete, few, found in zip(whole, before, after, strict=True):
        assert found.objects[: len(few.objects)] == few.objects
        soft = [Detection(o.desc, o.kind, o.bins, o.soft) for o in found.objects[len(few.objects) :]]
        assert all((obj.score or 0) >= 0.5 for obj in soft)
        (entry,) = found.metadata["completion"]
        assert len(entry["added"]) == len(soft) and entry["model"] == str(DEMO) and len(entry["fingerprint"]) == 16
        missing = [obj for obj in complete.objects if obj not in few.objects]
        right += len(match_by_desc(soft, missing, 0.5))
        gone += len(missing)
    assert gone >= 5 and right >= 0.6 * gone and right >= 0.6 * added
    written = json.loads(half.with_name("full.completion.json").read_text(encoding="utf-8"))
    assert written["outcomes"] == counts["outcomes"] and sum(written["outcomes"].values()) == written["predicted"]
    assert written["prompt"] == "Detect every object."  # as the run that made the checkpoint asked
    with Image.open(sheet) as image:
        assert image.width == 4 * 320

    # Other rules reuse the saved answers; existing files are not replaced without a flag.
    refused = run_cli(capsys, *command)
    assert refused.code == 2 and "--overwrite" in refused.err
    answers = half.with_name("full.answers") / "predictions.jsonl"
    made_at = answers.stat().st_mtime_ns, answers.read_bytes()
    lines = made_at[1].splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # killed while writing
    again = run_cli(capsys, *command, "--overwrite", "--threshold", "0.999", "--weight", "0.5")
    assert again.code == 0 and json.loads(again.out)["outcomes"]["added"] < added and answers.read_bytes() == made_at[1]
    other = run_cli(capsys, *command, "--overwrite", "--prompt", "Where is it?")
    assert other.code == 2 and "another prompt" in other.err


def test_a_prompt_that_differs_from_training_is_reported(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "complete", half, "--model", DEMO, "--out", half.with_name("out.jsonl")]
    outcome = run_cli(capsys, *command, "--prompt", "Compose a long letter to your grandmother about the weather.")
    assert outcome.code == 0 and "Was the model trained with this prompt?" in outcome.out
    assert run_cli(capsys, "data", "complete", half, "--out", half.with_name("x.jsonl")).code == 2  # which model?
