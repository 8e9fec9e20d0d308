"""Where a VOC folder keeps its parts: whatever their case and depth, or with each XML file beside its image."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.convert.sources import files_below
from coordexp.errors import DataError

ANNOTATIONS, IMAGES = "Annotations", "JPEGImages"
_ALSO_IMAGES = ("JPEGImages", "images")  # what other tools call it
_ALSO_SPLITS = {"val": ("val", "valid", "validation"), "valid": ("valid", "val", "validation")}


@dataclass(frozen=True, slots=True)
class VocLayout:
    """``xml_dir``, ``image_dir``: may be one folder. ``split_file``: None takes every annotation. ``note``: what to
    say where it was not what was asked for first; empty where it was."""

    xml_dir: Path
    image_dir: Path
    split_file: Path | None
    note: str = ""


def find_layout(root: Path, split: str | None, annotations_dir: str | Path, images_dir: str | Path) -> VocLayout:
    """The folders as named, else the same names in another case or deeper below ``root`` (``images`` for
    ``JPEGImages`` too), else a folder in which XML files lie beside their images: ``root``, or its part ``split``.

    Raises:
        DataError: none of these, or several; or no such split.
    """
    if not root.is_dir():
        raise DataError("no such folder; check the path", path=root)
    plain = root / annotations_dir, root / images_dir
    if all(folder.is_dir() for folder in plain):
        return VocLayout(*plain, None if split is None else _split_file(root, root, split))
    image_names = [str(images_dir), *(_ALSO_IMAGES if str(images_dir) == IMAGES else ())]
    homes = _homes(root, str(annotations_dir), image_names)
    if len(homes) > 1:
        shown = ", ".join(str(home) for home, _, _ in homes[:6])
        raise DataError(
            f"several folders hold {annotations_dir} and {images_dir}: {shown}; give one of them", path=root
        )
    if homes:
        home, xml_dir, image_dir = homes[0]
        split_file = None if split is None else _split_file(root, home, split)
        return VocLayout(xml_dir, image_dir, split_file, f"annotations in {xml_dir}, images in {image_dir}")
    beside = _beside(root, split)
    if beside is None:
        raise DataError(
            f"no folder {root / annotations_dir} with {images_dir} beside it, here or deeper, and no XML files beside "
            "images; name the folders with --annotations-dir and --images-dir",
            path=root,
        )
    return VocLayout(beside, beside, None, f"XML files beside their images in {beside}")


def _homes(root: Path, annotations: str, images: list[str]) -> list[tuple[Path, Path, Path]]:
    """Of the folders that hold both, those that lie highest: each with the two."""
    homes: list[tuple[Path, Path, Path]] = []
    for folders in _levels(root):
        for home in folders:
            xml_dir = _below(home, annotations)
            image_dir = next((path for name in images if (path := _below(home, name)) is not None), None)
            if xml_dir is not None and image_dir is not None:
                homes.append((home, xml_dir, image_dir))
        if homes:
            return homes
    return homes


def _levels(root: Path) -> Iterator[list[Path]]:
    """``root``, then the folders in it, then the folders in those, …; each level by name."""
    level = [root]
    while level:
        yield level
        level = [Path(entry.path) for folder in level for entry in _folders(folder)]


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((one for one in entries if one.is_dir(follow_symlinks=False)), key=lambda one: one.name)


def _below(home: Path, name: str) -> Path | None:
    """The folder ``name`` (which may have parts) of ``home``: as written, else in another case."""
    if (home / name).is_dir():
        return home / name
    folder = home
    for part in Path(name).parts:
        inside = [Path(entry.path) for entry in _folders(folder) if entry.name.casefold() == part.casefold()]
        if not inside:
            return None
        folder = inside[0]
    return folder


def _split_file(root: Path, home: Path, split: str) -> Path:
    folder = _below(home, "ImageSets/Main") or home / "ImageSets" / "Main"
    path = folder / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.txt"))) or "none"
        raise DataError(f"no split {split!r} (no file {path}); found: {known}", path=root)
    return path


def _beside(root: Path, split: str | None) -> Path | None:
    """The folder whose XML files lie beside images: Roboflow's ``train``, labelImg's only one."""
    if split is None:
        folder: Path | None = root
    else:
        names = _ALSO_SPLITS.get(split, (split,))
        folder = next((path for name in names if (path := _below(root, name)) is not None), None)
        if folder is None:
            return None
    return folder if files_below(folder, (".xml",)) else None
