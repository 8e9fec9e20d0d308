"""A user's numbers of classes and images, which exports keep: of a class list, a COCO or an LVIS file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordexp.checkpoints.card import read_card
from coordexp.data.class_list import ClassList, as_written, read_class_list
from coordexp.data.convert.coco import name_as_lvis
from coordexp.errors import ConfigError, DataError
from coordexp.reading import read_json


@dataclass(frozen=True, slots=True)
class UsersTerms:
    """The list that numbers classes (None or empty: the names that occur do), and numbers of images by file name.
    ``notes``: about names that several entries of the user's file have."""

    classes: ClassList | None = None
    images: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _by_name(entries: Sequence[Any], key: str, what: str, path: Path) -> tuple[dict[str, int], list[str]]:
    # The first id of each name, and a note about names that several entries have.
    ids_of: dict[str, dict[int, None]] = {}
    name_of: dict[int, str] = {}
    for index, entry in enumerate(entries):
        named, given = (entry.get(one) if isinstance(entry, dict) else None for one in (key, "id"))
        if named is None or given is None:
            raise DataError(f"{what}[{index}] has no {key if named is None else 'id'}; add it", path=path)
        name = str(named)
        number: Any = int(given) if isinstance(given, str) and given.isdecimal() else given
        if type(number) not in (int, float) or number < 0 or number != number // 1:
            raise DataError(f"the id of {name!r} in {what} is {given!r}; give whole numbers from 0", path=path)
        number = int(number)
        if (other := name_of.setdefault(number, name)) != name:
            raise DataError(f"{what} {other!r} and {name!r} have one id, {number}; give each its own", path=path)
        ids_of.setdefault(name, {})[number] = None
    notes = [
        f"{what} {', '.join(map(str, ids))} have one {key}, {name!r}: the first is used"
        for name, ids in ids_of.items()
        if len(ids) > 1
    ]
    more = f" (and {len(notes) - 1} more names so)" if len(notes) > 1 else ""
    return {name: next(iter(ids)) for name, ids in ids_of.items()}, [note + more for note in notes[:1]]


def _is_of_lvis(image: Mapping[str, Any]) -> bool:
    # LVIS v1 has no file names, v0.5 has them; only LVIS says which classes are absent from an image.
    return "neg_category_ids" in image or ("coco_url" in image and not image.get("file_name"))


def class_list_at(path: Path, first: int = 0) -> ClassList:
    """The class list of a checkpoint's folder, or of a file as :func:`read_class_list`. Raises DataError without one,
    CheckpointError for an unreadable card."""
    if not path.is_dir():
        return read_class_list(path, first)
    if not (listed := read_card(path).classes):
        raise DataError("is a folder without a class list; name a file, or a checkpoint that has one", path=path)
    return listed


def read_terms(annotations: Path | None, classes: Path | None, first: int = 0) -> UsersTerms:
    """The ids of a COCO or LVIS file's categories and images; or a class list, as :func:`class_list_at`. Raises
    ConfigError for both, DataError for a file without any, and for an id that is not a whole number or that two names
    have."""
    if annotations is not None and classes is not None:
        raise ConfigError("--annotations has class numbers too; leave out --classes")
    if annotations is None:
        return UsersTerms(None if classes is None else class_list_at(classes, first))
    content = read_json(annotations)
    for key in ("images", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"no list {key!r} at the top level; expected COCO annotations", path=annotations)
    if any(isinstance(one, dict) and _is_of_lvis(one) for one in content["images"]):
        name_as_lvis(content)
    for category in content["categories"]:
        if isinstance(category, dict) and isinstance(category.get("name"), str):
            category["name"] = as_written(category["name"])
    names, joined = _by_name(content["categories"], "name", "categories", annotations)
    images, listed_twice = _by_name(content["images"], "file_name", "images", annotations)
    if not names:
        raise DataError("has no categories, so classes have no ids; add them", path=annotations)
    return UsersTerms(names, images, (*joined, *listed_twice))
