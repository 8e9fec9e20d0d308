"""What needs no model answers without importing one: missing paths, all together, and read-only commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.evaluation.answers import write_answers
from support.cli_runs import run_cli
from support.config_samples import set_key, stage1, write_yaml
from support.scored_answers import random_answers

HEAVY = {"torch", "transformers", "torchvision", "accelerate", "vllm"}


def after(folder: Path, *argv: object) -> tuple[int, set[str], str]:
    """(exit code, heavy packages imported, stderr) of ``coordexp *argv`` in a process of its own."""
    code = (
        "import json, sys\n"
        "from coordexp.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code or 0\n"
        "print('\\n' + json.dumps([code, sorted({name.split('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=120,
                          cwd=folder, env={**os.environ, "COLUMNS": "200"})  # fmt: skip
    code, names = json.loads(done.stdout.splitlines()[-1])
    return code, set(names) & HEAVY, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = set_key(stage1(), "custom.val_jsonl", "data/val.jsonl")
    return write_yaml(tmp_path, set_key(config, "training.resume_from_checkpoint", "outputs/checkpoint-3"))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("train",), ("model.model: checkpoints/tiny", "custom.train_jsonl: data/train.jsonl",
                      "custom.val_jsonl: data/val.jsonl", "training.resume_from_checkpoint: outputs/checkpoint-3")),
        (("evaluate",), ("model.model: checkpoints/tiny", "custom.val_jsonl: data/val.jsonl")),
    ],
)  # fmt: skip
def test_all_missing_paths_are_named_at_once(
    argv: tuple[str, ...], named: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    code, heavy, err = after(tmp_path, *argv, run)
    assert code == 2 and not heavy
    assert [name for name in named if name not in err] == [] and f"working directory, {tmp_path}" in err


def test_what_stands_in_for_a_path_is_named_instead(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_cli(capsys, "evaluate", run, "--model", "elsewhere", "--data", run.parent)
    assert outcome.code == 2
    assert "--model: elsewhere: no such folder" in outcome.err
    assert f"--data: {run.parent}: is a folder, not a file" in outcome.err and "model.model" not in outcome.err


def test_predict_names_every_missing_image(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code, heavy, err = after(tmp_path, "predict", "a.jpg", "b.jpg", "--model", "model")
    assert code == 2 and not heavy and "no such image, folder or dataset: a.jpg, b.jpg" in err
    code, heavy, err = after(tmp_path, "predict", "a.jpg", "--model", "nothing")
    assert code == 2 and not heavy and "nothing: no such folder" in err


@pytest.mark.parametrize(
    "argv",
    [
        ("evaluate", "run"),
        ("evaluate", "--compare", "run", "run", "--resamples", "10"),
        ("view", "run", "--out", "view.html"),
        ("export", "csv", "run", "--out", "out"),
        ("evaluate", "nothing"),
        ("view", "nothing"),
        ("model", "info", "nothing"),
        ("data", "check", "nothing.jsonl"),
        ("config", "check", "nothing.yaml"),
    ],
    ids=" ".join,
)
def test_saved_answers_are_read_without_torch(argv: tuple[str, ...], tmp_path: Path) -> None:
    write_answers(random_answers(4, 1), tmp_path / "run" / "predictions.jsonl")
    code, heavy, err = after(tmp_path, *argv)
    assert code == (2 if any("nothing" in word for word in argv) else 0), err
    assert not heavy
