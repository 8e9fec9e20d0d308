"""The second half of every conversion: pixel shapes and source images → images for the model (decoded once, upright as
annotated, resized), JSONL and report."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from coordexp.data.convert.numbers import Meaning, check_numbers, read_object
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason, SourceImage
from coordexp.data.convert.shapes import quantise
from coordexp.data.dataset_cache import PREPARED
from coordexp.data.files import check_new_file, check_writable, write_atomically
from coordexp.data.find_images import can_be_file
from coordexp.data.images import (
    JPEG_SUFFIXES,
    MAX_ASPECT_RATIO,
    ImageHeader,
    ResizeRule,
    open_rgb,
    read_header,
    save_image,
)
from coordexp.data.jsonl import write_jsonl
from coordexp.errors import DataError, shortened
from coordexp.records import GTObject, ImageRecord

_SUFFIXES_BY_FORMAT = {"JPEG": JPEG_SUFFIXES, "PNG": (".png",)}
_RULE = ResizeRule()
Notes = tuple[tuple[Note, str], ...]


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options of every format.

    ``factor`` is the model's patch_size * merge_size; ``min_pixels`` / ``max_pixels`` bound the area after resizing.
    """

    resize: bool = True  # False leaves images where they are and only refers to them
    factor: int = _RULE.factor
    min_pixels: int = _RULE.min_pixels
    max_pixels: int = _RULE.max_pixels
    max_vertices: int | None = None  # polygons with more are simplified
    workers: int = min(8, os.cpu_count() or 1)  # threads that decode, resize and save
    overwrite: bool = False  # a dataset of the same name may be replaced
    keep_emptied: bool = False  # keep images that lost all their objects, as images without objects
    name: str | None = None  # of the JSONL; None: that of the split, the annotation file or the folder
    progress: Callable[[int, int], None] | None = None  # (images done, all), from the calling thread

    @property
    def rule(self) -> ResizeRule | None:
        """The rule for resizing; None if images are not resized."""
        return ResizeRule(self.factor, self.min_pixels, self.max_pixels) if self.resize else None

    def __post_init__(self) -> None:
        rule = ResizeRule(self.factor, self.min_pixels, self.max_pixels)  # raises for impossible limits
        if not self.resize and rule != _RULE:
            raise DataError(
                "factor, min_pixels and max_pixels say how to resize, and --no-resize (resize=False) resizes "
                "nothing; leave one out"
            )
        if self.max_vertices is not None and self.max_vertices < 3:
            raise DataError(f"max_vertices is {self.max_vertices}; a polygon needs at least 3")
        if self.workers < 1:
            raise DataError(f"workers is {self.workers}; expected at least 1 thread")


# How an image that EXIF turns was annotated, by its annotation's size; None for one that EXIF does not turn.
_Drawn = Literal["upright", "as stored", "unclear"]


@dataclass(frozen=True, slots=True)
class _PreparedImage:
    path: Path
    size: tuple[int, int]
    frame: tuple[int, int]  # (width, height) in which coordinates are measured
    notes: Notes
    drawn: _Drawn | None = None


def _prepare_image(
    source: SourceImage, target: Path, options: ImageOptions, unclear: _Drawn = "unclear"
) -> _PreparedImage | LeftOut:
    # Decode an image, and write it to `target` as the model should see it; or return why it cannot be used. `unclear`:
    # how images were annotated whose own sizes do not tell, if others of the set do.
    try:
        if source.embedded is None and not source.path.is_file():
            raise LeftOut(SkipReason.MISSING_IMAGE, source.problem or f"no file {source.path}")
        return _write_image(source, target, options, unclear)
    except DataError as error:
        detail = str(error) if source.embedded is None else f"its imageData: {error}"
        return LeftOut(SkipReason.UNREADABLE_IMAGE, detail)
    except LeftOut as reason:
        return reason


def _write_image(source: SourceImage, target: Path, options: ImageOptions, unclear: _Drawn) -> _PreparedImage:
    data = None if source.embedded is None else source.embedded()
    header = read_header(source.path, data)
    upright, notes, drawn = _orient(source, header, unclear)
    if data is not None:
        notes = (*notes, (Note.EMBEDDED_IMAGE, f"no file {source.path}; took the annotation's own copy"))
    frame = source.declared_size or header.size
    width, height = size = header.size if upright else header.stored_size
    if options.rule is not None:
        if max(size) / min(size) > MAX_ASPECT_RATIO:
            raise LeftOut(SkipReason.EXTREME_ASPECT_RATIO, f"image is {width}x{height}")
        width, height = options.rule.prepared_size(width, height)
    # Decoded even if the file is kept as it is: a truncated image must not surface in the middle of a training.
    image = open_rgb(source.path, data=data, apply_orientation=upright)
    is_kept = options.rule is None and upright
    if is_kept and data is None:
        return _PreparedImage(source.path, size, frame, notes, drawn)
    target.parent.mkdir(parents=True, exist_ok=True)
    is_format = target.suffix.lower() in _SUFFIXES_BY_FORMAT.get(header.format, ())
    is_plain = header.orientation == 1 and header.mode == "RGB" and is_format
    if is_kept or (is_plain and (width, height) == size):  # no pixel changes: no second JPEG generation
        if data is None:
            shutil.copyfile(source.path, target)
        else:
            target.write_bytes(data)
    else:
        save_image(image if options.rule is None else options.rule.resize(image), target)
    return _PreparedImage(target, (width, height), frame, notes, drawn)


