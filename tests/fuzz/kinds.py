"""Kinds of input from outside, each with sound examples and the way in which users' commands read it."""

from __future__ import annotations

import random
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from coordexp.cli import main
from coordexp.config import load_config, parse_config, resolved_yaml
from coordexp.config.source import read_document
from coordexp.coords import serialize_objects
from coordexp.data import read_jsonl
from coordexp.data.class_list import read_class_list
from coordexp.data.files import asset
from coordexp.data.images import open_rgb, read_header
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import CoordExpError
from coordexp.printable import printable
from coordexp.records import GTObject
from fuzz.mutations import mutate
from support import one_scene
from support.annotation_folders import paint
from support.config_samples import stage2, two_channel
from support.parse_invariants import byte_vocab, check_parse
from unit.data.test_convert_coco import panoptic
from unit.data.test_convert_dota import dota
from unit.data.test_convert_projects import cvat, labelstudio, via
from unit.data.test_convert_tables import open_images
from unit.evaluation.test_class_numbers import saved

Refused = str | None  # the message, or None for an input that was accepted
LONGEST_MESSAGE = 20_000


@dataclass(frozen=True)
class Kind:
    """``write`` makes sound files in a folder and returns those to change, one an input; ``read`` reads the one that
    was changed, among the others."""

    write: Callable[[Path], Sequence[Path]]
    read: Callable[[Path, Path], Refused]


