"""The half that all converters share: pixel shapes and source images → resized images, JSONL and report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from coordexp.data.convert.prepare import ImageOptions, PreparedImage, prepare_image
from coordexp.data.convert.quantise import quantise
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.convert.sources import SourceImage
from coordexp.data.images import JPEG_SUFFIXES
from coordexp.data.preparation import IN_METADATA
from coordexp.data.write import write_jsonl
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

Progress = Callable[[int, int], None]


def assemble(
    sources: Sequence[SourceImage],
    report: ConversionReport,
    options: ImageOptions,
    progress: Progress | None = None,
) -> ConversionReport:
    """Prepare images, quantise objects, write the JSONL and the report beside it; records stand in ``sources`` order.

    ``progress(done, total)`` is called after each image, from the calling thread.

    Raises:
        DataError: no image at all can be used, or the dataset exists and ``options`` do not allow to replace it.
    """
    if report.jsonl.exists() and not options.overwrite:
        raise DataError(
            "exists already; --overwrite (overwrite=True) replaces it, --name and --out write another",
            path=report.jsonl,
        )
    targets = _targets(sources, report)
    records: list[ImageRecord] = []
    pool = ThreadPoolExecutor(options.workers)
    try:
        jobs = pool.map(lambda pair: prepare_image(pair[0], pair[1], options), targets)
        for done, ((source, _), prepared) in enumerate(zip(targets, jobs, strict=True), start=1):
            if isinstance(prepared, LeftOut):
                report.skip_image(prepared.reason, source.annotation, str(prepared), len(source.objects))
            else:
                records.append(_record(source, prepared, report, options))
            if progress is not None:
                progress(done, len(targets))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a hundred thousand images
    report.images = len(records)
    report.objects = sum(len(record.objects) for record in records)
    report.objects_by_desc.update(obj.desc for record in records for obj in record.objects)
    assert report.images_seen == report.images + report.skipped_images.total(), "an image went uncounted"
    assert report.objects_seen == report.objects + report.skipped_objects.total(), "an object went uncounted"
    report.jsonl.parent.mkdir(parents=True, exist_ok=True)
    report.path.write_text(report.to_json(), encoding="utf-8")
    if not records:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in report.skipped_images.items()) or "none found"
        raise DataError(f"no usable image ({reasons}); details in {report.path}", path=report.jsonl)
    write_jsonl(records, report.jsonl)
    return report


def _targets(sources: Sequence[SourceImage], report: ConversionReport) -> list[tuple[SourceImage, Path]]:
    """Where each image goes. No two may share a place, and none may overwrite its source."""
    images_dir = report.jsonl.parent / "images" / report.jsonl.stem
    targets: dict[Path, SourceImage] = {}
    for source in sources:
        relative = PurePosixPath(source.file)
        kept = relative.suffix.lower() in (*JPEG_SUFFIXES, ".png")
        target = images_dir / (relative if kept else f"{relative}.png")
        if os.path.realpath(target) == os.path.realpath(source.path):
            raise DataError("the converted image would overwrite its source; choose another out_dir", path=source.path)
        if target in targets:
            detail = f"{source.file} is annotated by {targets[target].annotation} already"
            report.skip_image(SkipReason.DUPLICATE_IMAGE, source.annotation, detail, len(source.objects))
        else:
            targets[target] = source
    return [(source, target) for target, source in targets.items()]


def _record(
    source: SourceImage, prepared: PreparedImage, report: ConversionReport, options: ImageOptions
) -> ImageRecord:
    for note, detail in prepared.notes:
        report.note(note, source.annotation, None, detail)
    objects: list[GTObject] = []
    for obj in source.objects:
        try:
            quantised = quantise(obj, prepared.frame, source.annotation, report, options.max_vertices)
        except LeftOut as reason:
            report.skip_object(reason.reason, source.annotation, obj.index, str(reason))
            continue
        if quantised in objects:
            detail = f"{quantised.desc} {quantised.kind} {list(quantised.bins)} is there already; both are kept"
            report.note(Note.DUPLICATE_OBJECT, source.annotation, obj.index, detail)
        objects.append(quantised)
    if source.objects and not objects:
        report.note(Note.EMPTIED_IMAGE, source.annotation, None, "every object was left out; it is an empty image now")
    return ImageRecord(
        sample_id=source.file,
        image=prepared.path,
        width=prepared.size[0],
        height=prepared.size[1],
        objects=tuple(objects),
        metadata={
            "source": {"file": source.file, "width": prepared.frame[0], "height": prepared.frame[1]},
            **({} if options.rule is None else {IN_METADATA: options.rule.to_metadata()}),
        },
    )
