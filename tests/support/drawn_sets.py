"""Five small pictures, each with a red rectangle on grey but the last, annotated in every form that people bring.

A form takes an empty folder and returns the words behind ``coordexp data convert``.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as masks

from support.annotation_folders import voc_object, voc_xml

SIZE = (96, 64)
NAME = "red square"
BOXES = {"a": (8, 8, 40, 32), "b": (40, 24, 80, 56), "c": (16, 32, 64, 48), "d": (48, 8, 88, 40), "e": None}
Box = tuple[int, int, int, int]
Form = Callable[[Path], list[Any]]


def pixels(box: Box | None) -> np.ndarray:
    """(H, W, 3)"""
    image = np.full((SIZE[1], SIZE[0], 3), 128, np.uint8)
    if box is not None:
        x1, y1, x2, y2 = box
        image[y1:y2, x1:x2] = (255, 0, 0)
    return image


def draw(folder: Path, stems: str = "abcde") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem in stems:
        Image.fromarray(pixels(BOXES[stem])).save(folder / f"{stem}.png")
    return folder


def ring_of(box: Box) -> list[int]:
    x1, y1, x2, y2 = box
    return [x1, y1, x2, y1, x2, y2, x1, y2]


def mask_of(box: Box) -> np.ndarray:
    """(H, W), in the order of memory that COCO's masks have"""
    x1, y1, x2, y2 = box
    mask = np.zeros((SIZE[1], SIZE[0]), np.uint8, order="F")
    mask[y1:y2, x1:x2] = 1
    return mask


def as_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# --- VOC ---


def voc(root: Path) -> list[Any]:
    draw(root / "JPEGImages")
    for stem, box in BOXES.items():
        voc_xml(root, stem, *([voc_object(NAME, *box)] if box else []), size=SIZE, filename=f"{stem}.png")
    return ["voc", root]


def voc_beside_images(root: Path) -> list[Any]:
    """labelImg's and Roboflow's way."""
    voc(root)
    for path in [*(root / "Annotations").iterdir(), *(root / "JPEGImages").iterdir()]:
        path.rename(root / path.name)
    for name in ("Annotations", "JPEGImages"):
        (root / name).rmdir()
    return ["voc", root]


# --- YOLO ---


def yolo_labels(root: Path, values: Callable[[Box], list[float]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for stem, box in BOXES.items():
        text = "" if box is None else " ".join(map(str, [0, *values(box)]))
        (root / f"{stem}.txt").write_text(text, encoding="utf-8")


def middle_and_sides(box: Box) -> list[float]:
    x1, y1, x2, y2 = box
    return [(x1 + x2) / 2 / SIZE[0], (y1 + y2) / 2 / SIZE[1], (x2 - x1) / SIZE[0], (y2 - y1) / SIZE[1]]


def corners(box: Box) -> list[float]:
    return [value / SIZE[at % 2] for at, value in enumerate(ring_of(box))]


def yolo(root: Path, values: Callable[[Box], list[float]] = middle_and_sides) -> list[Any]:
    draw(root / "images" / "train")
    yolo_labels(root / "labels" / "train", values)
    (root / "data.yaml").write_text(f"path: /elsewhere\ntrain: images/train\nnames:\n  0: {NAME}\n", encoding="utf-8")
    return ["yolo", root / "data.yaml"]


def yolo_polygons(root: Path) -> list[Any]:
    return yolo(root, corners)


def yolo_of_roboflow(root: Path) -> list[Any]:
    draw(root / "train" / "images")
    yolo_labels(root / "train" / "labels", middle_and_sides)
    text = f"train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['{NAME}']\nroboflow:\n  project: boxes\n"
    (root / "data.yaml").write_text(text, encoding="utf-8")
    return ["yolo", root, "--split", "train"]


def yolo_without_a_yaml(root: Path) -> list[Any]:
    draw(root / "images")
    yolo_labels(root / "labels", middle_and_sides)
    (root / "classes.txt").write_text(f"{NAME}\n", encoding="utf-8")
    return ["yolo", root]


# --- COCO, LVIS, panoptic ---


def instances(shape: Callable[[Box], dict[str, Any]]) -> dict[str, Any]:
    return {
        "images": [{"id": 10 + k, "file_name": f"{stem}.png", "width": SIZE[0], "height": SIZE[1]}
                   for k, stem in enumerate(BOXES)],
        "annotations": [{"id": k, "image_id": 10 + k, "category_id": 3, "iscrowd": 0, **shape(box)}
                        for k, box in enumerate(BOXES.values()) if box],
        "categories": [{"id": 3, "name": NAME}],
    }  # fmt: skip


def bounds(box: Box) -> dict[str, Any]:
    x1, y1, x2, y2 = box
    return {"bbox": [x1, y1, x2 - x1, y2 - y1]}


def outline(box: Box) -> dict[str, Any]:
    return bounds(box) | {"segmentation": [ring_of(box)]}


def runs(box: Box) -> dict[str, Any]:
    """COCO's plain run lengths, column by column, zeros first: what its own files write of crowds."""
    flat = mask_of(box).flatten(order="F").astype(int)
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, flat.size]).tolist()
    return bounds(box) | {"segmentation": {"size": [SIZE[1], SIZE[0]], "counts": counts}}


def packed_runs(box: Box) -> dict[str, Any]:
    packed: Any = masks.encode(mask_of(box))
    return bounds(box) | {"segmentation": {"size": packed["size"], "counts": packed["counts"].decode("ascii")}}


