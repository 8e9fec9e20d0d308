"""Whose tokenizer shows a run's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordexp.errors import DataError
from coordexp.viewer.collect import find_checkpoint


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_an_unfinished_run_names_the_model_it_started_from(tmp_path: Path) -> None:
    model, run = checkpoint(tmp_path / "model"), tmp_path / "run"
    (run / "rollout_records").mkdir(parents=True)
    (run / "resolved_config.yaml").write_text(yaml.safe_dump({"model": {"model": str(model)}}), encoding="utf-8")
    (run / "run_manifest.json").write_text('{"seed": 1}', encoding="utf-8")
    assert find_checkpoint(run) == find_checkpoint(run / "rollout_records") == model


def test_a_finished_run_is_its_own_checkpoint(tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run")
    (run / "resolved_config.yaml").write_text("model: {model: elsewhere}", encoding="utf-8")
    assert find_checkpoint(run) == run


def test_a_broken_resolved_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "resolved_config.yaml").write_text("model: [", encoding="utf-8")
    with pytest.raises(DataError, match=r"--model.*|resolved_config\.yaml"):
        find_checkpoint(tmp_path)
