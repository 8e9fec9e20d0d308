"""Tiny VOC and COCO folders for the converters' tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from coordexp.data import read_jsonl
from coordexp.data.convert import ConversionReport, ImageOptions
from coordexp.geometry import pixel_box
from coordexp.records import GTObject

SMALL = ImageOptions(factor=8, min_pixels=64, max_pixels=4096, workers=2)
KEEP = ImageOptions(resize=False)


def paint(path: Path, size: tuple[int, int] = (40, 24), **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 120, 40)).save(path, **options)


def voc_object(name: str, *box: Any, extra: str = "") -> str:
    corners = "".join(
        f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    return f"<object><name>{name}</name><bndbox>{corners}</bndbox>{extra}</object>"


def voc_xml(
    root: Path,
    stem: str,
    *objects: str,
    size: Any = (40, 24),
    filename: str | None = None,
    folder: str = "Annotations",
) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    sizes = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    name = filename or f"{stem}.jpg"
    text = f"<annotation><filename>{name}</filename>{sizes}{''.join(objects)}</annotation>"
    (root / folder / f"{stem}.xml").write_text(text, encoding="utf-8")


def voc(root: Path, *objects: str, **options: Any) -> Path:
    paint(root / "JPEGImages" / "a.jpg")
    voc_xml(root, "a", *objects, **options)
    return root


def coco(folder: Path, annotations: list[Any], images: list[Any] | None = None) -> Path:
    paint(folder / "images" / "a.jpg")
    content = {
        "images": images or [{"id": 7, "file_name": "a.jpg", "width": 40, "height": 24}],
        "annotations": [{"image_id": 7, "category_id": 1, **a} if isinstance(a, dict) else a for a in annotations],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 3, "name": " "}],
    }
    path = folder / "instances.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def objects_of(report: ConversionReport) -> tuple[GTObject, ...]:
    (record,) = read_jsonl(report.jsonl, check_images=True)
    return record.objects


def boxes_of(report: ConversionReport) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Names and bounds in whole pixels of images of 640 x 480, by image."""
    return {
        record.metadata["source"]["file"]: [
            (obj.desc, tuple(round(v) for v in pixel_box(obj, 640, 480))) for obj in record.objects
        ]
        for record in read_jsonl(report.jsonl)
    }
