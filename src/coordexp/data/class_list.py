"""Which number a class has: its position in a class list.

The list is that of the checkpoint's card, or of the dataset, or the user's own; never that of the names which some
images happen to contain. All names outside of it share the next number, :data:`OTHER_NAMES`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.joined import distinct_descs
from coordexp.errors import ConfigError, DataError
from coordexp.reading import read_text, read_yaml
from coordexp.records import ImageRecord

MOST = 10_000  # more distinct descriptions are free text, not classes
OTHER_NAMES = "(not in the class list)"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ClassNumbers:
    """``listed``: the number of each name of the list; ``other``: the number that all other names share."""

    listed: Mapping[str, int]
    other: int

    @classmethod
    def of_list(cls, names: Iterable[str], first: int) -> ClassNumbers:
        """Numbers by position, from ``first``: 0 for YOLO and ``supervision``, 1 for COCO."""
        listed = {name: number for number, name in enumerate(names, start=first)}
        return cls(listed, first + len(listed))

    @classmethod
    def given(cls, listed: Mapping[str, int], first: int) -> ClassNumbers:
        """Numbers from a user's file, which may have gaps."""
        return cls(listed, max([first - 1, *listed.values()]) + 1)

    def __getitem__(self, name: str) -> int:
        return self.listed.get(name, self.other)

    def names(self, used: Iterable[str]) -> dict[int, str]:
        """Every number with its name, in order; :data:`OTHER_NAMES` only if one of ``used`` is such a name."""
        by_number = {number: name for name, number in sorted(self.listed.items(), key=lambda item: item[1])}
        return by_number | ({self.other: OTHER_NAMES} if any(name not in self.listed for name in used) else {})

    def note(self, used: Iterable[str], what: str = "objects") -> str | None:
        """A sentence about the names of ``used``, one for each of ``what``, that are not in the list; None if all
        are."""
        others = Counter(name for name in used if name not in self.listed)
        if not others:
            return None
        named = ", ".join(f"{name!r} ({count})" for name, count in others.most_common(_SHOWN))
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        return (
            f"{others.total()} {what} of {len(others)} names outside of the class list share number {self.other}, "
            f"{OTHER_NAMES!r}: {named}{more}"
        )


def read_class_list(path: Path) -> dict[str, int]:
    """The names of a file with their numbers, by :func:`names_of_yaml` (a ``data.yaml``) or :func:`names_of_lines`.
    Raises DataError for a file that cannot be read, has no name, or a name twice."""
    wanted = "expected class names, one a line, or names of a data.yaml"
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    by_number = names_of_yaml(read_yaml(path), path) if is_yaml else names_of_lines(read_text(path))
    if not by_number:
        raise DataError(f"has no name; {wanted}", path=path)
    numbers: dict[str, int] = {}
    for number, name in by_number.items():
        if name in numbers:
            raise DataError(f"{name!r} is name {numbers[name]} and name {number}; remove one", path=path)
        numbers[name] = number
    return numbers


def names_of_lines(text: str) -> dict[int, str]:
    """Names by number, one a line: blank lines are no names, but count."""
    return {number: line.strip() for number, line in enumerate(text.splitlines()) if line.strip()}


def names_of_yaml(content: object, path: Path) -> dict[int, str]:
    """The ``names`` of a ``data.yaml``'s ``content`` by number: a list, or a mapping from numbers. Raises DataError for
    others, and for a name that YAML does not read as text (``no``, ``1.0``)."""
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        raise DataError("names must be a list of class names, or a mapping from numbers to them", path=path)
    for key, name in names.items():
        if not isinstance(name, str):
            raise DataError(f"names[{key}] is {name!r}, not text; put it in quotes", path=path)
    return {int(key): name for key, name in names.items()}


def class_list(records: Sequence[ImageRecord]) -> tuple[str, ...]:
    """The distinct descriptions of ``records`` in alphabetical order; empty if there are more than :data:`MOST`."""
    names = distinct_descs(records)
    return tuple(sorted(names)) if len(names) <= MOST else ()


def check_known(names: Iterable[str], listed: Sequence[str], whose: object) -> None:
    """Raise ConfigError for a name that is not in the class list of ``whose``, with the nearest one. An empty list has
    every name."""
    known = set(listed)
    unknown = [name for name in names if name not in known] if known else []
    if not unknown:
        return
    lines = []
    for name in unknown[:_SHOWN]:
        near = difflib.get_close_matches(name, listed, n=1, cutoff=0.5)
        lines.append(f"classes: {name!r} is not a class of {whose}" + (f"; did you mean {near[0]!r}?" if near else ""))
    shown = ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
    more = f"and {len(unknown) - _SHOWN} more names; " if len(unknown) > _SHOWN else ""
    raise ConfigError("\n".join([*lines, f"{more}its classes are: {shown}"]))
