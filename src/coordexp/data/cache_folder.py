"""The folder for what can be computed again: validated datasets, checked images, indexes of shards."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coordexp import distributed
from coordexp.errors import DataError

logger = logging.getLogger("coordexp")

VARIABLE = "COORDEXP_CACHE"
"""The environment variable that names the folder. Everything in it can be deleted at any time."""


def cache_folder() -> Path:
    """The first writable folder of: :data:`VARIABLE`, ``coordexp`` in the user's cache folder (``XDG_CACHE_HOME``, else
    ``~/.cache``), a folder of the user's own among temporary files. The log names those that are passed over.

    Raises:
        DataError: none is writable.
    """
    refused: list[str] = []
    for folder in _candidates():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.parent == Path(tempfile.gettempdir()) and folder.stat().st_uid != os.getuid():
                raise PermissionError(None, "another user's")  # who could put files there that we would train on
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
            continue
        if refused and distributed.is_main():
            logger.warning(
                "the dataset cache is in %s, because %s cannot be written to; set %s to another folder",
                *(folder, ", ".join(refused), VARIABLE),
            )
        return folder
    raise DataError(f"no folder for the dataset cache can be written to: {', '.join(refused)}; set {VARIABLE}")


def _candidates() -> Iterator[Path]:
    if named := os.environ.get(VARIABLE):
        yield Path(named).expanduser().absolute()
    users = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        yield (Path(users) if os.path.isabs(users) else Path.home() / ".cache") / "coordexp"
    yield Path(tempfile.gettempdir()) / f"coordexp-{os.getuid()}"
