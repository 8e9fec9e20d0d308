"""What a model calls things → what the dataset calls them: equal text, or a table of aliases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer


@dataclass(frozen=True, slots=True)
class Renaming:
    """Ways to give predictions other descriptions, one after the other; ``about``: where they come from."""

    steps: tuple[Callable[[Sequence[ImageAnswer]], list[ImageAnswer]], ...] = ()
    about: Mapping[str, object] | None = None

    def __call__(self, answers: Sequence[ImageAnswer]) -> list[ImageAnswer]:
        return reduce(lambda renamed, step: step(renamed), self.steps, list(answers))

    def note(self, before: Sequence[ImageAnswer], after: Sequence[ImageAnswer], most: int = 8) -> tuple[str, ...]:
        """One line that counts what was renamed to what; none without steps."""
        if not self.steps:
            return ()
        renamed = Counter(
            (old.desc, new.desc)
            for one, other in zip(before, after, strict=True)
            for old, new in zip(one.pred, other.pred, strict=True)
            if old.desc != new.desc
        )
        shown = ", ".join(f"{old!r} → {new!r} ({count})" for (old, new), count in renamed.most_common(most))
        more = f" and {len(renamed) - most} other names" if len(renamed) > most else ""
        return (f"{renamed.total()} predictions were renamed{': ' if shown else ''}{shown}{more}",)


AS_WRITTEN = Renaming()


def read_aliases(path: str | Path) -> dict[str, str]:
    """A YAML or JSON file of the form ``class: [alias, …]`` → alias to class.

    Raises:
        DataError: another form, or an alias of two classes.
    """
    import yaml

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
