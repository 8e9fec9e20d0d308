"""The error of a checkpoint that cannot be written: which disk, what is missing, what is kept."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coordexp.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What torch's writer says of a short write, and safetensors of the system's error.
_SAID_OF_FULL = re.compile(
    r"unexpected pos \d+|file write failed|PytorchStreamWriter|No space left|os error (28|122|27)\b"
)


@contextmanager
def writing(folder: Path, needed_bytes: int, kept: str) -> Iterator[None]:
    """Writes a checkpoint to ``folder``. ``needed_bytes``: about what it takes; ``kept``: a sentence on what is saved.

    Raises:
        CheckpointError: in place of whatever a library says of a disk that took no more.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full and not _SAID_OF_FULL.search(str(error)):
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(f"{folder} cannot be written ({error}). {kept}") from error
        raise CheckpointError(
            f"{folder} cannot be written: its disk is full ({_room(folder)}; a checkpoint takes about "
            f"{_mb(needed_bytes)}). {kept}. Make room, or lower training.save_total_limit"
        ) from error


def _room(folder: Path) -> str:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return f"{_mb(usage.free)} of {_mb(usage.total)} free"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
