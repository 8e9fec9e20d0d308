"""Predictions and datasets as COCO, YOLO, VOC, LabelMe, CSV or DOTA, in pixels of the user's original images.

Images that a converter resized are written with the size and file name of their source, unless they are placed next to
the annotations. Classes have the numbers of the user's own list, or of the checkpoint's
(:mod:`coordexp.data.class_list`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from coordexp.data.class_list import ClassNumbers
from coordexp.data.completed import Provenance
from coordexp.data.convert.csv_table import is_formula
from coordexp.data.files import whole_binary_file, whole_file
from coordexp.data.find_images import match_names, with_slashes
from coordexp.data.images import image_bytes, image_exists, open_rgb
from coordexp.data.polygons import smallest_rectangle
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, OriginalImage, ScoredObject
from coordexp.evaluation.coco_results import to_coco, with_scores
from coordexp.evaluation.users_terms import UsersTerms
from coordexp.geometry import pixel_box, pixel_ring
from coordexp.printable import printable
from coordexp.records import ImageRecord

LONGEST_PART = 120  # bytes of a part of a path; file systems take 255, and suffixes are added


@dataclass(frozen=True, slots=True)
class Exported:
    """The files written, and notes for the user."""

    files: Sequence[Path]
    notes: Sequence[str] = ()


def is_dataset(path: Path) -> bool:
    """Whether ``path`` is a JSONL dataset, and not a file or folder of predictions."""
    if not path.is_file():
        return False
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    return re.search(rb'"images"\s*:', first) is not None  # also in a line that its reader will refuse


def dataset_answers(records: Iterable[ImageRecord], *, annotations: bool) -> list[ImageAnswer]:
    """The objects of a dataset as they are exported: as annotations (COCO), or in place of predictions, in which case
    soft objects have their confidence as score."""
    if annotations:
        return [ImageAnswer.of(record, ()) for record in records]
    return [
        replace(ImageAnswer.of(record, [ScoredObject(o.desc, o.kind, o.bins, o.soft) for o in record.objects]), gt=None)
        for record in records
    ]


IMAGE_FOLDERS = {"coco": "images", "yolo": "images", "yolo-obb": "images", "voc": "JPEGImages", "labelme": "",
                 "csv": "images", "dota": "images"}  # fmt: skip


def place_images(
    answers: Sequence[ImageAnswer], folder: Path, *, link: bool = False
) -> tuple[list[ImageAnswer], list[str]]:
    """Copy each image into ``folder`` under its original name; ``link``: as a hard link where the file system can.

    Only files that decode as images are placed: paths come from a file that may be anybody's, and the folder is made
    to be shared. Returns the answers in the pixels of the placed images, and a line for each image that was refused.
    """
    placed, refused = [], []
    for answer, _, name in _with_paths(answers, "", placing=True):
        source = Path(answer.image)
        target = folder / f"{name}{safe_part(source.suffix)}"
        try:
            if not image_exists(source):
                raise DataError("no such image file", path=source)
            data = image_bytes(source)
            open_rgb(source, data=data)
        except DataError as error:
            refused.append(f"{answer.sample_id}: {error}")
            if (own := answer.original) is not None:  # of two images with one name, the copy of one may have it now
                own = replace(own, file=f"{name.as_posix()}{safe_part(PurePosixPath(own.file).suffix)}")
            placed.append(replace(answer, original=own))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _place(source, data, target, link)
        elif target.read_bytes() != data:
            raise DataError("exists already; name another folder", path=target)
        original = OriginalImage(target.relative_to(folder).as_posix(), answer.width, answer.height)
        placed.append(replace(answer, image=str(target), original=original))
    return placed, refused


def _place(source: Path, data: bytes, target: Path, link: bool) -> None:
    if link:
        with suppress(OSError):  # another file system, or an image in a shard
            os.link(source, target)
            return
    _write(target, data)


def safe_part(part: str) -> str:
    """A part of a path that every file system takes: control characters become ``_``, and at most 120 bytes are kept.

    >>> safe_part("a\\x00b.png")
    'a_b.png'
    """
    part = re.sub(r"\\u[0-9a-f]{4}", "_", printable(part))
    if len(part.encode()) <= LONGEST_PART:
        return part
    stem, dot, suffix = part.rpartition(".")
    if not stem or len(suffix) > 8:
        stem, dot, suffix = part, "", ""
    digest = hashlib.sha256(part.encode()).hexdigest()[:8]  # different long names stay different
    kept = stem.encode()[: LONGEST_PART - 10 - len(suffix.encode())].decode(errors="ignore")
    return f"{kept}-{digest}{dot}{suffix}"


def _numbers(
    used: Sequence[str], terms: UsersTerms, first: int, what: str = "objects"
) -> tuple[ClassNumbers, list[str]]:
    if not terms.classes:
        note = "without a class list these numbers hold for these images alone; name a list with --classes"
        return ClassNumbers.of(sorted(set(used)), first), [note] if used else []
    numbers = ClassNumbers.of(terms.classes, first)
    note = numbers.note(used, what)
    return numbers, [*terms.notes, *([] if note is None else [note])]


def export_coco(
    answers: Sequence[ImageAnswer],
    out: Path,
    terms: UsersTerms,
    completed: Provenance | None = None,
    originals: Sequence[ImageAnswer] | None = None,
) -> Exported:
    """COCO's ``results.json``, and ``dataset.json``: images, categories, and annotations where they are known.
    ``completed`` is written into the field ``completion`` of these objects' annotations; it is None for predictions,
    which have ``results.json`` even if nothing is predicted. ``originals``: the answers before :func:`place_images`,
    by whose names ``terms`` has ids; None: ``answers``."""
    annotated = [obj.desc for answer in answers for obj in answer.gt or ()]
    predicted = [obj.desc for answer in answers for obj in answer.pred]
    both = "annotated and predicted objects" if annotated and predicted else "objects"
    numbers, notes = _numbers([*annotated, *predicted], terms, 1, both)
    next_id = max(terms.images.values(), default=0) + 1
    image_ids: dict[int, None] = {}
    num_unknown = 0
    _refuse_shared_images(answers)
    ids = {with_slashes(file): image_id for file, image_id in terms.images.items()}
    names = [
        [*([answer.sample_id] if answer.original is None else []), answer.users_image.file]
        for answer in originals or answers
    ]
    matches = match_names(names, ids)
    by_tail = [match.note for match in matches if match.note is not None]
    if by_tail:
        notes.append(f"{len(by_tail)} images are matched by the end of their names; the first: {by_tail[0]}")
    for match in matches:
        image_id = None if match.file is None else ids[match.file]
        if image_id is None or image_id in image_ids:  # of a second record of one image
            image_id, num_unknown = next_id + num_unknown, num_unknown + 1
        image_ids[image_id] = None
    if terms.images and num_unknown:
        notes.append(f"{num_unknown} images are not among the given annotations; they get the next numbers")
    data = to_coco([with_scores(answer) for answer in answers], None, numbers, [*image_ids])
    for entry in (*data.ground_truth["annotations"], *data.results):
        entry |= {"bbox": [round(value, 3) for value in entry["bbox"]], "area": round(entry["area"], 3)}
        if "segmentation" in entry:
            entry["segmentation"] = [[round(value, 3) for value in ring] for ring in entry["segmentation"]]
    softs = [obj.soft for answer in answers for obj in answer.gt or ()]
    origins = [
        (completed or {}).get(answer.sample_id, {}).get(at) for answer in answers for at in range(len(answer.gt or ()))
    ]
    for annotation, soft, origin in zip(data.ground_truth["annotations"], softs, origins, strict=True):
        annotation |= {} if soft is None else {"soft": soft}
        annotation |= {} if origin is None else {"completion": dict(origin)}
    if any(soft is not None for soft in softs):
        notes.append("soft objects are crowds (iscrowd: 1), with their confidence in the field soft")
    files = [_write_json(out / "results.json", data.results)] if data.results or completed is None else []
    files.append(_write_json(out / "dataset.json", data.ground_truth))
    return Exported(files, notes)


def export_yolo(
    answers: Sequence[ImageAnswer], out: Path, terms: UsersTerms, scores: bool = False, rotated: bool = False
) -> Exported:
    """``labels/NAME.txt`` (``class cx cy w h`` or ``class x y x y …``; shares of a side), and ``data.yaml`` with the
    names. ``scores`` appends each object's score, which trackers read and trainers refuse. ``rotated``: every object is
    a rotated box, ``class x1 y1 x2 y2 x3 y3 x4 y4``. With a polygon among them all objects are polygons: of a file with
    one, YOLO's trainers read a box's line as two points."""
    are_polygons = any(obj.kind == "poly" for answer in answers for obj in answer.pred)
    used = [obj.desc for answer in answers for obj in answer.pred]
    numbers, notes = _numbers(used, terms, 0)
    files = []
    for answer, original, name in _with_paths(answers, ".txt"):
        lines = []
        for detection in answer.pred:
            if rotated or are_polygons:
                ring = (_four_corners if rotated else pixel_ring)(detection, original.width, original.height)
                values = [share for x, y in ring for share in (x / original.width, y / original.height)]
            else:
                x1, y1, x2, y2 = pixel_box(detection, original.width, original.height)
                values = [(x1 + x2) / 2 / original.width, (y1 + y2) / 2 / original.height]
                values += [(x2 - x1) / original.width, (y2 - y1) / original.height]
            if scores:
                values.append(1.0 if detection.score is None else detection.score)
            lines.append(" ".join([str(numbers[detection.desc]), *(f"{value:.6f}" for value in values)]) + "\n")
        files.append(_write(out / "labels" / name, "".join(lines)))
    # Without `path`, folders start at the file, wherever training is started; `path: .` would be the working directory.
    # JSON's strings are YAML's, but for characters that YAML wants escaped as well.
    by_number = numbers.names(used).items()
    named = "".join(f"  {k}: {printable(json.dumps(name, ensure_ascii=False))}\n" for k, name in by_number)
    files.append(_write(out / "data.yaml", f"train: images\nval: images\nnames:\n{named}"))
    if rotated:
        return Exported(files, [*notes, *_rectangles(answers)])
    num_boxes = sum(obj.kind == "bbox_2d" for answer in answers for obj in answer.pred)
    if are_polygons and num_boxes:
        notes.append(f"{num_boxes} boxes are written as polygons of four corners, as YOLO reads no mixture of both")
    return Exported(files, notes)


def export_dota(answers: Sequence[ImageAnswer], out: Path, terms: UsersTerms) -> Exported:
    """``labelTxt/NAME.txt``: ``x1 y1 x2 y2 x3 y3 x4 y4 class difficult`` in pixels. Spaces of class names become ``_``,
    because DOTA's readers split lines at spaces."""
    files = []
    written, notes = _written(answers, lambda name: printable("_".join(name.split())))
    for answer, original, name in _with_paths(answers, ".txt"):
        lines = []
        for detection in answer.pred:
            ring = _four_corners(detection, original.width, original.height)
            corners = " ".join(f"{value:.2f}" for point in ring for value in point)
            lines.append(f"{corners} {written[detection.desc]} 0\n")
        files.append(_write(out / "labelTxt" / name, "".join(lines)))
    return Exported(files, [*notes, *_rectangles(answers)])


