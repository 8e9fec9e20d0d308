"""Every shipped configuration, interrupted by every signal and by SIGKILL, and continued by the same command."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from as_shipped.starting import RowRun, interrupt_and_continue, run_of
from as_shipped.table import INTERRUPTIONS, STARTED, Row

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RowRun]:
    """The runs with which others are compared, by row."""
    return {}


@pytest.mark.parametrize("number", INTERRUPTIONS, ids=lambda number: number.name)
@pytest.mark.parametrize("row", STARTED, ids=lambda row: row.name)
def test_a_run_ends_in_time_and_continues_to_the_same_weights(
    row: Row, number: signal.Signals, uninterrupted: dict[str, RowRun], request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if row.uses_vllm:
        pytest.importorskip("vllm")
    servers: Any = request.getfixturevalue("server").servers if row.server else None
    if row.name not in uninterrupted:
        whole = run_of(row, tmp_path_factory.mktemp("whole"), servers=servers)
        whole.to_the_end()
        uninterrupted[row.name] = whole
    interrupt_and_continue(uninterrupted[row.name], [number], servers=servers, forks=False)
