"""Which annotation format a file or folder has, for errors of a converter that cannot read it."""

from __future__ import annotations

import re
from pathlib import Path

from coordexp.data.find_images import files_below

_HEAD = 1 << 16  # bytes of a file that are read for its format
_FILES = 200  # looked at in a folder, before the search ends
_UNREAD = "which no converter reads; convert it to COCO first"
# By suffix: the command of coordexp data convert, the format's name, and texts that are all in the head of such a file.
_MARKS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    ".xml": [
        ("cvat", "CVAT for images", ("<annotations", "<image ")),
        ("", "CVAT for video, which no converter reads; export the task as 'CVAT for images 1.1'",
         ("<annotations", "<track ")),
        ("voc", "Pascal VOC", ("<annotation", "<bndbox")),
    ],
    ".json": [
        ("via", "VIA", ("_via_img_metadata",)),
        ("via", "VIA", ('"regions"', '"filename"', '"file_attributes"')),
        ("labelme", "LabelMe", ('"shapes"', '"imagePath"')),
        ("panoptic", "COCO panoptic", ('"segments_info"',)),
        ("labelstudio", "Label Studio", ('"result"', '"annotations"')),
        ("labelstudio", "Label Studio", ('"original_width"', "labels")),
        ("coco", "COCO", ('"images"', '"file_name"')),
        ("", f"CreateML, {_UNREAD}", ('"annotations"', '"coordinates"', '"image')),
        ("", f"VoTT, {_UNREAD}", ('"asset"', '"regions"')),
        ("", f"Supervisely, {_UNREAD}", ('"classTitle"', '"objects"')),
        ("", f"Labelbox, {_UNREAD}", ('"data_row"',)),
        ("", f"Datumaro, {_UNREAD}", ('"items"', '"categories"', '"label_id"')),
    ],
    ".csv": [
        ("", "VIA's CSV, which no converter reads; export the annotations as JSON", ("region_shape_attributes",)),
        ("openimages", "Open Images", ("ImageID", "LabelName", "XMin", "YMax")),
        *(("csv", "a table of boxes", (mark,)) for mark in ("image", "bbox", "xmin", "x_min", "filename")),
    ],
    ".yaml": [("yolo", "YOLO", ("names",))],
    ".txt": [],
}  # fmt: skip
_WIDER = re.compile(r"\S+\.(jpe?g|png)", re.IGNORECASE)
_LINES = {  # by the first line of a text file
    ("dota", "DOTA"):
        re.compile(r"(imagesource:.*|gsd:.*|\s*(-?[\d.]+(e[+-]?\d+)?\s+){8}[^\s\d.]\S*( .*)?)", re.IGNORECASE),
    ("yolo", "YOLO"): re.compile(r"\s*\d+((\s+-?[\d.]+(e-?\d+)?){2}){2,}\s*", re.IGNORECASE),
    ("", f"KITTI, {_UNREAD}"):
        re.compile(r"[A-Za-z_]+\s+-?[\d.]+\s+-?\d+\s+(-?[\d.]+\s+){11}-?[\d.]+(\s+-?[\d.]+)?\s*"),
    ("", f"OIDv4 ToolKit's, {_UNREAD}"): re.compile(r"[A-Za-z][^\d]*(\s+\d+(\.\d+)?){4}\s*"),
    ("", "a table without a header; add the line image,x1,y1,x2,y2,name and read it as csv"):
        re.compile(r"[^,]+\.(jpe?g|png|bmp),(\d+(\.\d+)?,){4}[^,]+", re.IGNORECASE),
}  # fmt: skip


def recognise(source: Path) -> tuple[str, str] | None:
    """The command of ``coordexp data convert`` and the name of the format; ``""`` for one that no converter reads. None
    if nothing is recognised."""
    files = files_below(source, tuple(_MARKS))[:_FILES] if source.is_dir() else [source]
    for path in files:
        if not path.is_file() or path.suffix.lower() not in _MARKS:
            continue
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD).decode("utf-8", "replace")
        except OSError:
            continue
        if path.suffix.lower() in (".txt", ".csv"):
            line, *others = (line.strip("\r") for line in head.split("\n"))
            if _WIDER.fullmatch(line) and others and others[0].strip().isdecimal():
                return "", f"WIDER FACE, {_UNREAD}"
            if found := next((named for named, form in _LINES.items() if form.fullmatch(line)), None):
                return found
        for command, name, marks in _MARKS[path.suffix.lower()]:
            if all(mark in head for mark in marks):
                return command, name
    return None
