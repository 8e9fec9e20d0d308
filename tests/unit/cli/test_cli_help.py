"""Help, usage errors, version and completion; help and configuration errors import nothing heavy."""

from __future__ import annotations

import pytest

import coordexp
from support.cli_runs import run_cli


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
