"""One annotated scene, written in every format that is converted."""

from __future__ import annotations

import json
from pathlib import Path

from support.annotation_folders import paint, voc_object, voc_xml

SIZE = (400, 240)
NAMES = ("cat", "traffic light", "手提包")
BOXES = [("cat", (20.0, 30.0, 180.0, 201.0)), ("traffic light", (200.0, 10.0, 230.0, 90.0)),
         ("手提包", (0.0, 0.0, 400.0, 240.0)), ("cat", (200.0, 100.0, 390.0, 239.0))]  # fmt: skip
RINGS = [
    ("cat", (50.0, 60.0, 150.0, 41.0, 190.0, 160.0, 100.0, 220.0)),
    ("手提包", (300.0, 20.0, 380.0, 30.0, 310.0, 99.0)),
]
IMAGES = ("a.jpg", "b.jpg")  # b has no objects


def paint_images(folder: Path) -> None:
    for file in IMAGES:
        paint(folder / file, SIZE)


def as_voc(folder: Path) -> Path:
    paint_images(folder / "JPEGImages")
    voc_xml(folder, "a", *(voc_object(name, *box) for name, box in BOXES), size=SIZE)
    voc_xml(folder, "b", size=SIZE)
    return folder


def as_coco(folder: Path, *, rings: bool = False) -> tuple[Path, Path]:
    paint_images(folder / "images")
    category_of = {name: number for number, name in enumerate(NAMES, start=1)}
    shapes = (
        [{"category_id": category_of[name], "segmentation": [list(ring)]} for name, ring in RINGS]
        if rings
        else [{"category_id": category_of[name], "bbox": [x1, y1, x2 - x1, y2 - y1]}
              for name, (x1, y1, x2, y2) in BOXES]
    )  # fmt: skip
    content = {
        "images": [{"id": k, "file_name": file, "width": SIZE[0], "height": SIZE[1]} for k, file in enumerate(IMAGES)],
        "annotations": [{"id": k, "image_id": 0, **shape} for k, shape in enumerate(shapes)],
        "categories": [{"id": number, "name": name} for name, number in category_of.items()],
    }
    path = folder / "data.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path, folder / "images"


def as_yolo(folder: Path, *, rings: bool = False, data_yaml: bool = True) -> Path:
    images = folder / "images" / "train"
    paint_images(images)
    labels = folder / "labels" / "train"
    labels.mkdir(parents=True, exist_ok=True)
    width, height = SIZE
    lines = []
    for name, (x1, y1, x2, y2) in BOXES:
        values = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        lines.append((name, values))
    if rings:
        lines = [(name, [value / SIZE[at % 2] for at, value in enumerate(ring)]) for name, ring in RINGS]
    text = "".join(f"{NAMES.index(name)} {' '.join(f'{value:.8f}' for value in values)}\n" for name, values in lines)
    (labels / "a.txt").write_text(text)
    if data_yaml:
        content = {"path": "/somewhere/else", "train": "images/train", "val": "images/val", "names": list(NAMES)}
        (folder / "data.yaml").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")  # JSON is YAML
    else:
        (folder / "classes.txt").write_text("\n".join(NAMES), encoding="utf-8")
    return folder


def as_labelme(folder: Path, *, rings: bool = False) -> Path:
    paint_images(folder)
    shapes = (
        [{"label": name, "points": [list(ring[at : at + 2]) for at in range(0, len(ring), 2)], "shape_type": "polygon"}
         for name, ring in RINGS]
        if rings
        else [{"label": name, "points": [[x2, y1], [x1, y2]], "shape_type": "rectangle"}
              for name, (x1, y1, x2, y2) in BOXES]
    )  # fmt: skip
    for file, content in ((IMAGES[0], shapes), (IMAGES[1], [])):
        fields = {"version": "5.5.0", "shapes": content, "imagePath": file, "imageData": None,
                  "imageHeight": SIZE[1], "imageWidth": SIZE[0]}  # fmt: skip
        (folder / file).with_suffix(".json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def as_csv(folder: Path, *, rings: bool = False) -> Path:
    paint_images(folder)
    lines = ["image,name,x1,y1,x2,y2,polygon"]
    lines += [f"{IMAGES[0]},{name},{','.join(map(str, box))}," for name, box in ([] if rings else BOXES)]
    lines += [f"{IMAGES[0]},{name},,,,,{' '.join(map(str, ring))}" for name, ring in (RINGS if rings else [])]
    (folder / "data.csv").write_text("\n".join([*lines, f"{IMAGES[1]},,,,,,"]), encoding="utf-8")
    return folder / "data.csv"