def _orient(source: SourceImage, header: ImageHeader, unclear: _Drawn) -> tuple[bool, Notes, _Drawn | None]:
    # Whether the image is turned upright first, by the size in its annotation, or by `unclear`.
    declared, real = source.declared_size, header.size
    shown = f"{header.size[0]}x{header.size[1]}"
    is_turned = header.orientation != 1
    # A half turn, a mirror image or a square photo: its size is the same either way.
    why = {
        "unclear": "assumed annotated upright, size is ambiguous",
        "upright": "read as annotated upright, like the other turned photos of this set",
        "as stored": "left out, like those of the other turned photos of this set",
    }[unclear]
    note = Note.EXIF_IGNORED if unclear == "as stored" else Note.EXIF_APPLIED
    turned = (note, f"EXIF orientation {header.orientation}; {why}")
    if declared is None:
        missing = (Note.SIZE_MISSING, f"annotation gives no size; took the image's {shown}")
        notes = () if source.sizeless else (missing,)
        return True, (*notes, turned) if is_turned else notes, None
    if declared == real:
        if is_turned and header.stored_size == real:
            return unclear != "as stored", (turned,), "unclear"
        return True, (), "upright" if is_turned else None
    stated = f"annotation says {declared[0]}x{declared[1]}, image is {shown}"
    if declared == header.stored_size:
        return False, ((Note.EXIF_IGNORED, f"{stated} after its EXIF orientation, which was left out"),), "as stored"
    # One pixel of rounding on either side is still the same shape.
    if abs(declared[0] * real[1] - declared[1] * real[0]) <= max(*declared, *real):
        return True, ((Note.SIZE_SCALED, f"{stated}; coordinates were read on the annotation's scale"),), None
    raise LeftOut(SkipReason.SIZE_MISMATCH, f"{stated}: another shape")


def assemble(
    sources: Sequence[SourceImage], report: ConversionReport, options: ImageOptions, meaning: Meaning
) -> ConversionReport:
    """Read the shapes' numbers by ``meaning``, prepare images, quantise objects, write the JSONL (in the order of
    ``sources``) and the report next to it.

    Images that lost all their objects are left out, unless ``options`` keep them. If the conversion fails, the images
    and folders that it made are removed, and the JSONL that it was to replace, if its images were; the report stays,
    except after an error in writing. Raises DataError if no image or none of the objects can be used, an image would
    overwrite a source, or the dataset exists and ``options`` do not allow to replace it."""
    check_numbers(sources, meaning)
    out_dir = report.jsonl.parent
    check_writable(out_dir, "name a folder with --out")
    fix = "--overwrite (overwrite=True) replaces it, --name and --out write another"
    check_new_file(report.jsonl, options.overwrite, fix)
    images_dir = out_dir / "images" / report.jsonl.stem
    targets = _targets(sources, images_dir, report)
    new = [target for target in targets if not target.exists()] if images_dir.exists() else list(targets)
    new_folders = [folder for folder in (out_dir, *out_dir.parents) if not folder.exists()]
    had_report = report.path.exists()
    try:
        if options.resize:  # its images are replaced one by one, so its objects would be no longer theirs
            report.jsonl.unlink(missing_ok=True)
        records: list[ImageRecord] = []
        for (target, source), image in zip(targets.items(), _prepare_images(targets, options), strict=True):
            if isinstance(image, LeftOut):
                report.skip_image(image.reason, source.annotation, str(image), len(source.objects))
            elif (record := _record(source, image, meaning, report, options)) is not None:
                records.append(record)
            elif image.path == target:
                target.unlink()
        report.images = len(records)
        report.objects = sum(len(record.objects) for record in records)
        report.objects_by_desc.update(obj.desc for record in records for obj in record.objects)
        assert report.images_seen == report.images + report.skipped_images.total(), "an image went uncounted"
        assert report.objects_seen == report.objects + report.skipped_objects.total(), "an object went uncounted"
        out_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(report.path, report.to_json())
        if report.objects_seen and not report.objects:
            what = f"0 of {report.objects_seen} objects can be used"
            raise DataError(f"{what} ({report.reasons()}); details in {report.path}", path=report.jsonl)
        if not records:
            raise DataError(f"no usable image ({report.reasons()}); details in {report.path}", path=report.jsonl)
        write_jsonl(records, report.jsonl)
    except BaseException as error:  # a full disk and Ctrl-C too: images without a JSONL are of no use
        if not had_report and not isinstance(error, DataError):
            report.path.unlink(missing_ok=True)
        _remove(new, images_dir, new_folders)
        raise
    return report


