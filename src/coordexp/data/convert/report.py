"""Images and objects as a format's reader reads them, and the report: counts of what was kept, changed and left out,
with reasons. Nothing is left out uncounted."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.table import Table
from rich.text import Text

from coordexp.data.class_list import as_written
from coordexp.data.find_images import REPORT_SUFFIX, FoundImage, ImageFolder, Listing

_REASONS_SHOWN = 3  # in an error
Entry = TypeVar("Entry")  # a file's data on one object
# A shape's numbers: (x1, y1, x2, y2); (x, y, width, height); the same from its centre; centre and radii; a flat ring.
Form = Literal["corners", "size", "centre", "ellipse", "ring"]


@dataclass(frozen=True, slots=True)
class SourceShape:
    """An annotated shape as its file has it: in the file's unit, not yet checked. ``index`` as in Problem.

    ``turn``: degrees clockwise, about the middle, or about the corner (x1, y1)."""

    index: int
    desc: str
    form: Form
    numbers: tuple[float, ...]
    turn: float = 0.0
    about_corner: bool = False


@dataclass(slots=True)
class SourceImage:
    """An image, and its objects as they are read (:meth:`ConversionReport.reading_object`), each a list of its parts.

    ``file`` names it below ``images/`` in the output, ``annotation`` in the report; ``declared_size`` is the
    ``(width, height)`` in its annotation, None without one. ``num_annotated``: objects in its annotation, with those
    that cannot be used. ``embedded`` returns the bytes of an image that is in no file. ``problem``: why it was not
    found. ``sizeless``: the format has no place for a size. ``metadata`` is added to the record's."""

    file: str
    annotation: str
    path: Path
    declared_size: tuple[int, int] | None = None
    objects: list[Sequence[SourceShape]] = field(default_factory=list)
    num_annotated: int = 0
    embedded: Callable[[], bytes] | None = None
    problem: str | None = None
    sizeless: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> list[SourceShape]:
        """The parts of all objects."""
        return [shape for parts in self.objects for shape in parts]


class SkipReason(StrEnum):
    """Why an object or an image of the source is not in the JSONL."""

    # objects
    ZERO_AREA = "zero_area"  # no width or no height in pixels
    INVERTED = "inverted"  # right of its left edge, or above its top edge
    OUTSIDE_IMAGE = "outside_image"  # nothing is left inside the image
    COLLAPSED_POLYGON = "collapsed_polygon"  # fewer than 3 distinct points on the norm1000 grid
    MALFORMED_GEOMETRY = "malformed_geometry"  # missing, wrong number of values, not finite numbers
    EMPTY_DESC = "empty_desc"
    REFUSED_DESC = "refused_desc"  # control characters, or text that looks like a control token
    CROWD = "crowd"
    STUFF = "stuff"  # a region without instances: sky, road
    NO_SEGMENTATION = "no_segmentation"
    UNSUPPORTED_SHAPE = "unsupported_shape"  # a point, a line, a mask
    OTHER_UNIT = "other_unit"  # shares of the image in a format of pixels, or the other way
    IGNORED = "ignored"  # a region that its annotator marked to be ignored, or a deleted shape
    DIFFICULT = "difficult"  # left out on request
    UNKNOWN_CATEGORY = "unknown_category"
    UNKNOWN_IMAGE = "unknown_image"
    IMAGE_SKIPPED = "image_skipped"  # sound, but its image is not in the JSONL
    # images
    MISSING_IMAGE = "missing_image"
    MISSING_ANNOTATION = "missing_annotation"
    UNREADABLE_IMAGE = "unreadable_image"
    UNREADABLE_ANNOTATION = "unreadable_annotation"
    SIZE_MISMATCH = "size_mismatch"  # annotated for another image shape, so its coordinates are meaningless
    EXTREME_ASPECT_RATIO = "extreme_aspect_ratio"
    DUPLICATE_IMAGE = "duplicate_image"  # a second annotation of one image file
    UNSAFE_FILE_NAME = "unsafe_file_name"  # absolute, or climbs out of the images folder
    EMPTIED_IMAGE = "emptied_image"  # has objects, but none that can be used
    UNLABELLED = "unlabelled"  # YOLO: no label file, and the data or the caller leaves such images out


