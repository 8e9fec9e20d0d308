"""Formats with one file for a whole project → JSONL: CVAT for images 1.1 (XML), Label Studio (JSON) and the VGG Image
Annotator, VIA (JSON)."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote

from coordexp.addresses import split_url
from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason, SourceImage, SourceShape
from coordexp.data.convert.shapes import ShapeGeometry, declared_size, degrees, flat, number, shape_of
from coordexp.data.find_images import ImageFolder, images_folder, only_file, with_slashes
from coordexp.data.images import SEEN_SUFFIXES
from coordexp.errors import ConfigError, DataError
from coordexp.reading import read_json, read_xml


def convert_cvat(
    source: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    split: str | None = None,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a "CVAT for images 1.1" file. With ``geometry="poly"``, boxes are polygons of their corners and ellipses
    of points. A turned box is a polygon, with ``"bbox"`` its bounds."""
    file = only_file(Path(source), ".xml")
    meaning = Meaning(file, geometry=geometry)
    root = read_xml(file)
    nodes = root.findall("image")
    if root.tag != "annotations" or not nodes:
        raise DataError("no <annotations> with <image> in it; export the task as 'CVAT for images 1.1'", path=file)
    subsets = sorted({node.get("subset", "") for node in nodes})
    if split is not None:
        nodes = [node for node in nodes if node.get("subset") == split]
        if not nodes:
            raise DataError(f"no image of the subset {split!r}; found: {', '.join(filter(None, subsets))}", path=file)
    report = ConversionReport(Path(out_dir) / f"{options.name or split or file.stem}.jsonl")
    # A project's export has images/SUBSET/NAME, and names may repeat in its subsets.
    wanted = [
        [*(f"{prefix}{node.get('subset')}/{node.get('name')}" for prefix in ("images/", "") if node.get("subset")),
         node.get("name", "")]
        for node in nodes
    ]  # fmt: skip
    report.images_seen = len(nodes)
    sources = _find(file, images_dir, wanted, report)
    for node, image in zip(nodes, sources, strict=True):
        image.declared_size = declared_size(node.get("width"), node.get("height"))
        shapes = [child for child in node if child.tag != "tag"]  # a tag is about the whole image
        report.read_objects(image, shapes, _cvat_shape, _cvat_group)
    return assemble(sources, report, options, meaning)


def _cvat_group(node: ET.Element) -> Hashable:
    # A group's shapes are one object in CVAT's own exports.
    group = node.get("group_id", "0")
    return None if group in ("", "0") else (node.get("label"), group)


def _cvat_shape(index: int, node: ET.Element) -> SourceShape:
    desc = node.get("label", "")
    turn = number(node.get("rotation", "0"))
    if node.tag == "polygon":
        text = node.get("points", "")
        return shape_of(index, desc, "ring", [number(part) for part in re.split("[;,]", text)], text)
    names = {"box": ("xtl", "ytl", "xbr", "ybr"), "ellipse": ("cx", "cy", "rx", "ry")}.get(node.tag)
    if names is None:
        raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, f"{desc}: a {node.tag}; boxes, polygons and ellipses are read")
    texts = [node.get(name, "") for name in names]
    form = "corners" if node.tag == "box" else "ellipse"
    return shape_of(index, desc, form, [number(text) for text in texts], texts, turn=turn)


