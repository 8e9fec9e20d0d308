"""One run to an output folder: two would write into each other's checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from coordexp import distributed
from coordexp.errors import ConfigError

LOCK = "run.lock"


@contextmanager
def only_run_in(output_dir: Path) -> Iterator[None]:
    """Hold ``output_dir`` for this run. A collective call.

    The kernel lets go of the lock however the process ends, so a lock file that lies there says nothing by itself.

    Raises:
        ConfigError: another process trains into the folder.
    """
    with distributed.raise_on_all_ranks("training.output_dir"):
        descriptor = _take(output_dir) if distributed.is_main() else None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take(output_dir: Path) -> int:
    output_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Of the process, not of the open file: loader processes do not inherit it, and network file systems know it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 1024).decode(errors="replace").strip() or "nobody wrote which"
        os.close(descriptor)
        raise ConfigError(
            f"training.output_dir: another run trains into {output_dir} ({holder}); end it, or choose another folder"
        ) from error
    os.ftruncate(descriptor, 0)
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    os.write(descriptor, json.dumps(told).encode())
    return descriptor
