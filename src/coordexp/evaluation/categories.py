"""What a model calls things → what the dataset calls them: equal text, or a table of aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer


def read_aliases(path: str | Path) -> dict[str, str]:
    """A YAML or JSON file of the form ``class: [alias, …]`` → alias to class.

    Raises:
        DataError: another form, or an alias of two classes.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    if not isinstance(content, dict):
        raise DataError("expected a mapping of the form 'car: [automobile, sedan]'", path=path)
    class_of: dict[str, str] = {}
    for name, aliases in content.items():
        for alias in _aliases(name, aliases, path):
            if class_of.setdefault(_key(alias), name) != name:
                raise DataError(f"{alias!r} is an alias of both {class_of[_key(alias)]!r} and {name!r}", path=path)
    return class_of


def _aliases(name: Any, aliases: Any, path: Path) -> list[str]:
    if not isinstance(name, str) or not isinstance(aliases, list) or any(not isinstance(a, str) for a in aliases):
        raise DataError(f"{name!r}: expected a list of texts, e.g. 'car: [automobile, sedan]'", path=path)
    return [name, *aliases]


def apply_aliases(answers: Sequence[ImageAnswer], class_of: Mapping[str, str]) -> list[ImageAnswer]:
    """The same answers, predictions renamed; case and surrounding space of an alias do not matter."""
    return [
        replace(answer, pred=tuple(replace(obj, desc=class_of.get(_key(obj.desc), obj.desc)) for obj in answer.pred))
        for answer in answers
    ]


def _key(text: str) -> str:
    return text.strip().casefold()
