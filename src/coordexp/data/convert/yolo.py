"""YOLO labels → JSONL: one text file an image, of boxes ``class cx cy w h`` and polygons ``class x y x y …`` in shares
of the image's width and height. An image without a label file has no objects, or is left out (``--unlabelled skip``); a
folder without any is refused. :func:`_labels_of` says where a label file is, of those that are listed first."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from coordexp.data.class_list import names_of_lines, names_of_yaml
from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning, check_keypoints, refuse_unlabelled
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason, SourceImage, SourceShape
from coordexp.data.convert.shapes import BoxFields, ShapeGeometry, check_choice, finite_numbers, number, shape_of
from coordexp.data.find_images import ImageFolder, check_folder, list_files, with_slashes
from coordexp.data.images import SEEN_SUFFIXES
from coordexp.errors import DataError
from coordexp.reading import read_text, read_yaml

_NO_LABELS = ("classes.txt", "train.txt", "val.txt", "test.txt")
Unlabelled = Literal["skip", "empty"]  # leave an image without a label file out, or take it as one without objects

SKIP_UNLABELLED = "skip_if_label_file_missing"
_READ = ("path", "train", "val", "valid", "test", "names", "nc", SKIP_UNLABELLED)
_REFUSED = {
    **dict.fromkeys(("kpt_shape", "flip_idx", "kpt_names"), "labels of keypoints; only boxes and polygons are read"),
    "masks_dir": "labels are masks; only boxes and polygons are read",
    "channels": "images of 3 channels are read",
}
# Origin and terms of the set, and settings for other trainers. Other keys are ignored with a note.
_IGNORED = ("roboflow", "download", "author", "authors", "date", "description", "docs", "links", "license", "licence",
            "version", "url", "urls", "homepage", "contact", "info", "task", "stride", "batch", "imgsz",
            "args", "format")  # fmt: skip


def convert_yolo(
    source: str | Path,
    out_dir: str | Path,
    *,
    split: str | None = None,
    geometry: ShapeGeometry = "as_annotated",
    unlabelled: Unlabelled | None = None,
    boxes: BoxFields = "auto",
    images_dir: str | Path | None = None,
    labels_dir: str | Path | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a YOLO data set: a ``data.yaml`` (``path``, ``names``, and a folder, a list file or several per split);
    darknet's ``obj.data``; a folder with one of these; or a folder with ``classes.txt`` and either ``images`` and
    ``labels``, or images next to their labels (labelImg).

    ``unlabelled=None``: as ``skip_if_label_file_missing`` of the ``data.yaml`` says, else ``empty``, YOLO's own rule.
    """
    if unlabelled is not None:
        check_choice("unlabelled", unlabelled, Unlabelled)
    layout = _read_layout(Path(source), split, images_dir, labels_dir)
    meaning = Meaning(layout.file, "shares", geometry, boxes)
    report = ConversionReport(Path(out_dir) / f"{options.name or split or 'data'}.jsonl")
    for key in layout.ignored:
        report.note(Note.IGNORED_KEY, layout.file.name, None, f"{key!r} has no meaning here and was ignored")
    report.note_shared_names(layout.names, layout.file.name)
    unlabelled = unlabelled or layout.unlabelled
    images: list[tuple[Path, Path]] = []  # each with the folder that its name starts in
    label_of: dict[Path, Path | None] = {}
    wholes: set[Path] = set()  # labels that need an image
    for place in layout.places:
        if not place.is_dir():
            found = _listed_images(place, layout.base, report)
            folders = {folder for path, _ in found for folder in (_label_folder(path), path.parent)}
            listings = [list_files(folder) for folder in folders if folder.is_dir()]
        else:
            listing = report.pass_over(list_files(place, converted=False))
            found = [(path, place) for path in listing.with_suffix(*SEEN_SUFFIXES)]
            # A folder is taken whole, so a label without an image is worth a line in the report.
            folder = layout.labels or _label_folder(place / "any.jpg")
            listings = [listing, *([list_files(folder)] if folder.is_dir() and folder != place else [])]
            wholes |= set(listings[-1].with_suffix(".txt"))
        labels = {_key(path): path for listing in listings for path in listing.with_suffix(".txt")}
        found_labels = _labels_of(found, labels, layout.labels)
        if found and not any(found_labels.values()) and unlabelled is None:
            _refuse_without_labels(place, [path for path, _ in found], layout)
        label_of |= found_labels
        images += found
    images_of: defaultdict[Path | None, list[Path]] = defaultdict(list)
    for path, label in label_of.items():
        images_of[label].append(path)
    for label, several in images_of.items():
        if label is not None and len(several) > 1:
            raise DataError(
                f"is the label of {len(several)} images ({', '.join(map(str, several[:3]))}); leave one of them, or "
                "put images and labels into the same subfolders",
                path=label,
            )
    if len({path.relative_to(root) for path, root in images}) < len(images):  # equal names in several folders
        shared = Path(os.path.commonpath([root for _, root in images]))
        images = [(path, shared) for path, _ in images]
    report.images_seen = len(images)
    sources: list[SourceImage] = []
    for path, root in images:
        file = path.relative_to(root).as_posix()
        label = label_of[path]
        if label is None:
            missing = (layout.labels or _label_folder(path)) / f"{path.stem}.txt"
            if unlabelled == "skip":
                report.skip_image(SkipReason.UNLABELLED, file, f"no file {missing}")
                continue
            detail = f"no file {missing}; read as an image without objects, --unlabelled skip leaves it out"
            report.note(Note.NO_LABEL_FILE, file, None, detail)
        image = SourceImage(file, file, path, sizeless=True)
        report.read_objects(image, _lines_of(label), partial(_read_line, layout.names))
        sources.append(image)
    check_keypoints([shape.numbers for source in sources for shape in source.shapes], layout.file)
    for label in sorted(wholes - set(label_of.values())):
        if label.name not in _NO_LABELS:
            report.images_seen += 1
            lost = len(_lines_of(label))
            report.objects_seen += lost
            report.skip_image(SkipReason.MISSING_IMAGE, label.name, f"no image for the label {label}", lost)
    return assemble(sources, report, options, meaning)