def _targets(sources: Sequence[SourceImage], folder: Path, report: ConversionReport) -> dict[Path, SourceImage]:
    # Each image by the file that is made of it.
    originals = {os.path.realpath(source.path) for source in sources}
    targets: dict[Path, SourceImage] = {}
    for source in sources:
        relative = PurePosixPath(source.file)
        kept = relative.suffix.lower() in (*JPEG_SUFFIXES, ".png")
        target = folder / (relative if kept else f"{relative}.png")
        if not can_be_file(target):
            detail = f"{shortened(source.file)}: this name is too long for a file"
            report.skip_image(SkipReason.MISSING_IMAGE, shortened(source.annotation), detail, len(source.objects))
        elif os.path.realpath(target) in originals:
            raise DataError(
                "is an image to convert, which a converted one would overwrite; choose another out_dir", path=target
            )
        elif target in targets:
            earlier = targets[target].annotation  # formats with one file for all images name the image here
            detail = f"{source.file} is the image of an earlier annotation"
            detail += "" if earlier == source.file else f" in {earlier}"
            report.skip_image(SkipReason.DUPLICATE_IMAGE, source.annotation, detail, len(source.objects))
        else:
            targets[target] = source
    return targets


def _prepare_images(targets: Mapping[Path, SourceImage], options: ImageOptions) -> list[_PreparedImage | LeftOut]:
    pool = ThreadPoolExecutor(options.workers)
    try:
        images: list[_PreparedImage | LeftOut] = []
        for image in pool.map(lambda pair: _prepare_image(pair[1], pair[0], options), targets.items()):
            images.append(image)
            if options.progress is not None:
                options.progress(len(images), len(targets))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a hundred thousand images
    drawn = Counter(image.drawn for image in images if isinstance(image, _PreparedImage))
    if drawn["unclear"] and bool(drawn["upright"]) != bool(drawn["as stored"]):  # the others agree
        agreed: _Drawn = "upright" if drawn["upright"] else "as stored"
        for at, (target, source) in enumerate(targets.items()):
            image = images[at]
            if isinstance(image, _PreparedImage) and image.drawn == "unclear":
                images[at] = _prepare_image(source, target, options, agreed)
    return images


def _record(
    source: SourceImage, prepared: _PreparedImage, meaning: Meaning, report: ConversionReport, options: ImageOptions
) -> ImageRecord | None:
    # None for an image that lost all its objects.
    for note, detail in prepared.notes:
        report.note(note, source.annotation, None, detail)
    objects: list[GTObject] = []
    for parts in source.objects:
        try:
            shape = read_object(parts, prepared.frame, meaning, source.annotation, report)
            quantised = quantise(parts[0], shape, prepared.frame, source.annotation, report, options.max_vertices)
        except LeftOut as reason:
            report.skip_object(reason.reason, source.annotation, parts[0].index, str(reason))
            continue
        if quantised in objects:
            detail = f"{quantised.desc} {quantised.kind} {list(quantised.bins)} is a duplicate; both are kept"
            report.note(Note.DUPLICATE_OBJECT, source.annotation, parts[0].index, detail)
        objects.append(quantised)
    if source.num_annotated and not objects:  # training on it would teach that there is nothing
        lost = f"all {source.num_annotated} objects were left out"
        if not options.keep_emptied:
            report.skip_image(SkipReason.EMPTIED_IMAGE, source.annotation, f"{lost}; --keep-emptied keeps it")
            return None
        report.note(Note.EMPTIED_IMAGE, source.annotation, None, f"{lost}; it is an empty image now")
    width, height = prepared.frame
    metadata = {**source.metadata, "source": {"file": source.file, "width": width, "height": height}}
    if options.rule is not None:
        metadata[PREPARED] = asdict(options.rule)
    return ImageRecord(source.file, prepared.path, *prepared.size, tuple(objects), metadata)


def _remove(images: Sequence[Path], folder: Path, new_folders: Sequence[Path]) -> None:
    # The images, and then the folders that are empty: below `folder`, itself, `images` around it, and the new ones
    # (innermost first).
    for path in images:
        path.unlink(missing_ok=True)
    below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True) if folder.is_dir() else []
    for path in (*below, folder, folder.parent, *new_folders):
        with suppress(OSError):  # not empty, or not there
            path.rmdir()
