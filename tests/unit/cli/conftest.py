from __future__ import annotations

from pathlib import Path

import pytest

from support.cli_runs import small_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")
