"""Where validated datasets are kept between starts."""

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
"""The environment variable that names the folder. Everything in it can be made again: delete it as you like."""


def cache_folder() -> Path:
    """The first of these that can be written to: :data:`VARIABLE`, ``coordexp`` in the user's cache folder
    (``XDG_CACHE_HOME``, else ``~/.cache``), a folder of the user's own among temporary files. Passing one over is said
    in the log.

    Raises:
        DataError: none can be written to.
    """
    refused: list[str] = []
    for folder in _places():
        try:
            _try_to_write(folder)
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
            continue
        if refused and distributed.is_main():
            logger.warning(
                "validated datasets are kept in %s, as nothing can be written to %s; name a folder with %s",
                *(folder, ", ".join(refused), VARIABLE),
            )
        return folder
    raise DataError(f"validated datasets can be kept nowhere: {', '.join(refused)}; name a folder with {VARIABLE}")


def _places() -> Iterator[Path]:
    if named := os.environ.get(VARIABLE):
        yield Path(named).expanduser().absolute()
    users = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        yield (Path(users) if os.path.isabs(users) else Path.home() / ".cache") / "coordexp"
    yield Path(tempfile.gettempdir()) / f"coordexp-{os.getuid()}"


def _try_to_write(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent == Path(tempfile.gettempdir()) and folder.stat().st_uid != os.getuid():
        raise PermissionError(None, "another user's", str(folder))  # who could lay files there for us to train on
    with tempfile.TemporaryFile(dir=folder):
        pass
