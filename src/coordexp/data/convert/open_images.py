"""Open Images' CSV files → JSONL: boxes, class descriptions and labels of whole images."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from coordexp.data.class_list import as_written
from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, Problem, SkipReason, SourceImage, SourceShape
from coordexp.data.convert.shapes import Crowds, check_choice, number, shape_of
from coordexp.data.find_images import ImageFolder, images_folder
from coordexp.data.subset import IMAGE_LABELS
from coordexp.errors import DataError
from coordexp.reading import csv_rows, open_file, read_text

_BOXES = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
_LABELS = ("ImageID", "LabelName", "Confidence")


def convert_openimages(
    table: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    classes: str | Path | None = None,
    labels: str | Path | None = None,
    crowds: Crowds = "leave_out",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert Open Images' boxes.

    Only images that are in ``images_dir`` are read; the boxes of all others are counted together. Classes that people
    verified, by ``labels``, are written into each record's ``metadata.image_labels`` as ``present`` and ``absent``.
    """
    path = Path(table)
    check_choice("crowds", crowds, Crowds)
    folder = images_folder(images_dir, path)
    names = _read_classes(_class_descriptions(path) if classes is None else Path(classes))
    searched = ImageFolder(folder)
    report = ConversionReport(Path(out_dir) / f"{options.name or path.stem}.jsonl")
    report.pass_over(searched.listing)
    ids = sorted({image.stem for image in searched.images})
    found = dict(zip(ids, searched.find_all([[image_id] for image_id in ids]), strict=True))
    files = {image_id: one.path for image_id, one in found.items() if one.there}
    images: dict[str, SourceImage] = {}
    boxed: defaultdict[str, set[str]] = defaultdict(set)  # labels by image
    elsewhere: dict[str, int] = defaultdict(int)  # boxes by image that is not in the folder
    for line, row in _rows(path, _BOXES):
        name = row["ImageID"]
        if name not in files:
            elsewhere[name] += 1
            continue
        if name not in images:
            report.note_found(found[name], path.name)
            file = files[name].relative_to(folder).as_posix()
            images[name] = SourceImage(file, file, files[name], sizeless=True)
        boxed[name].add(row["LabelName"])
        with report.reading_object(images[name], line):
            images[name].objects.append([_box(line, row, names, crowds)])
    used = set().union(*boxed.values())
    report.note_shared_names({label: name for label, name in names.items() if label in used}, path.name)
    present, absent = ({}, {}) if labels is None else _read_labels(Path(labels), names, files, report)
    only_labelled = (present.keys() | absent.keys()) - images.keys()
    report.images_seen = len(images) + len(elsewhere) + len(only_labelled)
    if elsewhere:
        lost = sum(elsewhere.values())
        report.objects_seen += lost
        report.skipped_images[SkipReason.MISSING_IMAGE.value] += len(elsewhere)
        report.skipped_objects[SkipReason.IMAGE_SKIPPED.value] += lost
        some = ", ".join(list(elsewhere)[:3]) + (", …" if len(elsewhere) > 3 else "")
        detail = f"{len(elsewhere)} images, with {lost} objects, are not in {folder}: {some}"
        report.problems.append(Problem(SkipReason.MISSING_IMAGE.value, path.name, None, detail))
    for name in sorted(only_labelled):
        report.skip_image(SkipReason.UNLABELLED, files[name].name, "has labels of the whole image, but no boxes")
    labels_of: defaultdict[str, set[str]] = defaultdict(set)
    for label, name in names.items():
        labels_of[name].add(label)
    for name, image in images.items() if labels is not None else ():
        seen = {names[label] for label in present[name]}
        # A class of several labels is absent if people looked for all of them, and saw none.
        unseen = {names[label] for label in absent[name] if labels_of[names[label]] <= absent[name]}
        image.metadata[IMAGE_LABELS] = {"present": sorted(seen), "absent": sorted(unseen)}
        if unboxed := seen - {names.get(label) for label in boxed[name]}:
            detail = f"seen by people, without a box: {', '.join(sorted(unboxed))}"
            report.note(Note.UNBOXED_CLASS, image.file, None, detail)
    return assemble(list(images.values()), report, options, Meaning(path, "shares"))


def _rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    # The lines after the header, each with its number from 1; read one by one, because the training set has millions.
    with open_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        rows = csv_rows(file, path)
        header = [cell.strip() for cell in next(rows, (1, []))[1]]
        missing = [name for name in needed if name not in header]
        if missing:
            seen = ", ".join(header)[:160]
            raise DataError(f"no column {', '.join(missing)} in the header {seen!r}", path=path, line=1)
        for line, row in rows:
            yield line, dict(zip_longest(header, row[: len(header)], fillvalue=""))


def _box(line: int, row: dict[str, str], names: dict[str, str], crowds: Crowds) -> SourceShape:
    desc = names.get(row["LabelName"])
    if desc is None:
        raise LeftOut(SkipReason.UNKNOWN_CATEGORY, f"class {row['LabelName']} has no description")
    if row.get("IsGroupOf", "").strip() == "1" and crowds == "leave_out":
        raise LeftOut(SkipReason.CROWD, f"{desc}: the box of a group")
    texts = [row[side] for side in ("XMin", "YMin", "XMax", "YMax")]
    return shape_of(line, desc, "corners", [number(text) for text in texts], texts)


def _class_descriptions(table: Path) -> Path:
    found = [path for path in sorted(table.parent.glob("*.csv")) if "class-descriptions" in path.name]
    if len(found) != 1:
        seen = "none" if not found else ", ".join(path.name for path in found)
        raise DataError(
            f"boxes name classes by ids such as /m/011k07; give the CSV of their descriptions with --classes (found "
            f"next to the table: {seen})",
            path=table,
        )
    return found[0]


def _read_classes(path: Path) -> dict[str, str]:
    rows = [row for _, row in csv_rows(read_text(path).splitlines(), path)]
    if rows and rows[0][0].strip() == "LabelName":
        rows = rows[1:]
    if not rows or any(len(row) != 2 for row in rows):
        raise DataError("expected two columns, e.g. /m/011k07,Tortoise", path=path)
    names = {label.strip(): as_written(name) for label, name in rows}
    if len(names) < len({(label.strip(), name.strip()) for label, name in rows}):
        raise DataError("a class has two descriptions; remove one", path=path)
    return names


def _read_labels(
    path: Path, names: dict[str, str], files: dict[str, Path], report: ConversionReport
) -> tuple[defaultdict[str, set[str]], defaultdict[str, set[str]]]:
    # The labels that people saw, and those that they did not see, by images of the folder.
    present: defaultdict[str, set[str]] = defaultdict(set)
    absent: defaultdict[str, set[str]] = defaultdict(set)
    guessed = unknown = 0
    for _, row in _rows(path, _LABELS):
        name, label = row["ImageID"], row["LabelName"]
        confidence = number(row["Confidence"])
        if name not in files:
            continue
        if confidence not in (0.0, 1.0) or row.get("Source", "").strip() == "machine":
            guessed += 1
        elif label not in names:
            unknown += 1
        else:
            (present if confidence == 1.0 else absent)[name].add(label)
    if guessed or unknown:
        detail = f"{guessed} guesses of machines and {unknown} labels of classes without a description are not used"
        report.note(Note.IGNORED_LABEL, path.name, None, detail)
    return present, absent
