"""Counts of a conversion: kept, changed and left out, with reasons. Nothing is left out uncounted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.table import Table
from rich.text import Text

REPORT_SUFFIX = ".conversion_report.json"


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


class Note(StrEnum):
    """Why an image or object that was kept may need a look."""

    SIZE_MISSING = "size_missing"  # the annotation gives no usable size; the image's own was taken
    SIZE_SCALED = "size_scaled"  # annotated on another resolution of the same shape; coordinates still hold
    EXIF_IGNORED = "exif_ignored"  # annotated on the pixels as stored; the image is kept unturned
    EXIF_APPLIED = "exif_applied"  # rotated upright by EXIF; the annotation's size is ambiguous
    NO_LABEL_FILE = "no_label_file"  # YOLO's way to say: no objects
    FILENAME_MISMATCH = "filename_mismatch"  # the annotation names another image than its own file name does
    CLIPPED = "clipped"  # reached over the image's edge
    COLLAPSED_BINS = "collapsed_bins"  # thinner than one norm1000 bin
    MULTIPART_POLYGON = "multipart_polygon"  # the largest part was kept
    DUPLICATE_OBJECT = "duplicate_object"  # same description and shape as an earlier object of the image
    CROWD_KEPT = "crowd_kept"  # on request: a group as one object
    MASK_TRACED = "mask_traced"  # the polygon is a mask's outline
    EMBEDDED_IMAGE = "embedded_image"  # the image is the annotation's embedded copy, because there is no file
    FOLDERS_FOUND = "folders_found"  # not where they were looked for first; the detail says where
    SIMPLIFIED = "simplified"  # a polygon lost vertices; the detail says what that cost
    EMPTIED_IMAGE = "emptied_image"  # had objects, all of them left out: now an empty image


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
    def reading_object(self, file: str, index: int) -> Iterator[None]:
        """Count an object that is read in this block; LeftOut, raised in it, skips the object."""
        self.objects_seen += 1
        try:
            yield
        except LeftOut as left_out:
            self.skip_object(left_out.reason, file, index, str(left_out))

    def skip_object(self, reason: SkipReason, file: str, index: int, detail: str) -> None:
        """Count and list an object that is left out: annotation ``index`` of ``file``."""
        self.skipped_objects[reason.value] += 1
        self.problems.append(Problem(reason.value, file, index, detail))

    def skip_image(self, reason: SkipReason, file: str, detail: str, num_objects: int = 0) -> None:
        """Count and list an image that is left out, with its ``num_objects`` objects that were sound so far."""
        self.skipped_images[reason.value] += 1
        if num_objects:
            self.skipped_objects[SkipReason.IMAGE_SKIPPED.value] += num_objects
        self.problems.append(Problem(reason.value, file, None, f"{detail} ({num_objects} objects left out with it)"))

    def note(self, note: Note, file: str, index: int | None, detail: str) -> None:
        """Count and list something that was changed or looks odd, but is in the dataset."""
        self.notes[note.value] += 1
        self.problems.append(Problem(note.value, file, index, detail))

    def simplification(self) -> dict[str, float] | None:
        """Number of simplified polygons, and their mean and least IoU with the originals; None without any."""
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


def render_report(report: ConversionReport, max_problems: int = 20) -> Table:
    """A table for the terminal: counts, reasons, and the first ``max_problems`` findings."""
    # Names are data, never markup: Text prints them literally.
    table = Table("what", "count", "detail", title=Text(str(report.jsonl)))
    table.columns[1].justify = "right"
    table.add_row("images written", str(report.images), f"of {report.images_seen}")
    table.add_row("objects written", str(report.objects), f"of {report.objects_seen}")
    for desc, count in report.objects_by_desc.most_common(10):
        table.add_row("  objects of", str(count), Text(desc))
    for title, counter in (
        ("image left out", report.skipped_images),
        ("object left out", report.skipped_objects),
        ("note", report.notes),
    ):
        table.add_section()
        for reason, count in sorted(counter.items()):
            table.add_row(title, str(count), reason)
    if (cost := report.simplification()) is not None:
        table.add_row("polygons simplified", str(int(cost["polygons"])),
                      f"IoU with the original: mean {cost['mean_iou']:.4f}, least {cost['min_iou']:.4f}")  # fmt: skip
    table.add_section()
    for problem in report.problems[:max_problems]:
        where = problem.file if problem.object_index is None else f"{problem.file} object {problem.object_index}"
        table.add_row(problem.reason, "", Text(f"{where}: {problem.detail}"))
    if len(report.problems) > max_problems:
        table.add_row("…", str(len(report.problems) - max_problems), Text(f"more in {report.path.name}"))
    return table
