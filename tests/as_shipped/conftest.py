"""The server that rows share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from as_shipped.starting import RowRun, is_healthy, run_of, started
from as_shipped.table import SERVED, row
from support.rollout_servers import BOOT_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowRun]:
    """``coordexp serve`` of the row that the others name, up and answering."""
    one = run_of(row(SERVED), tmp_path_factory.mktemp("serve"))
    process = started(one.command_by("coordexp serve configs/{name}.yaml --index 0"), one.folder, **one.environment)
    try:
        process.until(lambda: is_healthy(one), BOOT_S, "a healthy server")
        yield one
        process.process.terminate()
        process.end(30.0, "the server's end")
        process.nothing_is_left()
    finally:
        process.kill()
