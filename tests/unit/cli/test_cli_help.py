"""Help, usage errors, version and completion; help and configuration errors import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import coordexp
from support.cli_runs import run_cli
from support.config_samples import stage1, write_yaml

HEAVY = {"torch", "transformers", "torchvision", "accelerate", "numpy", "scipy", "PIL"}


def modules_after(*argv: str) -> set[str]:
    """Top-level names of all modules that ``coordexp *argv`` imported in a process of its own."""
    code = (
        "import json, sys\n"
        "from coordexp.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "argv", ["--help", "train --help", "evaluate --help", "data convert voc --help", "data scenes --help", "--version"]
)
def test_help_imports_nothing_heavy(argv: str) -> None:
    assert not modules_after(*argv.split()) & HEAVY


@pytest.mark.parametrize("command", ["train", "evaluate", "config check"])
def test_a_mistake_in_the_yaml_shows_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    path = write_yaml(tmp_path, {**stage1(), "trainnig": {}})
    assert not modules_after(*command.split(), str(path)) & HEAVY


@pytest.mark.parametrize("argv", ["unknown", "train", "train a.yaml --steps=3", "data scenes --out x", "--verbosity"])
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], argv: str) -> None:
    outcome = run_cli(capsys, *argv.split())
    assert outcome.code == 2
    assert "Usage" in outcome.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(capsys, "--version").out == run_cli(capsys, "-V").out == f"coordexp {coordexp.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_commands(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_COORDEXP_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "coordexp data con")
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "coordexp data con")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "convert" in run_cli(capsys).out