# Options that bring objects back, by the reason why they were left out.
_CURES = {
    SkipReason.NO_SEGMENTATION: "--geometry bbox reads their boxes",
    SkipReason.CROWD: "--crowds keep keeps them",
    SkipReason.STUFF: "--stuff keeps them",
    SkipReason.DIFFICULT: "leave out --skip-difficult",
    SkipReason.UNKNOWN_CATEGORY: "correct the list of class names",
}


class Note(StrEnum):
    """Why an image or object that was kept may need a look."""

    SIZE_MISSING = "size_missing"  # the annotation gives no usable size; the image's own was taken
    SIZE_SCALED = "size_scaled"  # annotated on another resolution of the same shape; coordinates still hold
    EXIF_IGNORED = "exif_ignored"  # annotated on the pixels as stored; the image is kept unturned
    EXIF_APPLIED = "exif_applied"  # rotated upright by EXIF; the annotation's size is ambiguous
    NO_LABEL_FILE = "no_label_file"  # YOLO's way to say: no objects
    FOUND_BY_TAIL = "found_by_tail"  # no file of the annotation's own name; the only one of its last part was taken
    UNNAMED_IMAGE = "unnamed_image"  # is in the folder of images, and the annotations do not mention it
    PASSED_OVER = "passed_over"  # hidden files and folders, those of tools, links to a folder that is read already
    FILENAME_MISMATCH = "filename_mismatch"  # the annotation names another image than its own file name does
    UNBOXED_CLASS = "unboxed_class"  # Open Images: a class that people saw in the image, without a box
    IGNORED_LABEL = "ignored_label"  # Open Images: labels of whole images that no person verified; once per file
    CLIPPED = "clipped"  # reached over the image's edge
    COLLAPSED_BINS = "collapsed_bins"  # thinner than one norm1000 bin
    MULTIPART_POLYGON = "multipart_polygon"  # the largest part was kept
    JOINED_PARTS = "joined_parts"  # one box around the parts of an object
    SEVERAL_ANSWERS = "several_answers"  # of annotators; the detail says which was taken
    SEVERAL_CLASSES = "several_classes"  # of one shape, which is an object of each
    DUPLICATE_OBJECT = "duplicate_object"  # same description and shape as an earlier object of the image
    CROWD_KEPT = "crowd_kept"  # on request: a group as one object
    MASK_TRACED = "mask_traced"  # the polygon is a mask's outline
    FILLED_HOLES = "filled_holes"  # of such a mask: a polygon has none
    EMBEDDED_IMAGE = "embedded_image"  # the annotation's embedded copy was read, because the file is missing
    FOLDERS_FOUND = "folders_found"  # not where they were looked for first; the detail says where
    SIMPLIFIED = "simplified"  # a polygon lost vertices; the detail says what that cost
    EMPTIED_IMAGE = "emptied_image"  # on request: lost all its objects, and is an empty image now
    IGNORED_KEY = "ignored_key"  # of a YOLO data.yaml
    SHARED_NAME = "shared_name"  # several categories of one name, whose objects are one class


