"""Commands that need no model do not import torch: missing paths (reported together) and read-only commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordexp.checkpoints.run_folder import LOCK
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import write_answers
from support.cli_runs import Cli
from support.config_samples import set_key, stage1, write_yaml
from support.scored_answers import random_answers
from support.view_runs import write_run

HEAVY = {"torch", "transformers", "torchvision", "accelerate", "vllm"}


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
    argv: tuple[str, ...], named: tuple[str, ...], run: Path, tmp_path: Path, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outcome = cli(*argv, run)
    assert outcome.code == 2 and f"working directory, {tmp_path}" in outcome.err
    assert [name for name in named if name not in outcome.err] == []


def test_each_of_several_missing_files_is_named(run: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.jsonl").touch()
    outcome = cli("train", run, f"custom.train_jsonl=[{tmp_path}/a.jsonl, b.jsonl, {{path: c.jsonl, weight: 2}}]")
    assert outcome.code == 2
    assert "custom.train_jsonl[1]: b.jsonl: file not found" in outcome.err
    assert "custom.train_jsonl[2]: c.jsonl: file not found" in outcome.err and "train_jsonl[0]" not in outcome.err


def test_an_option_is_named_instead_of_the_path_it_replaces(run: Path, cli: Cli) -> None:
    outcome = cli("evaluate", run, "--model", "elsewhere", "--data", run.parent)
    assert outcome.code == 2
    assert "--model: elsewhere: no such folder" in outcome.err
    assert f"--data: {run.parent}: is a folder, not a file" in outcome.err and "model.model" not in outcome.err


READS = [
    ("evaluate", "run"),
    ("evaluate", "--compare", "run", "run", "--resamples", "10"),
    ("view", "run", "--out", "view.html"),
    ("view", "recorded", "--model", "MODEL", "--out", "tokens.html"),
    ("export", "csv", "run", "--out", "out"),
    ("model", "info", "MODEL"),
    ("data", "check", "scenes.jsonl"),
    ("data", "check", "scenes.jsonl", "--sheet", "sheet.png"),
    ("data", "check", "scenes.jsonl", "--sheet", "sheet.png", "--augment", "views.yaml"),
    ("init", "scenes.jsonl", "--model", "MODEL"),
    ("config", "check", "stage1.yaml"),
]
REFUSED = [
    ("evaluate", "nothing"),
    ("view", "nothing"),
    ("view", "run", "--model", "nothing"),
    ("train", "views.yaml"),
    ("train", "imageless.yaml"),
    ("evaluate", "imageless.yaml"),
    ("train", "empty.yaml"),
    ("train", "qwen2.yaml"),
    ("train", "running.yaml"),
    ("launch", "running.yaml"),
    ("evaluate", "views.yaml"),
    ("predict", "nothing.jpg", "nothing.png", "--model", "MODEL"),
    ("predict", "images", "--model", "nothing"),
    ("model", "info", "nothing"),
    ("model", "export", "nothing", "out"),
    ("model", "merge", "nothing", "out"),
    ("model", "expand-vocab", "nothing", "out"),
    ("data", "check", "nothing.jsonl"),
    ("data", "check", "scenes.jsonl", "--sheet", "sheet.png", "--model", "nothing"),
    ("data", "complete", "scenes.jsonl", "--model", "nothing", "--out", "out.jsonl"),
    ("data", "complete", "nothing.jsonl", "--model", "MODEL", "--out", "out.jsonl"),
    ("config", "check", "nothing.yaml"),
    ("replay", "nothing"),
    ("init", "nothing", "--model", "MODEL", "--out", "x.yaml"),
    ("predict", "images", "--model", "qwen2"),
    ("predict", "qwen2.yaml", "images"),
    ("evaluate", "--model", "qwen2", "--data", "scenes.jsonl"),
    ("model", "expand-vocab", "qwen2", "merged"),
    ("model", "export", "qwen2", "merged"),
    ("model", "merge", "qwen2", "merged"),
    ("data", "complete", "scenes.jsonl", "--model", "qwen2", "--out", "out.jsonl"),
    ("init", "scenes.jsonl", "--model", "qwen2", "--out", "x.yaml"),
    ("serve", "--config", "views.yaml"),
    ("launch", "--config", "nothing.yaml"),
]


ALL_IN_TURN = """
import contextlib, io, json, sys
from coordexp.cli import main

heavy, lines = set(json.loads(sys.argv[1])), []
for argv in json.loads(sys.argv[2]):
    err, code = io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(argv)
        except SystemExit as end:
            code = end.code or 0
    lines.append([code, err.getvalue(), sorted(heavy & set(sys.modules))])
