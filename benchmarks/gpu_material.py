"""Checkpoints and images for `gpu.py`: random weights of published sizes, a model that answers, photographs.

Writes below FOLDER what --write names, each under that name and complete or not at all; what is there stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from reporting import parser, usable_cores

SIZES = ("2B", "4B", "8B")
SIDE = {"photos": 768, "small_photos": 128}  # pixels; small ones for CPUs
MATERIAL = (*SIZES, "tiny", *SIDE, "wide", "wide_scenes")
PHOTOS, LINES = 32, 640  # images, and lines that name them in turn: a step reads a file each time
WIDE = {"hidden": 2048, "mlp": 6144, "heads": 32, "kv_heads": 16, "layers": 28}  # costs what 2B costs
ORIGIN = "widened.txt"  # in the folder `wide`: the checkpoint that was widened


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--write", nargs="+", choices=MATERIAL, required=True)
    flags.add_argument("--narrow", type=Path, help="for wide: a checkpoint that wide_checkpoint.py wrote")
    options = flags.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.write:
        if not (options.folder / name).exists():
            part = options.folder / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            writer(name, options)(part)
            part.rename(options.folder / name)
            print(f"wrote {options.folder / name}", flush=True)


def writer(name: str, options: Any) -> Callable[[Path], None]:
    if name in SIZES:
        from random_checkpoint import write_checkpoint

        return lambda folder: write_checkpoint(folder, name, coord_tokens=True)
    if name == "tiny":
        from coordexp.modeling.tiny import build_tiny_checkpoint

        return lambda folder: void(build_tiny_checkpoint(folder))
    if name in SIDE:
        return lambda folder: write_photos(folder, options.folder / name, SIDE[name])
    if name == "wide_scenes":
        return lambda folder: write_wide_scenes(folder, options.folder / name)
    if options.narrow is None:
        raise SystemExit("--write wide needs --narrow")
    return lambda folder: write_widened(options.narrow, folder)


def write_widened(narrow: Path, folder: Path) -> None:
    """The checkpoint ``narrow`` as wide as 2B, and a note of which one it is."""
    from wide_checkpoint import Width, write_wide

    write_wide(narrow, folder, Width(**WIDE))
    (folder / ORIGIN).write_text(str(narrow.resolve()), encoding="utf-8")


def void(_: object) -> None:
    """For callbacks that return nothing."""


def write_photos(folder: Path, final: Path, side: int) -> None:
    """Generated scenes as JPEG files, as large as photographs, by all cores."""
    from coordexp.data.jsonl import write_jsonl
    from coordexp.records import ImageRecord

    (folder / "images").mkdir(parents=True)
    with ProcessPoolExecutor(usable_cores()) as pool:
        objects = list(pool.map(_photo, [folder / "images" / f"{n}.jpg" for n in range(PHOTOS)], [side] * PHOTOS))
    paths = [(final / "images" / f"{n % PHOTOS}.jpg").resolve() for n in range(LINES)]
    records = [ImageRecord(f"photo-{n}", path, side, side, objects[n % PHOTOS]) for n, path in enumerate(paths)]
    write_jsonl(records, folder / "scenes.jsonl")


def _photo(path: Path, side: int) -> Any:
    from coordexp.data.scenes import SPARSE, SceneSpec, make_scene

    large = SceneSpec(size=side, min_objects=2, max_objects=8, min_side=60, max_side=250, max_overlap=0.2, empty=0)
    image, objects = make_scene(SPARSE if side < 256 else large, 7, int(path.stem))
    image.save(path, quality=90)
    return objects


def write_wide_scenes(folder: Path, final: Path) -> None:
    """Scenes of ten objects, of the kind that the wide model learned."""
    from dataclasses import replace

    from wide_checkpoint import write_images

    from coordexp.data.jsonl import read_jsonl, write_jsonl

    jsonl = write_images(folder, {10: 128}, seed=11)
    records = [replace(record, image=(final / record.image.name).resolve()) for record in read_jsonl(jsonl)]
    write_jsonl(records, jsonl)


if __name__ == "__main__":
    main()