def crowd(box: Box) -> dict[str, Any]:
    return runs(box) | {"iscrowd": 1}


def coco(root: Path, shape: Callable[[Box], dict[str, Any]] = bounds, *words: Any) -> list[Any]:
    return ["coco", as_json(root / "instances.json", instances(shape)), draw(root / "images"), *words]


def coco_polygons(root: Path) -> list[Any]:
    return coco(root, outline, "--geometry", "poly")


def coco_runs(root: Path) -> list[Any]:
    return coco(root, runs, "--geometry", "poly")


def coco_packed_runs(root: Path) -> list[Any]:
    return coco(root, packed_runs, "--geometry", "poly")


def coco_crowds(root: Path) -> list[Any]:
    return coco(root, crowd, "--crowds", "keep")


def coco_crowds_as_polygons(root: Path) -> list[Any]:
    return coco(root, crowd, "--crowds", "keep", "--geometry", "poly")


def coco_of_roboflow(root: Path) -> list[Any]:
    content = instances(bounds)
    content["categories"].insert(0, {"id": 0, "name": "boxes", "supercategory": "none"})
    as_json(draw(root / "train") / "_annotations.coco.json", content)
    return ["coco", root / "train"]


def lvis(root: Path) -> list[Any]:
    content = instances(outline)
    content["categories"][0]["name"] = NAME.replace(" ", "_")
    return ["lvis", as_json(root / "lvis.json", content), draw(root / "images"), "--geometry", "poly"]


def panoptic(root: Path, *words: Any) -> list[Any]:
    """Segment 70000 is the box, segment 7 the grey around it."""
    content = instances(bounds)
    (root / "panoptic").mkdir(parents=True)
    content["annotations"] = []
    for image, (stem, box) in zip(content["images"], BOXES.items(), strict=True):
        ids = np.full((SIZE[1], SIZE[0]), 7)
        segments = [{"id": 7, "category_id": 4, "bbox": [0, 0, *SIZE], "iscrowd": 0}]
        if box:
            ids[mask_of(box) == 1] = 70_000
            segments.append({"id": 70_000, "category_id": 3, "iscrowd": 0, **bounds(box)})
        channels = np.stack([ids >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)
        Image.fromarray(channels).save(root / "panoptic" / f"{stem}.png")
        content["annotations"].append(
            {"image_id": image["id"], "file_name": f"{stem}.png", "segments_info": segments}
        )  # fmt: skip
    content["categories"] = [{"id": 3, "name": NAME, "isthing": 1}, {"id": 4, "name": "grey", "isthing": 0}]
    return ["panoptic", as_json(root / "panoptic.json", content), draw(root / "images"), *words]


def panoptic_polygons(root: Path) -> list[Any]:
    return panoptic(root, "--geometry", "poly")


# --- LabelMe ---


def labelme(root: Path, kind: str = "rectangle", *words: Any, embedded: bool = False) -> list[Any]:
    draw(root)
    for stem, box in BOXES.items():
        flat = [] if box is None else ring_of(box) if kind == "polygon" else list(box)
        points = [flat[at : at + 2] for at in range(0, len(flat), 2)]
        image = root / f"{stem}.png"
        content = {
            "version": "5.5.0", "imagePath": image.name, "imageWidth": SIZE[0], "imageHeight": SIZE[1],
            "shapes": [{"label": NAME, "shape_type": kind, "points": points}] if points else [],
            "imageData": base64.b64encode(image.read_bytes()).decode("ascii") if embedded else None,
        }  # fmt: skip
        as_json(root / f"{stem}.json", content)
        if embedded:
            image.unlink()
    return ["labelme", root, *words]


def labelme_polygons(root: Path) -> list[Any]:
    return labelme(root, "polygon")


def labelme_polygons_as_boxes(root: Path) -> list[Any]:
    return labelme(root, "polygon", "--geometry", "bbox")


def labelme_embedded(root: Path) -> list[Any]:
    """The pictures are in the JSON alone."""
    return labelme(root, "polygon", embedded=True)


# --- CSV ---


def rows(path: Path, header: str, row: Callable[[str, Box], list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = [row(f"{stem}.png", box) for stem, box in BOXES.items() if box]
        csv.writer(file).writerows([header.split(","), *lines])


def table(root: Path) -> list[Any]:
    draw(root, "abcd")  # a table has no line for an image without objects
    rows(root / "boxes.csv", "image,name,xmin,ymin,xmax,ymax", lambda file, box: [file, NAME, *box])
    return ["csv", root / "boxes.csv"]


def table_of_roboflow(root: Path) -> list[Any]:
    draw(root / "train", "abcd")
    header = "filename,width,height,class,xmin,ymin,xmax,ymax"
    rows(root / "train" / "_annotations.csv", header, lambda file, box: [file, *SIZE, NAME, *box])
    return ["csv", root / "train"]


BOX_FORMS: list[Form] = [
    voc, voc_beside_images, yolo, yolo_of_roboflow, yolo_without_a_yaml, coco, coco_crowds, coco_of_roboflow, panoptic,
    labelme, labelme_polygons_as_boxes, table, table_of_roboflow,
]  # fmt: skip
POLYGON_FORMS: list[Form] = [
    yolo_polygons, coco_polygons, coco_runs, coco_packed_runs, coco_crowds_as_polygons, lvis, panoptic_polygons,
    labelme_polygons, labelme_embedded,
]  # fmt: skip