print(json.dumps(lines))
"""


def write_refused_runs(folder: Path) -> None:
    """Configurations whose input is wrong in a way that torch is not needed for, and one of a run that continues."""
    (folder / "qwen2").mkdir()
    (folder / "qwen2" / "config.json").write_text('{"model_type": "qwen2"}')
    lines = (folder / "scenes.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "imageless.jsonl").write_text(lines[0].replace("images/", "nowhere/") + "\n", encoding="utf-8")
    (folder / "empty.jsonl").write_text("")
    model, data = str(asset("checkpoints/demo-stage1")), "scenes.jsonl"
    wrong = {"imageless": (model, "imageless.jsonl"), "empty": (model, "empty.jsonl"), "qwen2": ("qwen2", data)}
    for name, (checkpoint, jsonl) in (wrong | {"running": (model, data)}).items():
        custom = {"train_jsonl": jsonl, "val_jsonl": jsonl}
        training = stage1()["training"] | {"output_dir": name + "_run"}
        config = stage1() | {"model": {"model": checkpoint}, "training": training}
        write_yaml(folder, config | {"custom": config["custom"] | custom}, f"{name}.yaml")
    (folder / "running_run").mkdir()


@contextmanager
def another_process_holds(lock: Path) -> Iterator[None]:
    """A process that locks a file until the end of the block."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdout.readline()
        yield
        holder.stdin.close()


def in_turn(folder: Path, heavy: Iterable[str], commands: Iterable[Sequence[str]]) -> list[tuple[int, str, list[str]]]:
    """(exit code, stderr, which of ``heavy`` are imported by then) of commands that one process runs, on files that are
    written to ``folder``."""
    write_answers(random_answers(4, 1), folder / "run" / "predictions.jsonl")
    write_scenes(folder, 4, SPARSE, 1)
    write_yaml(folder, stage1() | {"data": {"augment": {"horizontal_flip": 0.5}}}, "views.yaml")
    write_run(folder / "recorded")
    write_refused_runs(folder)
    model = str(asset("checkpoints/demo-stage1"))
    argvs = [[model if word == "MODEL" else word for word in argv] for argv in commands]
    words = [sys.executable, "-c", ALL_IN_TURN, json.dumps(sorted(heavy)), json.dumps(argvs)]
    with another_process_holds(folder / "running_run" / LOCK):
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_read_only_and_refused_commands_do_not_import_torch(tmp_path: Path) -> None:
    """One process for all commands, which is quicker: the first that imports something heavy is named."""
    commands = [*READS, *REFUSED]
    for argv, (code, err, heavy) in zip(commands, in_turn(tmp_path, HEAVY, commands), strict=True):
        command = " ".join(argv)
        assert not heavy, f"{command} imports {heavy}"
        assert code == (2 if argv in REFUSED else 0), f"{command}: {err}"
        named = {"imageless.yaml": "imageless.jsonl:1", "empty.yaml": "empty.jsonl", "qwen2.yaml": "qwen2",
                 "running.yaml": "another run"}  # fmt: skip
        if any("qwen2" in word for word in argv):
            assert "model type 'qwen2'" in err, f"{command}: {err}"
            continue
        expected = ("nothing", "checkpoints/tiny: no such folder", "out: the folder is not empty",
                    named.get(argv[-1], "nothing"))  # fmt: skip
        assert argv in READS or any(text in err for text in expected), f"{command}: {err}"
    assert '"target":{"pieces":[' in (tmp_path / "tokens.html").read_text(encoding="utf-8")


def test_the_detector_is_imported_without_torch_and_refuses_another_model_type_without_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    code = (
        "import sys\nfrom coordexp import Detector\n"
        "try:\n    Detector(sys.argv[1])\nexcept Exception as error:\n    print(error)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=300)
    refused, imported = done.stdout.splitlines()
    assert "model type 'qwen2'" in refused and imported == "[]", done.stderr


def test_help_and_yaml_errors_do_not_import_numpy(tmp_path: Path) -> None:
    write_yaml(tmp_path, {**stage1(), "trainnig": {}}, "misspelt.yaml")
    helps = ["--help", "train --help", "evaluate --help", "data convert voc --help", "data scenes --help", "--version"]
    mistakes = [f"{command} misspelt.yaml" for command in ("train", "evaluate", "config check")]
    commands = [command.split() for command in (*helps, *mistakes)]
    answered = in_turn(tmp_path, HEAVY | {"numpy", "scipy", "PIL"}, commands)
    assert [(code, heavy) for code, _, heavy in answered] == [(0, [])] * len(helps) + [(2, [])] * len(mistakes)
    assert all("'training'" in err for _, err, _ in answered[len(helps) :])