def convert_labelstudio(
    source: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert Label Studio's JSON or JSON-MIN.

    One annotation of a task counts: the one marked as ground truth, else the first that was not cancelled. Tasks
    without one are left out as not annotated. Images are found by the end of their path or URL.
    """
    file = only_file(Path(source), ".json")
    meaning = Meaning(file, "percent", geometry)
    tasks = read_json(file)
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise DataError("no list of tasks; export the project as JSON or JSON-MIN", path=file)
    report = ConversionReport(Path(out_dir) / f"{options.name or file.stem}.jsonl")
    report.images_seen = len(tasks)
    wanted: dict[int, list[str]] = {}
    for at, task in enumerate(tasks):
        link = _image_link(task["data"] if isinstance(task.get("data"), dict) else task)
        if link is None:
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, file.name, f"task {at} has no image")
            continue
        last = PurePosixPath(link).name
        # An upload gets eight characters in front of its name.
        wanted[at] = [link, str(task.get("file_upload") or last), re.sub(r"^[0-9a-f]{8}-", "", last)]
    sources = []
    for at, image in zip(wanted, _find(file, images_dir, list(wanted.values()), report), strict=True):
        shown = image.file
        results, num_others = _results_of(tasks[at])
        if num_others:
            detail = f"task {at} has {num_others} other annotations; took the ground truth, or else the first"
            report.note(Note.SEVERAL_ANSWERS, shown, None, detail)
        if results is None:
            report.skip_image(SkipReason.UNLABELLED, shown, f"task {at} has no annotation")
            continue
        names = {
            str(result.get("id")): result["value"]["labels"]
            for result in results
            if result.get("type") == "labels" and isinstance(result["value"].get("labels"), list)
        }
        for result in results:
            kind, value = str(result.get("type")), result["value"]
            if kind == "labels" or not ({"x", "points", "rle"} & value.keys()):
                continue  # a region's name, or an answer about the whole image
            labels = value.get(kind) or names.get(str(result.get("id"))) or [""]
            width, height = (result.get(side, value.get(side)) for side in ("original_width", "original_height"))
            image.declared_size = image.declared_size or declared_size(width, height)
            labels = labels if isinstance(labels, list) else [labels]
            index = image.num_annotated
            report.read_classes(image, index, labels, partial(_labelstudio_shape, index, kind, value))
        sources.append(image)
    return assemble(sources, report, options, meaning)


def _image_link(data: dict[str, Any]) -> str | None:
    # The path of the task's image: the part after `?d=` for local files, else that of the URL. The field `image` counts
    # also without a suffix, as links of a store have none.
    paths = {}
    for field, value in data.items():
        if isinstance(value, str):
            try:
                parts = split_url(with_slashes(value))
            except ConfigError:
                continue  # any text, such as a comment
            paths[field] = (parse_qs(parts.query).get("d") or [unquote(parts.path)])[0]
    named = [path for path in paths.values() if Path(path).suffix.lower() in SEEN_SUFFIXES]
    return paths.get("image") or next(iter(named), None)


def _results_of(task: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, int]:
    # The regions of a task, as JSON has them, and the number of other annotations; None without one.
    annotations = task.get("annotations", task.get("completions"))
    if not isinstance(annotations, list):  # JSON-MIN has the values alone, by field
        results = [
            {"type": key, "value": region, **region}
            for regions in task.values()
            if isinstance(regions, list)
            for region in regions
            if isinstance(region, dict)
            for key in region
            if key.endswith("labels")
        ]
        is_done = results or any(key in task for key in ("annotator", "annotation_id", "lead_time"))
        return (results if is_done else None), 0
    done = [one for one in annotations if isinstance(one, dict) and not one.get("was_cancelled")]
    if not done:
        return None, 0
    results = min(done, key=lambda one: not one.get("ground_truth")).get("result")
    listed = results if isinstance(results, list) else []
    sound = [result for result in listed if isinstance(result, dict) and isinstance(result.get("value"), dict)]
    return sound, len(done) - 1


def _labelstudio_shape(index: int, kind: str, value: dict[str, Any], desc: Any) -> SourceShape:
    turn = value.get("rotation") or 0.0
    if kind.startswith("rectangle"):
        numbers = [value.get(name) for name in ("x", "y", "width", "height")]
        return shape_of(index, desc, "size", numbers, turn=turn, about_corner=True)
    if kind.startswith("ellipse"):
        numbers = [value.get(name) for name in ("x", "y", "radiusX", "radiusY")]
        return shape_of(index, desc, "ellipse", numbers, turn=turn)
    if kind.startswith("polygon"):
        return shape_of(index, desc, "ring", flat(value.get("points")), value.get("points"))
    raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, f"{desc}: {kind}; rectangles, polygons and ellipses are read")


_NAMES_OF_CLASSES = ("label", "labels", "class", "class_name", "name", "category", "type", "object")


def convert_via(
    source: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    attribute: str | None = None,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert VIA's JSON: annotations of 1.x and 2.x, or a project."""
    file = only_file(Path(source), ".json")
    meaning = Meaning(file, geometry=geometry)
    content = read_json(file)
    if isinstance(content, dict) and isinstance(content.get("_via_img_metadata"), dict):
        content = content["_via_img_metadata"]
    entries = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "regions" in e for e in entries):
        raise DataError("no images with 'regions'; export the annotations as JSON, or save the project", path=file)
    regions_of = [_regions(entry) for entry in entries]
    attribute = attribute or _class_attribute([region for regions in regions_of for region in regions], file)
    report = ConversionReport(Path(out_dir) / f"{options.name or file.stem}.jsonl")
    wanted = [[str(entry.get("filename") or "")] for entry in entries]
    report.images_seen = len(entries)
    sources = _find(file, images_dir, wanted, report)
    for regions, image in zip(regions_of, sources, strict=True):
        image.sizeless = True
        for index, region in enumerate(regions):
            report.read_classes(image, index, _via_names(region, attribute), partial(_via_shape, index, region))
    return assemble(sources, report, options, meaning)


