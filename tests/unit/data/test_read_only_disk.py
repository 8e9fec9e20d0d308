"""Errors of a disk that takes no files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from coordexp.data.files import write_atomically


def test_a_read_only_disk_is_named_by_the_file_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a temporary one, the removal of which fails too."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        write_atomically(tmp_path / "train.jsonl", "{}\n")
    assert caught.value.filename == str(tmp_path / "train.jsonl")
