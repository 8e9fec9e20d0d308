"""The commands of README, quickstart and guides, in the order in which a user starts them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from as_shipped.documented import CONVERSIONS, ELSEWHERE, OWN_DATA, PHOTOS, SAME_AS, SESSIONS, Command, documented
from as_shipped.starting import START_S, finished, scenes
from as_shipped.table import ROOT
from coordexp.data.jsonl import read_jsonl
from support.annotation_folders import voc_object, voc_xml
from support.cli_runs import small_checkpoint
from support.hub import HubOnDisk, serving

SPLITS = {"train": range(8), "val": range(8, 10), "test": range(10, 12)}


def test_every_documented_command_is_started() -> None:
    started = {one.text for session in SESSIONS.values() for one in session}
    known = [*started, *SAME_AS, *ELSEWHERE]
    assert len(known) == len(set(known)), "a command has two entries"
    assert {text: sorted(pages) for text, pages in documented().items() if text not in known} == {}
    assert [text for text in known if text not in documented()] == [], "commands that no page has any more"
    assert set(SAME_AS.values()) <= started
    named = [where for where in ELSEWHERE.values() if where.startswith("tests/")]
    assert [where for where in named if not (ROOT / where).is_file()] == []


def voc_folder(root: Path, data: Path, name_of: Callable[[str], str] = str) -> None:
    """The scenes as a VOC folder with its splits. ``name_of``: the class of an object by its description."""
    (root / "JPEGImages").mkdir(parents=True)
    records = list(read_jsonl(data))
    for record in records:
        with Image.open(record.image) as image:
            image.convert("RGB").save(root / "JPEGImages" / f"{record.image.stem}.jpg", quality=95)
        boxes = []
        for obj in record.objects:
            x, y = ([bin_ * record.width // 1000 for bin_ in obj.bins[axis::2]] for axis in (0, 1))
            boxes.append(voc_object(name_of(obj.desc), min(x) + 1, min(y) + 1, max(x), max(y)))
        voc_xml(root, record.image.stem, *boxes, size=(record.width, record.height))
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split, places in SPLITS.items():
        (lists / f"{split}.txt").write_text("".join(f"{records[place].image.stem}\n" for place in places))


def run_session(
    session: Sequence[Command],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    **placeholders: Sequence[str],
) -> None:
    """Start each command in ``folder``, once for each value of the placeholder that it has."""
    for command in session:
        texts = [command.text]
        for name, values in placeholders.items():
            if f"${name}" in command.text:
                texts = [command.text.replace(f"${name}", value) for value in values]
        for text in texts:
            keys = [f"{key}={json.dumps(value)}" for key, value in command.short.items()]
            finished([*shlex.split(text), *keys], folder, START_S, **(environment or {}))
        for made in command.makes:
            assert (folder / made).exists(), f"{command.text}: makes no {made}"


def folder_with(folder: Path, *links: str) -> Path:
    """``folder`` with twelve scenes, and links to folders of the repository."""
    for name in links:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    return scenes(folder / "scenes", 12)


def test_from_annotations_to_a_second_stage(tmp_path: Path) -> None:
    data = folder_with(tmp_path)
    voc_folder(tmp_path / "path" / "to" / "VOC", data)
    shutil.copytree(ROOT / "checkpoints" / "demo-stage1", tmp_path / "checkpoints" / "start")
    shutil.copytree(data.parent / "images", tmp_path / "photos")
    run_session(OWN_DATA, tmp_path)
    exported = list((tmp_path / "exported").rglob("results.json"))
    assert exported and all(json.loads(path.read_text()) for path in exported), "the trained model finds nothing"


def test_real_photos_with_the_small_model(tmp_path: Path) -> None:
    data = folder_with(tmp_path, "checkpoints/demo-stage1")
    cells = {"circle": "WBC", "square": "RBC", "triangle": "Platelets"}
    voc_folder(tmp_path / "BCCD_Dataset" / "BCCD", data, lambda desc: cells[desc.split()[-1]])
    labelled = tmp_path / "photos"
    finished(shlex.split(f"coordexp export labelme {data} --out {labelled}"), tmp_path)
    for image in (data.parent / "images").iterdir():
        shutil.copy(image, labelled / image.name)
    run_session(PHOTOS, tmp_path, split=list(SPLITS))


def test_conversions_and_jobs(tmp_path: Path) -> None:
    data = folder_with(tmp_path, "configs")
    voc_folder(tmp_path / "VOCdevkit" / "VOC2007", data)
    model = small_checkpoint(tmp_path / "of the hub", coord_tokens=False)
    with serving(HubOnDisk({"Qwen/Qwen3-VL-2B-Instruct": model})) as hub:
        run_session(CONVERSIONS, tmp_path, hub.environment(tmp_path / "home"))
    assert "model.safetensors" in hub.fetched