def _regions(entry: dict[str, Any]) -> list[dict[str, Any]]:
    regions = entry["regions"]
    listed = list(regions.values()) if isinstance(regions, dict) else regions  # VIA 1 numbers them
    return [region if isinstance(region, dict) else {} for region in (listed if isinstance(listed, list) else [])]


def _class_attribute(regions: Sequence[dict[str, Any]], file: Path) -> str:
    # The region attribute that holds the class: the only one, or one of a usual name.
    given = (region.get("region_attributes") for region in regions)
    names = sorted({name for attributes in given if isinstance(attributes, dict) for name in attributes})
    usual = [name for wanted in _NAMES_OF_CLASSES for name in names if name.casefold() == wanted]
    if len(names) == 1:
        return names[0]
    if not usual and names:
        raise DataError(f"regions have the attributes {', '.join(names)}; name the class's with --attribute", path=file)
    return usual[0] if usual else "label"


def _via_names(region: dict[str, Any], attribute: str) -> list[str]:
    # The classes of a region, at least one, which may be empty. Check boxes may have several.
    attributes = region.get("region_attributes")
    given = attributes.get(attribute, "") if isinstance(attributes, dict) else ""
    if isinstance(given, dict):
        return [name for name, is_on in given.items() if is_on] or [""]
    return ["" if given is None else str(given)]


def _via_shape(index: int, region: dict[str, Any], desc: str) -> SourceShape:
    shape = region.get("shape_attributes")
    shape = shape if isinstance(shape, dict) else {}
    kind = shape.get("name")
    if kind == "polygon":
        xs, ys = shape.get("all_points_x"), shape.get("all_points_y")
        points = None
        if isinstance(xs, list) and isinstance(ys, list) and len(xs) == len(ys):
            points = [value for point in zip(xs, ys, strict=True) for value in point]
        return shape_of(index, desc, "ring", points, shape)
    if kind == "rect":
        return shape_of(index, desc, "size", [shape.get(name) for name in ("x", "y", "width", "height")], shape)
    if kind in ("circle", "ellipse"):
        names = ("cx", "cy", "r", "r") if kind == "circle" else ("cx", "cy", "rx", "ry")
        turn = degrees(shape.get("theta", 0.0)) if kind == "ellipse" else 0.0
        return shape_of(index, desc, "ellipse", [shape.get(name) for name in names], shape, turn=turn)
    detail = f"{desc}: {kind!r} has no area; rect, circle, ellipse and polygon are read"
    raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, detail)


def _find(
    file: Path, images_dir: str | Path | None, wanted: Sequence[Sequence[str]], report: ConversionReport
) -> list[SourceImage]:
    images = ImageFolder(images_folder(images_dir, file))
    sources = report.find_all(images, wanted, file.name)
    report.note_unnamed(images, sources, file.name)
    return sources