def _written(answers: Sequence[ImageAnswer], write: Callable[[str], str]) -> tuple[dict[str, str], list[str]]:
    # Each name as a format writes it, and a note about those that it cannot hold as they are. Two names never become
    # one.
    written = {name: write(name) for name in sorted({obj.desc for answer in answers for obj in answer.pred})}
    name_of: dict[str, str] = {}
    for name, text in written.items():
        if name_of.setdefault(text, name) != name:
            raise DataError(
                f"the names {name_of[text]!r} and {name!r} would both be written as {text!r}; rename one, "
                "or export to another format"
            )
    changed = [f"{printable(name)} as {text}" for name, text in written.items() if text != name]
    more = ", …" if len(changed) > 8 else ""
    names = "1 name" if len(changed) == 1 else f"{len(changed)} names"
    note = f"{names} cannot be written as they are: {', '.join(changed[:8])}{more}"
    return written, [note] if changed else []


def _four_corners(obj: ScoredObject, width: int, height: int) -> Sequence[tuple[float, float]]:
    ring = pixel_ring(obj, width, height)
    return ring if len(ring) == 4 else smallest_rectangle(ring)


def _rectangles(answers: Sequence[ImageAnswer]) -> list[str]:
    count = sum(obj.kind == "poly" and len(obj.bins) != 8 for answer in answers for obj in answer.pred)
    if not count:
        return []
    return [f"{count} polygons do not have four points; each is written as the smallest rotated rectangle around it"]


