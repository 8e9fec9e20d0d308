"""The closed list of class names that a caller gives: checked, and read from wherever it stands. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordexp.errors import ConfigError, DataError


def read_classes(given: str | None) -> tuple[str, ...]:
    """Of ``--classes``: names between commas, a text file with a name a line, or a JSONL, whose own names are meant;
    empty for None.

    Raises:
        ConfigError: no name, or one that no dataset may hold. DataError: a file that cannot be read.
    """
    if given is None:
        return ()
    path = Path(given)
    if not path.is_file():
        if path.suffix in (".txt", ".jsonl"):
            raise DataError("not found; --classes takes names between commas, a .txt or a .jsonl", path=path)
        return check_classes(given.split(","))
    if path.suffix == ".jsonl":
        from coordexp.data.jsonl import read_jsonl

        return _some(check_classes(sorted({obj.desc for record in read_jsonl(path) for obj in record.objects})), path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    return _some(check_classes([line for line in lines if line.strip()]), path)


def _some(names: tuple[str, ...], path: Path) -> tuple[str, ...]:
    if not names:
        raise DataError("holds no name; without --classes any is allowed", path=path)
    return names


def check_classes(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a dataset would hold them, each once.

    Raises:
        ConfigError: one that no dataset may hold, or a single text in place of a list.
    """
    from coordexp.data.record_line import clean_desc

    if isinstance(names, str):
        raise ConfigError(f"classes is the text {names!r}; give a list of names")
    try:
        return tuple(dict.fromkeys(clean_desc(name) for name in names))
    except ValueError as error:
        raise ConfigError(f"a class name is refused: {error}") from error
