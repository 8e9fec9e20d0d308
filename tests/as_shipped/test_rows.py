"""Each shipped configuration, by its own command, from its first line to its last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from as_shipped.starting import check_row
from as_shipped.table import KILL, LAUNCH, ROWS, TERM, TORCHRUN, Row, interrupted, row

# Rows with servers are in test_servers.py.
STARTED = [one for one in ROWS if one.same_as is None and one.server is None and one.command != LAUNCH]


@pytest.mark.parametrize("one", STARTED, ids=lambda one: one.name)
def test_a_shipped_configuration_runs_to_its_end(one: Row, tmp_path: Path) -> None:
    if one.uses_vllm:
        pytest.importorskip("vllm")
    check_row(one, tmp_path)


def test_two_ranks_under_torchrun_are_interrupted_and_continued(tmp_path: Path) -> None:
    """As the first lines of the file start it on several GPUs."""
    by_two = replace(row("stage2_rollout_aligned/rewritten"), command=TORCHRUN, ranks=2)
    check_row(replace(by_two, again=interrupted((TERM, 1), (KILL, 2))), tmp_path)
