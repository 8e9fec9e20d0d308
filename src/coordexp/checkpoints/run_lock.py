"""The lock of a run's folder, which one run holds at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from coordexp.errors import ConfigError

LOCK = "run.lock"


def take_lock(descriptor: int, output_dir: Path) -> str | None:
    """Lock an open lock file for this process. Raises ConfigError if another run holds it. Returns: None, or why it is
    not locked, on file systems without locks (Lustre's noflock, NFS without its lock daemon).

    The lock belongs to the process, not to the open file: loader processes do not inherit it, network file systems
    support it, and the kernel releases it however the process ends."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return str(error)
        holder = os.read(descriptor, 1024).decode(errors="replace").strip() or "unknown process"
        raise ConfigError(
            f"training.output_dir: another run trains into {output_dir} ({holder}); end it, or choose another folder"
        ) from error
    return None


def check_not_running(output_dir: Path) -> None:
    """Raise ConfigError if another process trains into the folder now; :func:`take_lock` decides later."""
    if not (output_dir / LOCK).is_file():
        return
    descriptor = os.open(output_dir / LOCK, os.O_RDWR)
    try:
        take_lock(descriptor, output_dir)
    finally:
        os.close(descriptor)
