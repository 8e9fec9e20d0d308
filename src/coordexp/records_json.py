"""The JSON of records that are written to disk: predictions, rollout records, losses, pending answers.

Any frozen dataclass of plain fields, tuples, mappings, enums and further dataclasses is written and read without code
of its own. Floats survive exactly. Reading is strict: nothing is coerced, ranges and ``__post_init__`` are checked;
unknown keys are ignored, so a format that must not be misread carries a ``schema_version``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coordexp.errors import CoordExpError, DataError

Record = TypeVar("Record")


def to_json(record: Any) -> bytes:
    """``record`` as one line of JSON, without a line break; NumPy arrays become lists and paths texts.

    Raises:
        UnicodeEncodeError: a text that UTF-8 cannot write (a lone surrogate in a file name, say).
    """
    return msgspec.json.encode(record, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def from_json(
    kind: type[Record], data: bytes | str, what: str, *, path: Path | None = None, line: int | None = None
) -> Record:
    """The inverse of :func:`to_json`. ``what`` names the record in errors, ``path`` and ``line`` its place.

    Raises:
        DataError: the text is not such a record.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, CoordExpError, ValueError, RecursionError) as error:
        raise DataError(f"not {what}: {type(error).__name__}: {error}", path=path, line=line) from error


def read_lines(path: Path, *, whole: bool = False) -> Iterator[tuple[int, bytes]]:
    """Line numbers and non-empty lines. ``whole`` leaves out text after the last line break: an unfinished line.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    for number, line in enumerate(lines[:-1] if whole else lines, start=1):
        if line.strip():
            yield number, line