def export_voc(answers: Sequence[ImageAnswer], out: Path, terms: UsersTerms, fractions: bool = False) -> Exported:
    """``Annotations/NAME.xml``; coordinates count from 0, as ``coordexp data convert voc`` reads them. They are whole
    numbers, which many readers need, unless ``fractions``; a box that would lose its area gets the pixel around it."""
    files, polygons, thin = [], 0, 0
    written, renamed = _written(answers, printable)
    for answer, original, name in _with_paths(answers, ".xml"):
        root = ElementTree.Element("annotation")
        size = {"width": original.width, "height": original.height, "depth": 3}
        _add(root, {"filename": printable(PurePosixPath(original.file).name), "size": size})
        for detection in answer.pred:
            polygons += detection.kind == "poly"
            corners = pixel_box(detection, original.width, original.height)
            whole = [round(value) for value in corners]
            for low, high in ((0, 2), (1, 3)):
                if whole[low] == whole[high] and corners[low] < corners[high] and not fractions:
                    whole[low], whole[high] = math.floor(corners[low]), math.ceil(corners[high])
                    thin += 1
            texts = [f"{value:.2f}" for value in corners] if fractions else [str(value) for value in whole]
            box = dict(zip(("xmin", "ymin", "xmax", "ymax"), texts, strict=True))
            entry = {"name": written[detection.desc], "difficult": 0, "bndbox": box}
            if detection.score is not None:
                entry["score"] = f"{detection.score:.6f}"
            _add(root, {"object": entry})
        ElementTree.indent(root)
        files.append(_write(out / "Annotations" / name, ElementTree.tostring(root, encoding="unicode") + "\n"))
    notes = [f"{polygons} polygons are written as their bounds; VOC has only boxes"] if polygons else []
    if thin:
        notes.append(f"{thin} sides below half a pixel are written as one pixel; --fractions writes them as they are")
    return Exported(files, [*notes, *renamed])