def _listed_images(file: Path, base: Path, report: ConversionReport) -> list[tuple[Path, Path]]:
    # The images of a list, one path a line, each with the folder that its name starts in. A path starts in the file's
    # own folder, or in the set's; darknet's starts with `data/`, which its own exports lack.
    home = Path(os.path.normpath(file.parent))
    lines = [with_slashes(line.strip()) for line in read_text(file).splitlines() if line.strip()]
    paths = [Path(os.path.normpath(home / line)) for line in lines]
    if gone := [at for at, path in enumerate(paths) if not path.is_file()]:
        searched = ImageFolder(base)
        names = [[lines[at], lines[at].removeprefix("data/")] for at in gone]
        for at, found in zip(gone, searched.find_all(names), strict=True):
            if found.there:
                paths[at] = Path(os.path.normpath(found.path))
                report.note_found(found, file.name)
    outside = [path.parent for path in paths if not path.is_relative_to(home)]
    shared = Path(os.path.commonpath(outside)) if outside else home
    return [(path, home if path.is_relative_to(home) else shared) for path in paths]


def _refuse_without_labels(place: Path, images: Sequence[Path], layout: _Layout) -> None:
    # A folder of a split in which no image has a label: most often the labels are elsewhere.
    stems = {image.stem for image in images}
    near = {path.parent for path in list_files(layout.base).with_suffix(".txt") if path.stem in stems}
    cure = "--unlabelled empty reads them so"
    if near:
        cure += f"; files of the same names are in {', '.join(map(str, sorted(near)[:3]))}: name the folders images "
        cure += "and labels, or give --images and --labels"
    where = f"has a label in {layout.labels or _label_folder(images[0])} or next to it"
    refuse_unlabelled(len(images), where, place, cure)


