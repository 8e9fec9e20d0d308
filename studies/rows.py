"""Result files of the studies, one JSON object a line; a module of their scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; none if nothing has run yet. Ends the program at a line that was not written to its
    end, or a run would append to it."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise SystemExit(
                f"{path}:{number}: no whole line of JSON ({error}); delete the line, and `run` repeats what is missing"
            ) from None
    return rows
