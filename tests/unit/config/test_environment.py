"""Checks of the machine and of transformers' names when a run starts; the file itself is valid everywhere."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from coordexp.config import ConfigError, parse_config
from coordexp.config.checks import check_training_environment
from support.config_samples import set_key, stage1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optim", "adamw_torc", "adamw_torch"),
        ("optim", "galore_adamw", "galore_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("report_to", ["tensorboard", "tensorbord"], "tensorboard"),
        ("report_to", "neptune", "not installed"),
    ],
)
def test_unknown_names_and_missing_packages_are_refused_when_a_run_starts(key: str, value: Any, words: str) -> None:
    config = parse_config(set_key(stage1(), f"training.{key}", value))
    with pytest.raises(ConfigError, match=rf"^training\.{key}: .*{words}"):
        check_training_environment(config)


def test_packing_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "binpacking" else find_spec(name))
    with pytest.raises(ConfigError, match=r"training\.packing: .*pip install binpacking"):
        check_training_environment(parse_config(stage1()))
    check_training_environment(parse_config(set_key(stage1(), "training.packing", False)))


@pytest.mark.parametrize("report_to", ["none", [], ["tensorboard", "kubeflow"]])
def test_a_default_run_needs_no_extra_package(report_to: Any) -> None:
    check_training_environment(parse_config(set_key(stage1(), "training.report_to", report_to)))