def _add(parent: ElementTree.Element, children: Mapping[str, Any]) -> None:
    for tag, value in children.items():
        child = ElementTree.SubElement(parent, tag)
        if isinstance(value, Mapping):
            _add(child, value)
        else:
            child.text = str(value)


def export_labelme(answers: Sequence[ImageAnswer], out: Path, terms: UsersTerms) -> Exported:
    """One ``NAME.json`` per image; ``imagePath`` is relative to it."""
    files = []
    for answer, original, name in _with_paths(answers, ".json"):
        path = out / name
        is_placed = answer.original is None or Path(answer.image).is_relative_to(out)
        here = os.path.relpath(answer.image, path.parent) if is_placed else original.file
        shapes = []
        for detection in answer.pred:
            ring = pixel_ring(detection, original.width, original.height)
            points = ring if detection.kind == "poly" else (ring[0], ring[2])
            shapes.append({
                "label": detection.desc,
                "points": [list(point) for point in points],
                "group_id": None,
                "description": "" if detection.score is None else f"score {detection.score:.4f}",
                "shape_type": "polygon" if detection.kind == "poly" else "rectangle",
                "flags": {},
            })  # fmt: skip
        content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": Path(here).as_posix(),
                   "imageData": None, "imageHeight": original.height, "imageWidth": original.width}  # fmt: skip
        files.append(_write_json(path, content))
    return Exported(files)


