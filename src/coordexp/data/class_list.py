"""Which number a class has: its position in the class list that :func:`choose_list` chooses.

All names outside of the list share the next number, :data:`OTHER_NAMES`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from coordexp.data.joined import distinct_descs
from coordexp.data.jsonl import clean_desc, read_jsonl
from coordexp.errors import ConfigError, DataError
from coordexp.reading import read_text, read_yaml
from coordexp.records import ImageRecord

MOST = 10_000  # more distinct descriptions are free text, not classes
OTHER_NAMES = "(not in the class list)"
_SHOWN = 8
_NOT_LISTS = (".json", ".csv", ".tsv", ".xml", ".pbtxt")  # their lines are not names
ClassList = Sequence[str] | Mapping[str, int]
"""Names in the order of their numbers; a mapping has the user's own numbers, which may have gaps."""


@dataclass(frozen=True, slots=True)
class ClassNumbers:
    """``listed``: the number of each name of the list; ``other``: the number that all other names share."""

    listed: Mapping[str, int]
    other: int

    @classmethod
    def of(cls, classes: ClassList, first: int) -> ClassNumbers:
        """The numbers of a mapping, or positions from ``first``: 0 for YOLO and ``supervision``, 1 for COCO."""
        positions = {name: number for number, name in enumerate(classes, start=first)}
        listed = classes if isinstance(classes, Mapping) else positions
        # A list that an export wrote may have a number for other names already.
        return cls(listed, listed.get(OTHER_NAMES, max([first - 1, *listed.values()]) + 1))

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


def choose_list(
    users: ClassList | None = None,
    *,
    checkpoint: Sequence[str] = (),
    class_names: Sequence[str] = (),
    records: Sequence[ImageRecord] = (),
) -> ClassList:
    """The list by which classes are numbered, empty if there is none. In order of precedence:

    1. ``users``, the user's own list, as :func:`checked_list` returns it: one without names is not the same as no list.
    2. ``checkpoint``: the list on the card of the checkpoint that answered; saved predictions keep it.
    3. ``class_names``: those that answers may use, of a checkpoint without a list.
    4. ``records``: the :func:`class_list` of a dataset that is exported itself, or that a checkpoint is trained on.

    Never the names that some answers happen to contain: then the next folder would have other numbers.
    """
    if users is None:
        return checkpoint or class_names or class_list(records)
    return checked_list(users)


def checked_list(users: object) -> ClassList:
    """A user's list with its names :func:`as_written`. Raises DataError if it has no order or no name, a name twice,
    another name than text, or another number than a whole one."""
    problem = f"the class list is {users!r}; give a list of names, or leave it out"
    if not isinstance(users, Iterable) or isinstance(users, str | bytes | set | frozenset):
        raise DataError(problem)
    pairs = list(users.items() if isinstance(users, Mapping) else ((name, at) for at, name in enumerate(users)))
    if not pairs:
        raise DataError(problem)
    for given, number in pairs:
        if not isinstance(given, str):
            raise DataError(f"the class list has {given!r}, which is not text; give names, or {{name: number}}")
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
            raise DataError(f"the class list gives {given!r} the number {number!r}; give whole numbers from 0")
    by_name = _numbers((given, int(number)) for given, number in pairs)
    return by_name if isinstance(users, Mapping) else tuple(by_name)


def _numbers(pairs: Iterable[tuple[str, int]], path: Path | None = None) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for given, number in pairs:
        name = as_written(given)
        if name in numbers:
            raise DataError(
                f"{name!r} is name {numbers[name]} and name {number} of the class list; remove one", path=path
            )
        numbers[name] = number
    return numbers


