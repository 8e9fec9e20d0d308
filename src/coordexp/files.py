"""Files that a kill may not leave half written: lines that a run appends, and small files that it writes whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from coordexp.durable import flush_file

_BLOCK = 1 << 16


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file whose last line a kill may have left unfinished: that part is no record, and goes."""
    with path.open("ab+") as file:
        end = _end_of_last_line(file)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
        file.write(line)


def _end_of_last_line(file: BinaryIO) -> int:
    """The byte behind the file's last line break; 0 without one. Looks from the end: one block of a whole file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file, or leave what was there: also when the run is killed meanwhile, or the power fails."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # before its name: otherwise a power loss may leave the name with nothing behind it
    os.replace(temporary, path)
    flush_file(path.parent)
