"""Each shipped configuration, by its own command, from its first line to its last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from as_shipped.starting import check_row, interrupt_and_continue, run_of
from as_shipped.table import KILL, LAUNCH, ROWS, STARTED, TERM, TORCHRUN, Row, row

# Rows with servers are in test_servers.py.
WITHOUT_SERVERS = [one for one in STARTED if one.server is None and one.command != LAUNCH]


def named(one: Row) -> str:
    return one.name if one.failed is None else f"{one.name}, which failed at b290dcee"


@pytest.mark.parametrize("one", WITHOUT_SERVERS, ids=named)
def test_a_shipped_configuration_runs_to_its_end(one: Row, tmp_path: Path) -> None:
    if one.uses_vllm:
        pytest.importorskip("vllm")
    check_row(one, tmp_path)


@pytest.mark.parametrize("one", [one for one in ROWS if one.same_as], ids=named)
def test_a_shipped_configuration_of_the_same_run_runs_to_its_end(one: Row, tmp_path: Path) -> None:
    whole = run_of(one, tmp_path)
    whole.to_the_end()
    whole.answers()


def test_two_ranks_under_torchrun_are_interrupted_and_continued(tmp_path: Path) -> None:
    """As the first lines of the file start it on several GPUs."""
    whole = run_of(replace(row("stage2_rollout_aligned/rewritten"), command=TORCHRUN, ranks=2), tmp_path)
    whole.to_the_end()
    interrupt_and_continue(whole, [TERM, KILL])
