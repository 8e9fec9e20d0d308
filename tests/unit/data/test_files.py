"""Errors in writing name the file that was to be written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data.files import append_line, whole_file, write_atomically
from coordexp.data.images import save_image
from support.cli_runs import files_of_at_most


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_line(path, b"x" * 100),
        lambda path: write_atomically(path, "x" * 100),
        lambda path: save_image(Image.effect_noise((64, 64), 50), path),
    ],
    ids=["append", "whole", "image"],
)
def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "a.png"
    with files_of_at_most(50), pytest.raises(OSError, match="File too large") as raised:
        write(path)
    assert raised.value.filename == str(path)


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


def test_an_error_names_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "a.yaml"
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(path, "a: 1")
    assert raised.value.filename == str(path)


def test_a_file_can_have_the_longest_name(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127 + "a")  # 255 bytes
    write_atomically(path, "whole")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["whole"]


def test_two_writers_with_one_process_number_do_not_mix(tmp_path: Path) -> None:
    """Processes of two containers on one disk."""
    path = tmp_path / "a.txt"
    with whole_file(path) as first:
        first.write("first")
        with whole_file(path) as second:
            second.write("2")
        assert path.read_text() == "2"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
