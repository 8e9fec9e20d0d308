"""``data check`` reads an image once, as long as its file is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from coordexp.data import check
from coordexp.data.check import Finding, check_jsonl
from coordexp.data.files import VARIABLE, cache_folder
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.data.subset import pack
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

BOX = GTObject("cell", "bbox_2d", (100, 100, 500, 500))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which images were opened, and how, in order."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    seen: list[str] = []
    for name, how in (("open_rgb", "decoded"), ("read_header", "header of"), ("image_bytes", "bytes of")):
        plain = getattr(check, name)
        monkeypatch.setattr(
            check, name, lambda path, plain=plain, how=how: seen.append(f"{how} {Path(path).stem}") or plain(path)
        )
    return seen


def dataset(folder: Path, names: str = "ab") -> Path:
    for shade, name in enumerate(names):
        Image.new("RGB", (40, 30), (shade, 0, 0)).save(folder / f"{name}.png")
    write_jsonl([ImageRecord(name, folder / f"{name}.png", 40, 30, (BOX,)) for name in names], folder / "data.jsonl")
    return folder / "data.jsonl"


def again(read: list[str], path: Path, deep: bool = True) -> list[str]:
    """What one more check reads."""
    read.clear()
    assert check_jsonl(path, deep=deep).errors == 0
    return read.copy()


def test_an_image_is_decoded_once(read: list[str], tmp_path: Path) -> None:
    path = dataset(tmp_path)
    assert again(read, path) == ["decoded a", "bytes of a", "decoded b", "bytes of b"]
    assert again(read, path) == []
    assert again(read, path, deep=False) == []
    Image.new("RGB", (40, 30), (9, 9, 9)).save(tmp_path / "b.png")
    assert again(read, path) == ["decoded b", "bytes of b"], "another file now"


def test_a_header_that_was_read_is_no_decoded_image(read: list[str], tmp_path: Path) -> None:
    path = dataset(tmp_path, "a")
    assert again(read, path, deep=False) == ["header of a", "bytes of a"]
    assert again(read, path, deep=False) == []
    assert again(read, path) == ["decoded a", "bytes of a"]


def test_images_in_shards_are_known_by_their_shard(read: list[str], tmp_path: Path) -> None:
    packed = tmp_path / "packed" / "data.jsonl"
    pack(read_jsonl(dataset(tmp_path)), packed, 1 << 20)
    assert len(again(read, packed)) == 4
    assert again(read, packed) == []


def test_a_finding_is_made_each_time(read: list[str], tmp_path: Path) -> None:
    path = dataset(tmp_path)
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:-30])
    for _ in range(2):
        assert check_jsonl(path, deep=True).counts() == {Finding.UNREADABLE_IMAGE: 1}
    Image.new("RGB", (40, 31)).save(tmp_path / "a.png")
    for _ in range(2):
        assert check_jsonl(path, deep=True).counts() == {Finding.SIZE_MISMATCH: 1}


def test_the_same_bytes_in_two_files_are_found_without_reading_them_again(read: list[str], tmp_path: Path) -> None:
    path = dataset(tmp_path)
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    for _ in range(2):
        assert check_jsonl(path).counts() == {Finding.DUPLICATE_IMAGE: 1}


def test_a_damaged_store_is_named(read: list[str], tmp_path: Path) -> None:
    path = dataset(tmp_path, "a")
    again(read, path)
    (store,) = cache_folder().glob("*.sqlite")
    store.write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match=store.name):
        check_jsonl(path)
