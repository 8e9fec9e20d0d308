"""Photographs of blood cells with two annotators' boxes, cut into tiles: BCCD (incomplete), TXL-PBC (nearly complete).

Pixels are those of the photograph, and boxes are ``(x1, y1, x2, y2)`` in pixel edges. README.md says which photographs
go into which split.
"""

from __future__ import annotations

import csv
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageOps

from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.geometry import aabb, to_bin, to_pixel
from coordexp.records import GTObject, ImageRecord

PAIRS = Path(__file__).resolve().parent / "pairs.csv"  # which of TXL's files is which photograph of BCCD, unturned
NAMES = ("WBC", "RBC", "Platelets")  # by TXL's class number; BCCD uses the same names
TILE = (160, 128)  # pixels of a tile, after it is resized
MIN_VISIBLE = 0.3  # share of a box's area that a tile must show
TEST, VALIDATION = 80, 48  # photographs
RED_CELL = {(575, 575): 130, (360, 363): 74, (366, 369): 76}  # median width by the size of TXL's other photographs
WIDTH_IN_TILE = 51  # of BCCD's red cells, in a tile
WINDOWS = 6  # of each of TXL's other photographs
BORDER = 4.0  # pixels of the photograph: a box that begins or ends nearer to its edge is at the border
SIDES = ("xmin", "ymin", "xmax", "ymax")  # of BCCD's XML
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Photograph:
    """``boxes``: (name, box) of each object, by whoever annotated it."""

    image: Path
    size: tuple[int, int]
    boxes: tuple[tuple[str, Box], ...]


def read_bccd(root: Path, stem: str) -> Photograph:
    """One of BCCD's photographs with the boxes that its annotators drew."""
    node = ET.parse(root / "BCCD" / "Annotations" / f"{stem}.xml")
    boxes = [
        (obj.findtext("name", ""), [float(obj.findtext(f"bndbox/{side}", "")) for side in SIDES])
        for obj in node.iter("object")
    ]
    return _photograph(root / "BCCD" / "JPEGImages" / f"{stem}.jpg", boxes)


def read_txl(root: Path, image: str) -> Photograph:
    """One of TXL's photographs with its boxes; ``image`` is relative to ``root``."""
    path = root / image
    width, height = Image.open(path).size
    boxes = []
    for line in (root / image.replace("images/", "labels/", 1)).with_suffix(".txt").read_text().splitlines():
        number, x, y, w, h = line.split()
        left, top = (float(x) - float(w) / 2) * width, (float(y) - float(h) / 2) * height
        boxes.append((NAMES[int(number)], (left, top, left + float(w) * width, top + float(h) * height)))
    return _photograph(path, boxes)


def _photograph(path: Path, boxes: Iterable[tuple[str, Sequence[float]]]) -> Photograph:
    width, height = Image.open(path).size
    inside = []
    for name, (x1, y1, x2, y2) in boxes:
        box = (max(0.0, x1), max(0.0, y1), min(float(width), x2), min(float(height), y2))
        if box[2] - box[0] >= 1 and box[3] - box[1] >= 1:
            inside.append((name, box))
    return Photograph(path, (width, height), tuple(inside))


def split_photographs(bccd: Path, txl: Path) -> dict[str, list[Photograph]]:
    """``train`` and ``train_txl`` (the same photographs, BCCD's and TXL's boxes), ``val`` (BCCD's boxes), ``test``
    (TXL's boxes), ``others`` (TXL's photographs of other sources). No photograph of BCCD is in two of them."""
    for flag, folder in (("--bccd", bccd / "BCCD" / "Annotations"), ("--txl", txl / "labels")):
        if not folder.is_dir():
            raise SystemExit(f"{folder}: no such folder; README.md names the data sets, give a copy's folder to {flag}")
    with PAIRS.open() as file:
        same = {row["bccd"]: row["txl"] for row in csv.DictReader(file)}
    stems = sorted(path.stem for path in (bccd / "BCCD" / "Annotations").glob("*.xml"))
    rng = random.Random(56)
    both = rng.sample(sorted(same), len(same))
    test, train = both[:TEST], both[TEST:]
    val = rng.sample([stem for stem in stems if stem not in same], VALIDATION)
    others = sorted(path.relative_to(txl).as_posix() for path in txl.glob("images/*/*"))
    return {
        "train": [read_bccd(bccd, stem) for stem in sorted(train)],
        "train_txl": [read_txl(txl, same[stem]) for stem in sorted(train)],
        "val": [read_bccd(bccd, stem) for stem in sorted(val)],
        "test": [read_txl(txl, same[stem]) for stem in sorted(test)],
        # 416 x 416: most are resized or turned copies of BCCD's photographs
        "others": [read_txl(txl, name) for name in others if Image.open(txl / name).size in RED_CELL],
    }


