"""Sources of ``coordexp predict`` and ``Detector``: images, folders, patterns, datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordexp.data.image_sources import find_images
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import DataError
from support.annotation_folders import paint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("frame_9.png", "frame_10.png", "deep/b.jpg", "p [a0].jpg"):
        paint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["."], ["deep/b.jpg", "frame_10.png", "frame_9.png", "p [a0].jpg"]),
        (["frame_*.png"], ["frame_9.png", "frame_10.png"]),
        (["frame_%d.png"], ["frame_9.png", "frame_10.png"]),
        (["**/*.jpg"], ["deep/b.jpg", "p [a0].jpg"]),
        (["p [a0].jpg"], ["p [a0].jpg"]),  # a file's own name is no pattern
        (["deep/b.jpg", "frame_9.png"], ["deep/b.jpg", "frame_9.png"]),
        (["deep", "frame_9.png"], ["deep/b.jpg", "frame_9.png"]),
        (["frame_9.png", "frame_9.png"], ["frame_9.png"]),
    ],
)
def test_images_are_found(folder: Path, sources: list[str], names: list[str]) -> None:
    found = find_images([Path(source) for source in sources])
    assert [record.sample_id for record in found.records] == names
    assert all((record.width, record.height) == (40, 24) for record in found.records) and not found.annotated


def test_datasets_and_images_go_together(folder: Path) -> None:
    write_scenes(folder / "d", 2, SPARSE, 1)
    found = find_images([folder / "d" / "scenes.jsonl", folder / "frame_9.png"], limit=3)
    assert len(found.records) == 3 and len(found.annotated) == 2
    assert found.records[2].sample_id not in found.annotated
    assert len(find_images([folder / "d" / "scenes.jsonl", folder / "frame_9.png"], limit=1).records) == 1


@pytest.mark.parametrize("how", ["no image", "cut short", "gone"])
def test_a_broken_image_is_left_out_and_named(folder: Path, how: str) -> None:
    write_scenes(folder / "d", 2, SPARSE, 1)
    broken = folder / "d" / "images" / "000000.png"
    whole = broken.read_bytes()
    broken.unlink()
    if how != "gone":
        broken.write_bytes(b"hello" if how == "no image" else whole[: len(whole) // 2])
    source = folder / "d" / ("scenes.jsonl" if how == "gone" else "images")
    found = find_images([source], skip_broken=True)
    assert len(found.records) == 1 and "000001.png" in str(found.records[0].image)
    ((name, reason),) = found.skipped
    assert "000000.png" in reason and ("000000.png" in name or "scenes.jsonl:1" in name)
    if how != "cut short":  # without asking to skip, headers alone are looked at
        with pytest.raises(DataError, match=r"000000\.png"):
            find_images([source])


@pytest.mark.parametrize(
    ("source", "named"),
    [("gone.jpg", "gone.jpg"), ("none_*.png", r"none_\*.png"), ("empty", "empty"), ("b", "1 skipped")],
)
def test_sources_without_readable_images_are_refused(folder: Path, source: str, named: str) -> None:
    (folder / "empty").mkdir()
    (folder / "b").mkdir()
    (folder / "b" / "x.png").write_text("hello")
    with pytest.raises(DataError, match=named):
        find_images([Path(source)], skip_broken=True)
