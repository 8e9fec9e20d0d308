from __future__ import annotations

from functools import partial

import pytest

from coordexp.modeling.load import LoadedModel
from support.cli_runs import Cli, run_cli
from support.tiny_run import load_tiny


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("export", "coco", …)`` runs ``coordexp export coco …`` in this process."""
    return partial(run_cli, capsys)