def read_class_list(path: Path, first: int = 0) -> ClassList:
    """The list in a user's file: the names in the annotations of a JSONL in alphabetical order, those of a
    ``data.yaml`` (:func:`names_of_yaml`), or one a line (:func:`names_of_lines`). Raises DataError for a file that
    cannot be read, has no name, or a name twice.

    Files count from 0, and ``first`` (as for :meth:`ClassNumbers.of`) is added. A YAML mapping without number 0 has the
    user's own numbers, which stay.
    """
    suffix = path.suffix.lower()
    if suffix in _NOT_LISTS:
        raise DataError(
            "is not a class list; expected a text file with one name a line, a data.yaml, or a .jsonl dataset. export "
            "takes COCO's categories with --annotations",
            path=path,
        )
    if suffix == ".jsonl":
        by_number = dict(enumerate(sorted(distinct_descs(read_jsonl(path)))))
    elif suffix in (".yaml", ".yml"):
        by_number = names_of_yaml(read_yaml(path), path)
    else:
        by_number = names_of_lines(read_text(path))
    if not by_number:
        raise DataError("has no name; expected class names, one a line, names of a data.yaml, or a dataset", path=path)
    added = 0 if suffix in (".yaml", ".yml") and 0 not in by_number else first
    numbers = _numbers(((name, number) for number, name in sorted(by_number.items())), path)
    numbers = {name: number + added for name, number in numbers.items()}
    return numbers if [*numbers.values()] != [*range(first, first + len(numbers))] else tuple(numbers)


def as_written(name: str) -> str:
    """A name as datasets contain it and models write it (:func:`~coordexp.data.jsonl.clean_desc`); one that they must
    not write is returned as it is."""
    try:
        return clean_desc(name)
    except ValueError:
        return name


def names_of_lines(text: str) -> dict[int, str]:
    """Names by number, one a line: blank lines count, but name no class."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # splitlines would cut at U+2028 too
    return {number: line.strip() for number, line in enumerate(lines) if line.strip()}


def names_of_yaml(content: object, path: Path) -> dict[int, str]:
    """The ``names`` of a ``data.yaml``'s ``content`` by number: a list, or a mapping from numbers. Raises DataError for
    others, for a number that two names have, for a name that YAML does not read as text (``no``, ``1.0``), and for
    another ``nc``."""
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        raise DataError("names must be a list of class names, or a mapping from numbers to them", path=path)
    for key, name in names.items():
        if not isinstance(name, str):
            raise DataError(f"names[{key}] is {name!r}, not text; put it in quotes", path=path)
    by_number = {int(key): name for key, name in names.items()}
    if len(by_number) != len(names):
        raise DataError("two of names have one number, such as 0 and '0'; correct one of them", path=path)
    if isinstance(content, dict) and content.get("nc", len(names)) != len(names):
        raise DataError(f"nc is {content['nc']!r}, but names has {len(names)}; correct one of them", path=path)
    return by_number


def class_list(records: Sequence[ImageRecord]) -> tuple[str, ...]:
    """The distinct descriptions of ``records`` in alphabetical order; empty if there are more than :data:`MOST`."""
    names = distinct_descs(records)
    return tuple(sorted(names)) if len(names) <= MOST else ()


def unseen_note(train: Sequence[ImageRecord], others: Sequence[ImageRecord]) -> str | None:
    """A sentence about names of ``others`` that no annotation of ``train`` has, such as ``Car`` next to ``car``: a
    model hardly writes what it was never shown. None if there is none, or if descriptions are free text."""
    known, names = distinct_descs(train), distinct_descs(others)
    unseen = sorted(names - known)
    if not unseen or not known or max(len(known), len(names)) > MOST:
        return None
    by_folded = {name.casefold(): name for name in sorted(known)}
    shown = []
    for name in unseen[:_SHOWN]:
        near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.8)
        shown.append(f"{name!r}" + (f" (training has {by_folded[near[0]]!r})" if near else ""))
    more = f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
    return (
        f"{len(unseen)} of {len(names)} class names are in no training annotation: {', '.join(shown)}{more}; a model "
        "hardly writes them, and the figures count their objects as missed"
    )


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