def _lines_of(label: Path | None) -> list[str]:
    if label is None:
        return []
    text = read_text(label, errors="replace")  # invalid numbers are counted line by line
    return [line for line in text.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class _Layout:
    """``file``: the ``data.yaml``, or the folder without one. ``places``: folders and list files of the split;
    ``base``: the set's folder, where paths of a list may start; ``labels``: that of all labels, if it was named;
    ``unlabelled``: what it says about images without labels."""

    file: Path
    names: dict[int, str]
    places: list[Path]
    base: Path
    labels: Path | None = None
    unlabelled: Unlabelled | None = None
    ignored: tuple[str, ...] = ()


def _read_layout(
    source: Path, split: str | None, images_dir: str | Path | None, labels_dir: str | Path | None
) -> _Layout:
    if source.is_dir():
        described = [path for path in (source / "data.yaml", source / "data.yml") if path.is_file()]
        described = described or sorted(source.glob("*.data"))
        if not described or images_dir is not None or labels_dir is not None:
            return _read_folder(source, split, images_dir, labels_dir)
        source = described[0]
    if not source.is_file():
        raise DataError("not found; give a data.yaml, or a folder with images and labels", path=source)
    if images_dir is not None or labels_dir is not None:
        raise DataError("--images and --labels are for a folder with a classes.txt; give the folder", path=source)
    if source.suffix.lower() == ".data":
        return _read_darknet(source, split)
    content = read_yaml(source)
    if not isinstance(content, dict):
        raise DataError("expected a mapping with names, train, val", path=source)
    ignored = []
    for key in content:
        if key in _REFUSED:
            if key != "channels" or content[key] != 3:
                raise DataError(f"{key}: {_REFUSED[key]}", path=source)
        elif key not in _READ and key not in _IGNORED:
            near = difflib.get_close_matches(str(key), _READ, 1, 0.75)
            if near:
                raise DataError(f"unknown key {key!r}; did you mean {near[0]!r}?", path=source)
            ignored.append(str(key))
    skip = content.get(SKIP_UNLABELLED, False)
    if not isinstance(skip, bool):
        raise DataError(f"{SKIP_UNLABELLED} is {skip!r}; expected true or false", path=source)
    names = names_of_yaml(content, source)
    splits = {key: content[key] for key in ("train", "val", "test") if content.get(key)}
    if content.get("valid"):
        splits.setdefault("val", content["valid"])
    split = _split_of(splits, split)
    if split not in splits:
        missing = "has several splits" if split is None else f"no split {split!r}"
        raise DataError(f"{missing}; found: {', '.join(splits) or 'none'}; name one with --split", path=source)
    base = source.parent / str(content.get("path") or "")
    if not base.is_dir():  # exports keep the path of the machine that wrote them
        base = source.parent
    places = []
    for entry in splits[split] if isinstance(splits[split], list) else [splits[split]]:
        entry = with_slashes(str(entry))
        # Roboflow writes ../train/images, relative to a sibling folder.
        candidates = [base / entry, source.parent / entry, base / entry.removeprefix("../")]
        places.append(_existing(candidates, entry, source))
    return _Layout(source, names, places, base, None, "skip" if skip else None, tuple(ignored))


def _read_folder(
    source: Path, split: str | None, images_dir: str | Path | None, labels_dir: str | Path | None
) -> _Layout:
    # A folder with class names, one a line: with images and labels, or with images next to their labels.
    images, labels = source / (images_dir or "images") / (split or ""), None
    if images_dir is None and not images.is_dir() and split is None:
        images = source
    if labels_dir is not None:
        labels = source / labels_dir / (split or "")
        labels = labels if labels.is_dir() else source / labels_dir
        check_folder(labels, "folder of labels (--labels)")
    homes = [source, source / "labels", images, *([] if labels is None else [labels, source / str(labels_dir)])]
    classes = [home / name for home in homes for name in ("classes.txt", "obj.names") if (home / name).is_file()]
    if not classes or not images.is_dir():
        raise DataError(
            "no data.yaml, no obj.data, and no folder images (or --images) with a classes.txt (one name a line) next "
            "to it",
            path=source,
        )
    return _Layout(source, names_of_lines(read_text(classes[0])), [images], source, labels)


def _read_darknet(file: Path, split: str | None) -> _Layout:
    # Lines `train = data/train.txt`, `valid = …`, `names = data/obj.names`; paths start in darknet's folder.
    pairs = [line.partition("=") for line in read_text(file).splitlines() if "=" in line and line.strip()[0] != "#"]
    fields = {key.strip(): with_slashes(value.strip()) for key, _, value in pairs}

    def path_of(key: str) -> Path:
        names = (fields[key], fields[key].removeprefix("data/"), Path(fields[key]).name)
        return _existing([file.parent / name for name in names], f"{key} = {fields[key]}", file, Path.is_file)

    splits = {"val" if key == "valid" else key: key for key in ("train", "valid", "val", "test") if key in fields}
    split = _split_of(splits, split)
    if split not in splits or "names" not in fields:
        raise DataError(
            f"expected lines names = … and train = … or valid = …; found: {', '.join(fields) or 'none'}; name a split "
            "with --split",
            path=file,
        )
    return _Layout(file, names_of_lines(read_text(path_of("names"))), [path_of(splits[split])], file.parent)


def _existing(
    candidates: Sequence[Path], what: str, file: Path, is_there: Callable[[Path], bool] = Path.exists
) -> Path:
    found = next((path for path in candidates if is_there(path)), None)
    if found is None:
        raise DataError(f"{what}: no such file or folder (looked for {candidates[0]})", path=file)
    return found


def _split_of(splits: Mapping[str, Any], split: str | None) -> str | None:
    # The split that was named, or the only one.
    if split is None and len(splits) == 1:
        return next(iter(splits))
    return "val" if split == "valid" else split


def _label_folder(image: Path) -> Path:
    # YOLO's rule: the last folder called `images` on the way is `labels`.
    parts = list(image.parts)
    at = max((i for i, part in enumerate(parts[:-1]) if part == "images"), default=None)
    if at is not None:
        parts[at] = "labels"
    return Path(*parts).parent


def _labels_of(
    images: Sequence[tuple[Path, Path]], labels: Mapping[Path, Path], labels_dir: Path | None
) -> dict[Path, Path | None]:
    # The label of each image, given with the folder that its name starts in; None without one. By YOLO's rule, or next
    # to the image. In a named folder: in the same subfolder as the image; else in the folder itself, if that label
    # is not of an image there.
    found: dict[Path, Path | None] = {}
    for image, root in images:
        named = f"{image.stem}.txt"
        if labels_dir is not None:
            found[image] = labels.get(_key(labels_dir / image.relative_to(root).parent / named))
        else:
            found[image] = labels.get(_key(_label_folder(image) / named), labels.get(_key(image.parent / named)))
    if labels_dir is not None:
        taken = set(found.values())
        for image in [image for image, label in found.items() if label is None]:
            label = labels.get(_key(labels_dir / f"{image.stem}.txt"))
            found[image] = None if label in taken else label
    return found


def _key(label: Path) -> Path:
    return label.with_suffix(".txt")  # in whatever case it is written


def _read_line(names: dict[int, str], index: int, line: str) -> SourceShape:
    category, *values = finite_numbers([number(text) for text in line.split()]) or (0.0,)
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        detail = f"{line[:80]!r}: expected 'class cx cy w h' or 'class x y x y x y …'"
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
    if category not in names:
        raise LeftOut(SkipReason.UNKNOWN_CATEGORY, f"class {category:g} has no name")
    return shape_of(index, names[int(category)], "centre" if len(values) == 4 else "ring", values, line)