class Bench:
    """A folder with the sound files of a kind, in which one at a time is replaced by a changed copy."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        folder.mkdir(parents=True)
        self._sound = {path: path.read_bytes() for path in kind.write(folder)}
        self._paths = sorted(self._sound)
        for path in self._paths:  # an example that is refused would test nothing
            message = kind.read(folder, path)
            assert message is None, f"{path.name}: {message}"

    def change(self, draw: random.Random) -> tuple[Path, bytes]:
        """A file, and its content after changes."""
        path = draw.choice(self._paths)
        content = mutate(draw, self._sound[path])
        sums = _SUMS.get(path.suffix)
        return path, sums(content) if sums is not None and draw.random() < 0.8 else content

    def read(self, path: Path, content: bytes) -> Refused:
        """Reads ``path`` with that content. Raises whatever is not an error of the project."""
        path.write_bytes(content)
        try:
            return self._kind.read(self._folder, path)
        finally:
            path.write_bytes(self._sound[path])


def by_command(*words: object) -> Refused:
    """What ``coordexp`` prints when it refuses ``words``. Raises what would be a traceback there."""
    out, err = StringIO(), StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    assert code in (0, None, 2), (code, err.getvalue())
    if not code:
        return None
    said = re.sub(r"\A(?:note: .*\n)+", "", err.getvalue())  # advice of config check
    assert said.startswith("error: ") and "Traceback" not in said and " object at 0x" not in said, said
    assert len(said) < LONGEST_MESSAGE and printable(said, lines=True) == said, said
    return said.removeprefix("error: ").removesuffix("\n")


def called(read: Callable[[], object]) -> Refused:
    try:
        read()
    except CoordExpError as error:
        return str(error)
    return None


# Pictures


def with_checksums(png: bytes) -> bytes:
    """A PNG whose chunks have the checksums of their content, without which nothing in them is read."""
    made, at = png[:8], 8
    while len(png) - at >= 12:
        size = int.from_bytes(png[at : at + 4], "big")
        named = png[at + 4 : at + 8 + size]
        made += png[at : at + 4] + named + zlib.crc32(named).to_bytes(4, "big")
        at += 12 + size
    return made + png[at:]


def with_header_sums(tar: bytes) -> bytes:
    """A tar file in which each block that was a header has its sum."""
    made = bytearray(tar)
    for at in range(0, len(made) - 511, 512):
        if made[at + 257 : at + 262] == b"ustar":
            made[at + 148 : at + 156] = b"%06o\0 " % (sum(made[at : at + 148]) + 256 + sum(made[at + 156 : at + 512]))
    return bytes(made)


_SUMS = {".png": with_checksums, ".tar": with_header_sums}


def pictures(suffix: str, **options: Any) -> Kind:
    def write(folder: Path) -> list[Path]:
        made = []
        for mode in ("RGB", "L", "P", "RGBA", "CMYK"):
            if (suffix == ".jpg" and mode in ("P", "RGBA")) or (suffix != ".jpg" and mode == "CMYK"):
                continue
            image = Image.effect_noise((37, 23), 40).convert("RGB").convert(mode)
            exif = Image.Exif()
            exif[0x0112] = 6
            image.save(path := folder / f"{mode}{suffix}", exif=exif, **options)
            made.append(path)
        return made

    def read(_: Path, path: Path) -> Refused:
        def both_ways() -> None:
            header = read_header(path)
            image = open_rgb(path)
            assert image.mode == "RGB" and image.size == header.size
            assert open_rgb(Path("sent"), data=path.read_bytes()).tobytes() == image.tobytes()

        return called(both_ways)

    return Kind(write, read)


def write_shards(folder: Path) -> list[Path]:
    Image.effect_noise((9, 7), 40).save(picture := folder / "a.png")
    paths = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        paths.append(folder / f"{form}.tar")
        with tarfile.open(paths[-1], "w", format=form) as tar:
            for name in ("a.png", "手" * 40 + ".png", "b.png"):
                tar.add(picture, name if form != tarfile.USTAR_FORMAT else name[-20:])
    return paths


def read_shard(_: Path, path: Path) -> Refused:
    return called(lambda: [open_rgb(path / name) for name in ("a.png", "b.png")])


# Annotations


def converted(
    form: str, write: Callable[[Path], Sequence[Path]], *words: str, source: str = ".", images: str = ""
) -> Kind:
    """A format of ``coordexp data convert``, read from ``source`` in the folder; then its JSONL is read."""

    def make(folder: Path) -> Sequence[Path]:
        files = write(folder)
        shutil.rmtree(folder / "out", ignore_errors=True)
        return files

    def read(folder: Path, changed: Path) -> Refused:
        out = folder.parent / f"{folder.name} out"
        given = [str(folder / source), *([str(folder / images)] if images else [])]
        resize = ["--no-resize"] if changed.stat().st_size % 2 else []
        try:
            message = by_command("data", "convert", form, *given, "--out", out, "--name", "data", *words, *resize)
            if message is None:
                assert read_jsonl(out / "data.jsonl", check_images=True)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        return message

    return Kind(make, read)


def files_of(made: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in made.rglob(pattern))


def write_voc(folder: Path) -> list[Path]:
    return files_of(one_scene.as_voc(folder), "*.xml")


def write_coco(folder: Path, *, rings: bool) -> list[Path]:
    return [one_scene.as_coco(folder, rings=rings)[0]]


def write_masks(folder: Path) -> list[Path]:
    paint(folder / "images" / "a.jpg", (4, 4))
    path = folder / "data.json"
    path.write_text(
        '{"images": [{"id": 1, "file_name": "a.jpg", "width": 4, "height": 4}],'
        ' "categories": [{"id": 1, "name": "cat"}], "annotations": ['
        '{"id": 1, "image_id": 1, "category_id": 1, "segmentation": {"size": [4, 4], "counts": [5, 2, 2, 2, 5]}},'
        '{"id": 2, "image_id": 1, "category_id": 1, "segmentation": {"size": [4, 4], "counts": "52203"}}]}'
    )
    return [path]


def write_lvis(folder: Path) -> list[Path]:
    paint(folder / "images" / "a.jpg")
    path = folder / "data.json"
    path.write_text(
        '{"images": [{"id": 1, "coco_url": "http://images/val2017/a.jpg", "width": 40, "height": 24}],'
        ' "categories": [{"id": 1, "name": "baby_buggy"}],'
        ' "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 3, 10, 12]}]}'
    )
    return [path]


def write_panoptic(folder: Path) -> list[Path]:
    return [panoptic(folder), folder / "panoptic" / "a.png"]


def write_yolo(folder: Path, *, rings: bool = False, data_yaml: bool = True) -> list[Path]:
    made = one_scene.as_yolo(folder, rings=rings, data_yaml=data_yaml)
    (made / "labels" / "train" / "b.txt").write_text("")
    if not data_yaml:
        for name in ("images", "labels"):
            shutil.move(made / name / "train", made / "up")
            (made / name).rmdir()
            (made / "up").rename(made / name)
    return files_of(made, "*.txt", "*.yaml")


def write_project(make: Callable[[Path], object], name: str) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        for image in ("set/a (1).jpg", "photos/b.jpg", "photos/c.jpg"):
            paint(folder / image)
        make(folder)
        return [folder / name]

    return write


def write_open_images(folder: Path) -> list[Path]:
    open_images(folder)
    return files_of(folder, "*.csv")


# Other files


def write_yaml_files(folder: Path) -> list[Path]:
    shipped = ("configs/stage1/sft.yaml", "configs/demo/stage1.yaml")
    texts = [yaml.safe_dump(stage2()), yaml.safe_dump(two_channel()), resolved_yaml(parse_config(stage2()))]
    texts += [asset(name).read_text(encoding="utf-8") for name in shipped]
    paths = [folder / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def read_yaml_file(_: Path, path: Path) -> Refused:
    def both_ways() -> None:
        config = load_config(path)
        again = path.with_name("again")
        again.write_text(resolved_yaml(config), encoding="utf-8")
        assert parse_config(read_document(again).data) == config

    return (
        called(both_ways) if random.Random(path.stat().st_size).random() < 0.7 else by_command("config", "check", path)
    )


def write_jsonl(folder: Path) -> list[Path]:
    return [write_scenes(folder, 3, SPARSE, 0)]


def read_jsonl_file(_: Path, path: Path) -> Refused:
    return by_command("data", "check", path)


def write_predictions(folder: Path) -> list[Path]:
    made = saved(folder / "run", "cat", "手提包", annotated=True)
    return [made / "predictions.jsonl", made / "prediction.json"]


def read_predictions(folder: Path, path: Path) -> Refused:
    for form in ("coco", "yolo", "voc", "labelme", "csv", "dota"):
        out = folder.parent / f"{folder.name} {form}"
        try:
            message = by_command("export", form, path.parent, "--out", out)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        if message is not None:
            return message
    return None


def write_class_lists(folder: Path) -> list[Path]:
    texts = {"a.txt": "cat\n\ndog\n手提包\n", "a.yaml": "names: [cat, dog]\n", "b.yaml": "names: {0: cat, 2: 'no'}\n"}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def read_class_names(_: Path, path: Path) -> Refused:
    return called(lambda: read_class_list(path))


def write_answer(folder: Path) -> list[Path]:
    objects = [GTObject("black cat", "bbox_2d", (1, 2, 3, 4)), GTObject("手提包", "poly", (0, 0, 9, 0, 9, 9))]
    path = folder / "answer.json"
    path.write_text(serialize_objects(objects, "desc_first"), encoding="utf-8")
    return [path]


def read_answer(_: Path, path: Path) -> Refused:
    vocab = byte_vocab()
    parsed = check_parse(vocab.encode(path.read_text(encoding="utf-8", errors="replace")), vocab)
    return None if parsed.objects else "no object"


KINDS: dict[str, Kind] = {
    "JPEG": pictures(".jpg", quality=60),
    "JPEG, progressive": pictures(".jpg", progressive=True),
    "PNG": pictures(".png"),
    "TIFF": pictures(".tif"),
    "TIFF, packed": pictures(".tif", compression="tiff_lzw"),
    "WebP": pictures(".webp"),
    "WebP, lossless": pictures(".webp", lossless=True),
    "GIF": pictures(".gif"),
    "BMP": pictures(".bmp"),
    "AVIF": pictures(".avif"),
    "shards": Kind(write_shards, read_shard),
    "VOC": converted("voc", write_voc),
    "COCO": converted("coco", lambda folder: write_coco(folder, rings=False), source="data.json", images="images"),
    "COCO, polygons": converted(
        "coco", lambda folder: write_coco(folder, rings=True), "--geometry", "poly", source="data.json", images="images"
    ),
    "COCO, masks": converted("coco", write_masks, "--geometry", "poly", source="data.json", images="images"),
    "LVIS": converted("lvis", write_lvis, source="data.json", images="images"),
    "panoptic": converted(
        "panoptic", write_panoptic, "--geometry", "poly", "--stuff", source="panoptic.json", images="images"
    ),
    "YOLO": converted("yolo", write_yolo, "--split", "train", source="data.yaml"),
    "YOLO, polygons": converted(
        "yolo", lambda folder: write_yolo(folder, rings=True), "--split", "train", source="data.yaml"
    ),
    "YOLO, classes.txt": converted("yolo", lambda folder: write_yolo(folder, data_yaml=False)),
    "LabelMe": converted("labelme", lambda folder: files_of(one_scene.as_labelme(folder), "*.json")),
    "CSV": converted("csv", lambda folder: [one_scene.as_csv(folder)], source="data.csv"),
    "CSV, polygons": converted("csv", lambda folder: [one_scene.as_csv(folder, rings=True)], source="data.csv"),
    "Open Images": converted("openimages", write_open_images, source="val-bbox.csv"),
    "DOTA": converted("dota", lambda folder: files_of(dota(folder), "*.txt")),
    "CVAT": converted("cvat", write_project(cvat, "annotations.xml")),
    "Label Studio": converted("labelstudio", write_project(labelstudio, "project.json"), source="project.json"),
    "VIA": converted("via", write_project(via, "via.json"), source="via.json"),
    "YAML": Kind(write_yaml_files, read_yaml_file),
    "JSONL": Kind(write_jsonl, read_jsonl_file),
    "predictions": Kind(write_predictions, read_predictions),
    "class lists": Kind(write_class_lists, read_class_names),
    "answers": Kind(write_answer, read_answer),
}
