"""What the learner touches of its libraries' insides is all there, looked for before a run, and listed in the docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import Trainer

from coordexp.errors import UpstreamChanged
from coordexp.training.build import build_trainer, check_run
from coordexp.training.saving import SavingTrainer
from coordexp.training.trainer import CoordExpTrainer
from coordexp.training.upstream_names import LEARNER, check_learner
from support.tiny_run import run_config

ROOT = Path(__file__).parents[3]


def test_the_installed_versions_have_every_name(caplog: pytest.LogCaptureFixture) -> None:
    check_learner()
    assert "not tested" not in caplog.text


def test_every_method_of_the_trainer_that_is_overridden_is_looked_for() -> None:
    """A hook that was renamed is silently never called again."""
    listed = {name.attribute.removeprefix("Trainer.") for name in LEARNER if name.attribute.startswith("Trainer.")}
    overridden = {
        name
        for cls in (SavingTrainer, CoordExpTrainer)
        for name, value in vars(cls).items()
        if callable(value) and hasattr(Trainer, name) and not name.startswith("__")
    }
    assert overridden - {"train"} <= listed  # ``train`` is called by us


@pytest.mark.parametrize(
    ("owner", "name"),
    [("transformers.trainer.Trainer", "_load_best_model"), ("accelerate.state.GradientState", "_set_sync_gradients")],
)
def test_a_run_with_a_renamed_hook_is_refused_before_its_model_is_loaded(
    owner: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = check_run(run_config(tmp_path, 2))
    monkeypatch.delattr(f"{owner}.{name}")
    loaded: list[Any] = []
    monkeypatch.setattr("coordexp.modeling.load.load_model", lambda *a, **k: loaded.append(a))
    with pytest.raises(UpstreamChanged, match=name):
        build_trainer(checked, Console(quiet=True))
    assert loaded == []


def test_a_hook_that_is_there_and_never_called_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hollow:
        """Has the names alone."""

    for name in {name.attribute.removeprefix("Trainer.") for name in LEARNER if name.attribute.startswith("Trainer.")}:
        setattr(Hollow, name, lambda self: None)
    monkeypatch.setattr("transformers.trainer.Trainer", Hollow)
    with pytest.raises(UpstreamChanged, match=r"Trainer … self\._save\( .*its source says nothing of it"):
        check_learner()


def test_a_source_is_read_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most names are looked for in two large classes; reading each of them again took five seconds of every start."""
    check_learner()
    monkeypatch.setattr("inspect.getsource", lambda found: pytest.fail(f"{found} is read again"))
    check_learner()


def test_the_docs_list_what_the_tables_hold() -> None:
    script = ROOT / "docs" / "generate_upgrades.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [
        line.split(" | ") for line in (ROOT / "docs" / "upgrades.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert len(rows) > 100
    assert [row[0] for row in rows if "`" not in row[1]] == [], "names that nobody uses"
