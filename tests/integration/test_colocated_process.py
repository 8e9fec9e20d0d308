"""The learner's process with a real engine in it: as it was, after start, rollouts, pushes and shutdown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration import colocated_state_worker
from support.forked import Handle, forked


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process that has not imported vLLM: its import changes things too."""
    folder = tmp_path_factory.mktemp("state")
    log = folder / "log"
    process = Handle(forked(colocated_state_worker.main, folder, log=log))
    assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("after", ["start", "rollouts", "second push", "shutdown"])
def test_nothing_of_the_learners_process_has_changed(after: str, seen: dict[str, Any]) -> None:
    """Thread settings, random states, environment, process group, signal handlers."""
    assert seen["answers"] == 3
    assert seen[after] == {}


def test_the_learners_group_outlives_the_engine(seen: dict[str, Any]) -> None:
    assert seen["the group still works"] == 1.0


def test_an_engine_does_not_import_ms_swift(seen: dict[str, Any]) -> None:
    """Its plugin for vLLM would, in every process of every engine, and take seconds."""
    assert seen["imported"] == []