def quarters(photograph: Photograph) -> list[tuple[int, int, int, int]]:
    """Windows of 2 x 2 tiles without overlap."""
    w, h = photograph.size[0] // 2, photograph.size[1] // 2
    return [(x, y, x + w, y + h) for y in (0, h) for x in (0, w)]


def random_windows(photograph: Photograph, rng: random.Random) -> list[tuple[int, int, int, int]]:
    """Windows in which red cells are about as wide as in BCCD's tiles."""
    windows = []
    for _ in range(WINDOWS):
        factor = RED_CELL[photograph.size] / WIDTH_IN_TILE * rng.uniform(0.85, 1.2)
        w, h = (round(factor * side) for side in TILE)
        x, y = rng.randrange(photograph.size[0] - w + 1), rng.randrange(photograph.size[1] - h + 1)
        windows.append((x, y, x + w, y + h))
    return windows


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG, which gets its name when it is whole: a file that is there can be used again."""
    part = path.with_suffix(".part")
    picture.save(part, "PNG", compress_level=1)
    part.replace(path)


def cut(photograph: Photograph, window: tuple[int, int, int, int], path: Path) -> ImageRecord:
    """Write a window of a photograph as a tile, unless it is there; returns it with the boxes of which it shows
    ``MIN_VISIBLE`` or more."""
    left, top, right, bottom = window
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.open(photograph.image).convert("RGB").crop(window)
        save(picture.resize(TILE, Image.Resampling.BOX), path)
    objects = []
    for name, (x1, y1, x2, y2) in photograph.boxes:
        a, b, c, d = max(x1, left), max(y1, top), min(x2, right), min(y2, bottom)
        if c <= a or d <= b or (c - a) * (d - b) < MIN_VISIBLE * (x2 - x1) * (y2 - y1):
            continue
        scale_x, scale_y = TILE[0] / (right - left), TILE[1] / (bottom - top)
        sides = ((a - left) * scale_x, (b - top) * scale_y, (c - left) * scale_x, (d - top) * scale_y)
        bins = tuple(to_bin(x, TILE[at % 2]) for at, x in enumerate(sides))
        objects.append(GTObject(name, "bbox_2d", bins))
    metadata = {"photograph": photograph.image.stem, "size": list(photograph.size), "window": list(window)}
    return ImageRecord(path.stem, path, *TILE, tuple(objects), metadata)


def prepare(bccd: Path, txl: Path, folder: Path) -> dict[str, Path]:
    """Write the tiles of every split below ``folder``; returns their JSONL by split."""
    files = {split: folder / f"{split}.jsonl" for split in ("train", "train_txl", "val", "test", "others")}
    if all(path.exists() for path in files.values()):
        return files
    rng = random.Random(57)
    splits = split_photographs(bccd, txl)
    for split, photographs in splits.items():
        records = []
        # train_txl has the tiles of train: TXL's files of BCCD's photographs are the same pictures
        pictures = splits["train"] if split == "train_txl" else photographs
        for photograph, picture in zip(photographs, pictures, strict=True):
            windows = random_windows(photograph, rng) if split == "others" else quarters(photograph)
            for number, window in enumerate(windows):
                path = folder / split.removesuffix("_txl") / f"{picture.image.stem}-{number}.png"
                records.append(cut(photograph, window, path))
        write_jsonl([record for record in records if record.objects or split in ("val", "test")], files[split])
    return files


def prepare_whole(bccd: Path, txl: Path, folder: Path) -> dict[str, Path]:
    """Write whole photographs of ``train`` and ``test`` below ``folder``, resized so that tiles of ``TILE`` without
    overlap are those of :func:`prepare`; returns their JSONL, ``train_whole`` and ``test_whole``."""
    files = {f"{split}_whole": folder / f"{split}_whole.jsonl" for split in ("train", "test")}
    if all(path.exists() for path in files.values()):
        return files
    splits = split_photographs(bccd, txl)
    for name, file in files.items():
        records = []
        for photograph in splits[name.removesuffix("_whole")]:
            path = folder / name / f"{photograph.image.stem}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (2 * TILE[0], 2 * TILE[1])
            save(Image.open(photograph.image).convert("RGB").resize(size, Image.Resampling.BOX), path)
            boxes = [
                GTObject(desc, "bbox_2d", tuple(to_bin(x, photograph.size[at % 2]) for at, x in enumerate(box)))
                for desc, box in photograph.boxes
            ]
            records.append(ImageRecord(path.stem, path, *size, tuple(boxes)))
        write_jsonl(records, file)
    return files


def with_views(jsonl: Path) -> Path:
    """The tiles of ``jsonl`` and their three mirror images, objects with them: rollout matching cannot train on random
    views, so all variants train on these."""
    target = jsonl.with_name(jsonl.stem + "-views.jsonl")
    if target.exists():
        return target
    records = []
    for record in read_jsonl(jsonl):
        records.append(record)
        for name, horizontal, vertical in (("h", True, False), ("v", False, True), ("hv", True, True)):
            path = record.image.with_name(f"{record.image.stem}-{name}.png")
            if not path.exists():
                picture = Image.open(record.image)
                picture = ImageOps.mirror(picture) if horizontal else picture
                save(ImageOps.flip(picture) if vertical else picture, path)
            objects = tuple(replace(obj, bins=_mirrored(obj.bins, horizontal, vertical)) for obj in record.objects)
            records.append(replace(record, image=path, objects=objects))
    write_jsonl(records, target)
    return target


def _mirrored(bins: Sequence[int], horizontal: bool, vertical: bool) -> tuple[int, ...]:
    x1, y1, x2, y2 = bins
    if horizontal:
        x1, x2 = 999 - x2, 999 - x1
    if vertical:
        y1, y2 = 999 - y2, 999 - y1
    return x1, y1, x2, y2


def joined(answers: Sequence[ImageAnswer], records: Sequence[ImageRecord]) -> list[ImageAnswer]:
    """One answer per photograph from the answers to its tiles. Cut cells stay cut: no box is merged across tiles."""
    groups: dict[str, list[tuple[ImageAnswer, ImageRecord]]] = {}
    for answer, record in zip(answers, records, strict=True):
        groups.setdefault(record.metadata["photograph"], []).append((answer, record))
    return [_joined(name, parts) for name, parts in sorted(groups.items())]


def _joined(name: str, parts: Sequence[tuple[ImageAnswer, ImageRecord]]) -> ImageAnswer:
    width, height = parts[0][1].metadata["size"]

    def moved(bins: Sequence[float], window: Sequence[int]) -> tuple[int, ...]:
        left, top, right, bottom = window
        start, side, whole = (left, top), (right - left, bottom - top), (width, height)
        return tuple(to_bin(start[at % 2] + to_pixel(k, side[at % 2]), whole[at % 2]) for at, k in enumerate(bins))

    gt = tuple(replace(o, bins=moved(o.bins, r.metadata["window"])) for a, r in parts for o in a.gt or ())
    pred = tuple(replace(o, bins=moved(o.bins, r.metadata["window"])) for a, r in parts for o in a.pred)
    return ImageAnswer(
        name, f"{name}.jpg", width, height, gt, pred,
        truncated=any(a.truncated for a, _ in parts), num_tokens=sum(a.num_tokens for a, _ in parts),
    )  # fmt: skip


def at_border(obj: GTObject | ScoredObject, answer: ImageAnswer) -> bool:
    """Whether a box reaches the edge of its photograph."""
    x1, y1, x2, y2 = aabb(obj)
    x, y = (to_bin(BORDER, side) for side in (answer.width, answer.height))
    return x1 <= x or y1 <= y or x2 >= 999 - x or y2 >= 999 - y