class LeftOut(Exception):
    """An image or an object that cannot be used; its text is the report's detail."""

    def __init__(self, reason: SkipReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``object_index`` counts from 0: in the XML's objects (VOC), in ``annotations`` (COCO)."""

    reason: str
    file: str
    object_index: int | None
    detail: str

    @property
    def place(self) -> str:
        return self.file if self.object_index is None else f"{self.file} object {self.object_index}"


@dataclass
class ConversionReport:
    """Counts of one conversion. ``images_seen == images + sum(skipped_images)``, and the same for objects (objects in
    annotations that cannot be read are not seen)."""

    jsonl: Path
    images_seen: int = 0
    objects_seen: int = 0
    images: int = 0
    objects: int = 0
    skipped_images: Counter[str] = field(default_factory=Counter)
    skipped_objects: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    objects_by_desc: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    simplified_ious: list[float] = field(default_factory=list)  # mask IoU of simplified polygons with their originals

    @property
    def skipped(self) -> Counter[str]:
        return self.skipped_images + self.skipped_objects

    @property
    def path(self) -> Path:
        return self.jsonl.with_name(self.jsonl.stem + REPORT_SUFFIX)

    @contextmanager
    def reading_object(self, source: SourceImage, index: int) -> Iterator[None]:
        """Count an object of ``source`` that is read in this block; LeftOut, raised in it, skips the object."""
        self.objects_seen += 1
        source.num_annotated += 1
        try:
            yield
        except LeftOut as left_out:
            self.skip_object(left_out.reason, source.annotation, index, str(left_out))

    def read_objects(
        self,
        source: SourceImage,
        entries: Iterable[Entry],
        read: Callable[[int, Entry], SourceShape],
        group_of: Callable[[Entry], Hashable] = lambda _: None,
    ) -> None:
        """Add the shapes that ``read(index, entry)`` returns to ``source``. Entries of one group are parts of one
        object; an entry of group None is one by itself. An object for which LeftOut is raised is counted."""
        groups: dict[Hashable, list[tuple[int, Entry]]] = {}
        for index, entry in enumerate(entries):
            group = group_of(entry)
            groups.setdefault((index,) if group is None else ("group", group), []).append((index, entry))
        for parts in groups.values():
            with self.reading_object(source, parts[0][0]):
                source.objects.append([read(index, entry) for index, entry in parts])

    def skip_object(self, reason: SkipReason, file: str, index: int, detail: str) -> None:
        self.skipped_objects[reason.value] += 1
        self.problems.append(Problem(reason.value, file, index, detail))

    def skip_image(self, reason: SkipReason, file: str, detail: str, num_objects: int = 0) -> None:
        self.skipped_images[reason.value] += 1
        if num_objects:
            self.skipped_objects[SkipReason.IMAGE_SKIPPED.value] += num_objects
        lost = f" ({num_objects} objects left out with it)" if num_objects else ""
        self.problems.append(Problem(reason.value, file, None, f"{detail}{lost}"))

    def note(self, note: Note, file: str, index: int | None, detail: str, count: int = 1) -> None:
        self.notes[note.value] += count
        self.problems.append(Problem(note.value, file, index, detail))

    def pass_over(self, listing: Listing) -> Listing:
        """Count what a search of a folder passed over."""
        if listing.passed_over:
            self.notes[Note.PASSED_OVER.value] += len(listing.passed_over)
        for line in listing.summary():
            self.problems.append(Problem(Note.PASSED_OVER.value, str(listing.folder), None, line))
        return listing

    def find_all(
        self,
        images: ImageFolder,
        wanted: Sequence[Sequence[str]],
        file: str,
        *,
        annotations: Sequence[str] | None = None,
        hints: Sequence[Sequence[str]] | None = None,
    ) -> list[SourceImage]:
        """The image of each entry of ``file``, by the names in ``wanted``. ``annotations``: each entry's own file.
        Counts what the search passed over, and images that were found by the end of their name."""
        self.pass_over(images.listing)
        sources: list[SourceImage] = []
        for at, found in enumerate(images.find_all(wanted, hints)):
            own = None if annotations is None else annotations[at]
            self.note_found(found, own or file)
            problem = None if found.there else found.problem or f"no file {found.path}"
            sources.append(SourceImage(found.name, own or found.name, found.path, problem=problem))
        return sources

    def note_unnamed(self, images: ImageFolder, sources: Sequence[SourceImage], file: str) -> None:
        """Count images of the folder that no entry of ``file`` names."""
        if unnamed := _unnamed(images, sources):
            shown = ", ".join(path.relative_to(images.folder).as_posix() for path in unnamed[:3])
            more = ", …" if len(unnamed) > 3 else ""
            detail = f"{len(unnamed)} images of {images.folder} are named by no entry: {shown}{more}"
            self.note(Note.UNNAMED_IMAGE, file, None, detail, len(unnamed))

    def skip_unannotated(
        self,
        images: ImageFolder,
        sources: Sequence[SourceImage],
        folder: Path,
        suffix: str,
        annotated: Collection[str],
    ) -> None:
        """Leave out images whose annotation file in ``folder`` is not one of ``annotated`` (names without suffix)."""
        for image in _unnamed(images, sources):
            stem = image.relative_to(images.folder).with_suffix("").as_posix()
            if stem not in annotated:
                self.images_seen += 1
                shown = f"{stem}{suffix}"
                self.skip_image(SkipReason.MISSING_ANNOTATION, shown, f"no file {folder / shown}")

    def note_found(self, found: FoundImage, file: str) -> None:
        """Note an image that was not found under its own name."""
        if found.note is not None:
            self.note(Note.FOUND_BY_TAIL, file, None, found.note)

    def note_shared_names(self, names: Mapping[Any, str], file: str) -> None:
        """Note class names that ``file`` has under several numbers or ids: one name is one class."""
        ids_of: defaultdict[str, list[str]] = defaultdict(list)
        for number, name in names.items():
            ids_of[as_written(name)].append(str(number))
        for name, ids in ids_of.items():
            if name and len(ids) > 1:
                detail = f"{name!r} is the name of the categories {', '.join(ids)}: one class"
                self.note(Note.SHARED_NAME, file, None, detail)

    def read_classes(
        self, source: SourceImage, index: int, names: Sequence[Any], read: Callable[[Any], SourceShape]
    ) -> None:
        """Add the shape that ``read(name)`` returns to ``source``, as an object of each of its classes ``names``."""
        if len(names) > 1:
            detail = f"an object of each: {', '.join(map(str, names))}"
            self.note(Note.SEVERAL_CLASSES, source.annotation, index, detail)
        for name in names:
            with self.reading_object(source, index):
                source.objects.append([read(name)])

    def reasons(self) -> str:
        """Why something was left out, for an error: counts by reason, the first case of each, and what helps."""
        counts = self.skipped
        if len(counts) > 1:
            del counts[SkipReason.EMPTIED_IMAGE.value]  # the consequence of another reason
        if not counts:
            return "none found"
        listed = ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items()))
        first = {problem.reason: problem for problem in reversed(self.problems) if problem.reason in counts}
        shown = list(first.values())[::-1][:_REASONS_SHOWN]
        cures = [cure for reason, cure in _CURES.items() if reason in counts]
        return "; ".join([listed, *(f"{problem.place}: {problem.detail}" for problem in shown), *cures])

    def simplification(self) -> dict[str, float] | None:
        ious = self.simplified_ious
        return {"polygons": len(ious), "mean_iou": sum(ious) / len(ious), "min_iou": min(ious)} if ious else None

    def to_json(self) -> str:
        fields = {
            "jsonl": self.jsonl.name,
            "images_seen": self.images_seen,
            "images": self.images,
            "skipped_images": dict(sorted(self.skipped_images.items())),
            "objects_seen": self.objects_seen,
            "objects": self.objects,
            "skipped_objects": dict(sorted(self.skipped_objects.items())),
            "objects_by_desc": dict(sorted(self.objects_by_desc.items())),
            "notes": dict(sorted(self.notes.items())),
            "simplification": self.simplification(),
            "problems": [asdict(problem) for problem in self.problems],
        }
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _unnamed(images: ImageFolder, sources: Sequence[SourceImage]) -> list[Path]:
    named = {os.path.abspath(source.path) for source in sources}  # some by absolute paths in a relative folder
    return [path for path in images.images if os.path.abspath(path) not in named]


