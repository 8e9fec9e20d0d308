"""Temporary folders: those of processes that SIGKILL ended are removed, those of living ones are not."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from coordexp.temporary import temporary_folder

HOLD = """
import sys, time
from coordexp.temporary import temporary_folder
with temporary_folder("coordexp-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_next_process_removes_the_folder_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = tmp_path / "coordexp-other"
    others.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        for folder in (held, others):
            os.utime(folder, (1, 1))
        with temporary_folder("coordexp-test-") as own:
            assert own.is_dir() and (held / "file").is_file(), "its process lives"
        assert not own.exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert held.is_dir()
    with temporary_folder("coordexp-test-"):
        assert not held.exists() and others.is_dir()


def test_a_folder_that_was_just_made_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may not hold the lock yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    young = tmp_path / "coordexp-test-1"
    young.mkdir()
    with temporary_folder("coordexp-test-"):
        assert young.is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_will_do(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre's noflock, NFS without its lock daemon."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    old = tmp_path / "coordexp-test-1"
    old.mkdir()
    os.utime(old, (1, 1))
    with temporary_folder("coordexp-test-") as folder:
        assert folder.is_dir() and old.is_dir(), "whose process may live"
    assert not folder.exists()