def export_csv(answers: Sequence[ImageAnswer], out: Path, terms: UsersTerms) -> Exported:
    """``objects.csv``: a line per object; ``polygon`` holds ``x y`` pairs, empty for a box. An image without objects
    has a line without name and box. Images placed in ``out`` are named from there."""
    path = out / "objects.csv"
    written, notes = _written(answers, cell_text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        writer = csv.writer(file)
        writer.writerow(["image", "width", "height", "name", "score", "x1", "y1", "x2", "y2", "polygon"])
        _refuse_shared_images(answers)
        for answer in answers:
            original = answer.users_image
            image = original.file
            if answer.original is not None and Path(answer.image).is_relative_to(out):
                image = Path(answer.image).relative_to(out).as_posix()
            first = [cell_text(image), original.width, original.height]
            if not answer.pred:
                writer.writerow([*first, *[""] * 7])
            for detection in answer.pred:
                box = [f"{side:.2f}" for side in pixel_box(detection, original.width, original.height)]
                ring = pixel_ring(detection, original.width, original.height) if detection.kind == "poly" else ()
                points = " ".join(f"{x:.2f} {y:.2f}" for x, y in ring)
                score = "" if detection.score is None else f"{detection.score:.6f}"
                writer.writerow([*first, written[detection.desc], score, *box, points])
    return Exported([path], notes)


def cell_text(text: str) -> str:
    """Text for a cell of a table: a spreadsheet would run one that begins like a formula, so it gets a leading ``'``,
    which ``coordexp data convert csv`` removes. So does one that begins with such a ``'`` itself."""
    text = printable(text)
    return f"'{text}" if is_formula(text.lstrip("'")) else text


FORMATS: dict[str, Callable[..., Exported]] = {
    "coco": export_coco,
    "yolo": export_yolo,
    "yolo-obb": partial(export_yolo, rotated=True),
    "voc": export_voc,
    "labelme": export_labelme,
    "csv": export_csv,
    "dota": export_dota,
}


def _with_paths(
    answers: Sequence[ImageAnswer], suffix: str, *, placing: bool = False
) -> list[tuple[ImageAnswer, OriginalImage, Path]]:
    # Each answer with the image as the user has it (the converter's source, or the image itself), and a unique relative
    # path for its file. `placing` gives each image a name of its own.
    if not placing:
        _refuse_shared_images(answers)
    # Compared without their suffix: an image and its label have one name, and "a.png" next to "a.jpg" gets another.
    named: list[tuple[ImageAnswer, OriginalImage, Path]] = []
    for number, answer in enumerate(answers):
        original = answer.users_image
        name = PurePosixPath(original.file)
        if answer.original is None:
            given = PurePosixPath(answer.sample_id)
            name = given if given.name == name.name else name
        if name.is_absolute() or ".." in name.parts:
            name = PurePosixPath(name.name if name.name != ".." else "")
        parts = [safe_part(part) for part in name.parts] or [f"image-{number}"]  # a file name may be "" or "/"
        named.append((answer, original, Path(*parts).with_suffix("")))
    wanted, taken = {path for _, _, path in named}, set[Path]()
    result = []
    for number, (answer, original, path) in enumerate(named):
        unique, again = path, number
        while unique in taken or (unique != path and unique in wanted):
            unique, again = path.with_name(f"{path.name}_{again}"), again + 1
        taken.add(unique)
        result.append((answer, original, unique.with_name(unique.name + suffix)))
    return result


def _refuse_shared_images(answers: Iterable[ImageAnswer]) -> None:
    # Annotations name the user's image.
    id_of: dict[str, str] = {}
    for answer in answers:
        file = with_slashes(answer.users_image.file)
        if (first := id_of.setdefault(file, answer.sample_id)) != answer.sample_id:
            raise DataError(
                f"{first} and {answer.sample_id} are both of the image {file!r}, and their objects would be those of "
                "one image; --images gives each a copy of its own, or remove one"
            )


def _write(path: Path, content: str | bytes) -> Path:
    # Whole or not at all, without a wait for the disk for each of many.
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_binary_file(path, flush=False) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def _write_json(path: Path, content: object) -> Path:
    return _write(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