def render_report(report: ConversionReport, examples: int = 3) -> Table:
    """A table for the terminal: counts, and the first ``examples`` findings of each reason."""
    # Names are data, never markup: Text prints them literally.
    table = Table("what", "count", "detail", title=Text(str(report.jsonl)))
    table.columns[1].justify = "right"
    table.add_row("images written", str(report.images), f"of {report.images_seen}")
    table.add_row("objects written", str(report.objects), f"of {report.objects_seen}")
    for desc, count in report.objects_by_desc.most_common(10):
        table.add_row("  objects of", str(count), Text(desc))
    if (cost := report.simplification()) is not None:
        table.add_row("polygons simplified", str(int(cost["polygons"])),
                      f"IoU with the original: mean {cost['mean_iou']:.4f}, least {cost['min_iou']:.4f}")  # fmt: skip
    found: defaultdict[str, list[Problem]] = defaultdict(list)
    for problem in report.problems:
        found[problem.reason].append(problem)
    for title, counter in (
        ("images left out", report.skipped_images),
        ("objects left out", report.skipped_objects),
        ("kept, with a note", report.notes),
    ):
        if counter:
            table.add_section()
            table.add_row(title, str(counter.total()), "")
        for reason, count in sorted(counter.items()):
            shown = [Text(f"{problem.place}: {problem.detail}") for problem in found[reason][:examples]]
            if len(found[reason]) > examples:
                shown.append(Text(f"… more in {report.path.name}"))
            table.add_row(f"  {reason}", str(count), Text("\n").join(shown))
    return table
