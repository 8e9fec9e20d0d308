"""The class names of a checkpoint's training data, which give its predictions stable class ids: :data:`CLASSES`, a JSON
next to the weights. Training writes it, inference reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from coordexp.data.joined import distinct_descs
from coordexp.errors import CheckpointError
from coordexp.records import ImageRecord

CLASSES = "classes.json"
MOST = 10_000  # more distinct descriptions are free text, not classes


def class_list(records: Sequence[ImageRecord]) -> tuple[str, ...]:
    """The distinct descriptions of ``records`` in alphabetical order; empty if there are more than :data:`MOST`."""
    names = distinct_descs(records)
    return tuple(sorted(names)) if len(names) <= MOST else ()


def read_class_list(folder: str | Path) -> tuple[str, ...]:
    """The class list of the checkpoint in ``folder``; empty if it has none. Raises CheckpointError."""
    path = Path(folder) / CLASSES
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["classes"]
        if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
            raise ValueError("classes must be a list of names")
        return tuple(names)
    except FileNotFoundError:
        return ()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore the checkpoint's files") from error


def write_class_list(names: Sequence[str], folder: str | Path) -> None:
    """Write :data:`CLASSES` into ``folder``; without names remove the file of an earlier run."""
    path = Path(folder) / CLASSES
    if names:
        content = {"schema_version": 1, "classes": list(names)}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
