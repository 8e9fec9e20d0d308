"""The same boxes in each format of annotations, converted: by the names of the images in ``home/images``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordexp.data.convert import (
    ConversionReport,
    convert_coco,
    convert_csv,
    convert_cvat,
    convert_dota,
    convert_labelme,
    convert_labelstudio,
    convert_via,
    convert_voc,
)
from support.annotation_folders import voc_object, voc_xml

Box = tuple[float, float, float, float]  # corners; label studio's are percent
Boxes = Mapping[str, Sequence[Box]]
Size = tuple[int, int]
Convert = Callable[..., ConversionReport]


def written(path: Path, content: object, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding)
    return path


def coco(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    sized = [(k, [a, b, c - a, d - b]) for k, of_image in enumerate(boxes.values()) for a, b, c, d in of_image]
    content = {
        "images": [{"id": k, "file_name": name, "width": size[0], "height": size[1]} for k, name in enumerate(boxes)],
        "annotations": [{"id": i, "image_id": k, "category_id": 1, "bbox": box} for i, (k, box) in enumerate(sized)],
        "categories": [{"id": 1, "name": "crack"}],
    }
    return convert_coco(written(home / "c.json", content), home / "images", home / "out", **options)


def voc(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    for k, (name, of_image) in enumerate(boxes.items()):
        voc_xml(home, f"x{k}", *(voc_object("crack", *box) for box in of_image), size=size, filename=name)
    return convert_voc(home, home / "out", images_dir="images", **options)


def labelme(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    for k, (name, of_image) in enumerate(boxes.items()):
        shapes = [{"label": "crack", "points": [box[:2], box[2:]], "shape_type": "rectangle"} for box in of_image]
        content = {"shapes": shapes, "imagePath": name, "imageWidth": size[0], "imageHeight": size[1]}
        written(home / "lm" / f"{k}.json", content)
    return convert_labelme(home / "lm", home / "out", images_dir=home / "images", **options)


def via(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    def region(a: float, b: float, c: float, d: float) -> dict[str, Any]:
        shape = {"name": "rect", "x": a, "y": b, "width": c - a, "height": d - b}
        return {"shape_attributes": shape, "region_attributes": {"label": "crack"}}

    content = {name: {"filename": name, "regions": [region(*box) for box in boxes[name]]} for name in boxes}
    return convert_via(written(home / "v.json", content), home / "out", images_dir=home / "images", **options)


def cvat(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    text = ""
    for name, of_image in boxes.items():
        shapes = "".join(f'<box label="crack" xtl="{a}" ytl="{b}" xbr="{c}" ybr="{d}"/>' for a, b, c, d in of_image)
        text += f'<image name="{name}" width="{size[0]}" height="{size[1]}">{shapes}</image>'
    file = written(home / "a.xml", f"<annotations>{text}</annotations>")
    return convert_cvat(file, home / "out", images_dir=home / "images", **options)


def dota(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    for name, of_image in boxes.items():
        lines = "".join(f"{a} {b} {c} {b} {c} {d} {a} {d} crack 0\n" for a, b, c, d in of_image)
        written((home / "labelTxt" / name).with_suffix(".txt"), lines)
    return convert_dota(home, home / "out", **options)


def csv(home: Path, boxes: Boxes, size: Size, /, header: str = "x1,y1,x2,y2", **options: Any) -> ConversionReport:
    rows = [f"{name},crack,{','.join(map(str, box))}" for name, of_image in boxes.items() for box in of_image]
    table = written(home / "t.csv", "\n".join([f"image,name,{header}", *rows]))
    return convert_csv(table, home / "out", images_dir=home / "images", **options)


def labelstudio(home: Path, boxes: Boxes, size: Size, /, **options: Any) -> ConversionReport:
    def region(a: float, b: float, c: float, d: float) -> dict[str, Any]:
        value = {"x": a, "y": b, "width": c - a, "height": d - b, "rotation": 0, "rectanglelabels": ["crack"]}
        return {"type": "rectanglelabels", "value": value, "original_width": size[0], "original_height": size[1]}

    tasks = [
        {
            "data": {"image": f"/data/local-files/?d={name}"},
            "annotations": [{"result": [region(*b) for b in boxes[name]]}],
        }
        for name in boxes
    ]
    return convert_labelstudio(written(home / "l.json", tasks), home / "out", images_dir=home / "images", **options)
