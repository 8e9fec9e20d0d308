"""A cached dataset gives the records, the errors and the samples of a dataset that is read line by line."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from PIL import Image

from coordexp.data import dataset_cache
from coordexp.data.class_list import class_list
from coordexp.data.dataset_cache import CachedRecords, check_images, open_records
from coordexp.data.files import VARIABLE, cache_folder
from coordexp.data.joined import index_of
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.data.preparation import preparation_of
from coordexp.errors import DataError

BOX: dict[str, Any] = {"desc": "cup", "bbox_2d": [1, 2, 30, 40]}
POLYGON: dict[str, Any] = {"desc": "ein Blättchen", "poly": [1, 2, "<|coord_30|>", 40, 5, 6], "soft": 0.5}
RULE = {"factor": 32, "min_pixels": 1024, "max_pixels": 4096}


@pytest.fixture(autouse=True)
def _small_pieces(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 0)
    monkeypatch.setattr(dataset_cache, "_PIECE_LINES", 2)
    monkeypatch.setattr(dataset_cache, "_PIECE_ROWS", 4)


def line(**fields: Any) -> str:
    return json.dumps({"images": ["a.png"], "width": 8, "height": 6, "objects": [BOX]} | fields, ensure_ascii=False)


def write(folder: Path, *lines: str, name: str = "set.jsonl", size: tuple[int, int] = (8, 6)) -> Path:
    Image.new("RGB", size).save(folder / "a.png")
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def cached(path: Path, limit: int | None = None, **options: Any) -> CachedRecords:
    records = open_records(path, limit=limit, **options)
    assert isinstance(records, CachedRecords)
    return records


def files(pattern: str) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_ino) for path in cache_folder().rglob(pattern))


def message(act: Any) -> str:
    with pytest.raises(DataError) as raised:
        act()
    return str(raised.value)


def test_records_are_those_of_the_reader(tmp_path: Path) -> None:
    lines = [
        line(),
        *["", "  "],
        line(objects=[POLYGON, BOX], images=["häß 図/../ü.png"]),
        line(objects=[], images=["/abs//c.png"], metadata={"a": [1.5, None, {"b": "ä"}]}),
        line(width=(1 << 31) - 1, images=["../b.png"]),
        '{"images":["a.png"],"width":8,"height":6,"objects":[],"metadata":{"a":1e400,"b":"\\ud800","c":-0.0}}',
        *[line(metadata={"n": n}) for n in range(20)],
    ]
    path = write(tmp_path, *lines, name="sét.jsonl")
    records, expected = cached(path), read_jsonl(path)
    assert repr(list(records)) == repr(expected) and len(records) == len(expected) == 25
    assert records[-1] == expected[-1] and records[1:3] == expected[1:3]
    for some in (records, expected):
        assert [index_of(some, record.sample_id) for record in expected] == list(range(25))
        assert [index_of(some, name) for name in ("sét.jsonl:2", "sét.jsonl:99", "set")] == [None] * 3
        assert index_of(some, "renamed.jsonl:5") == 2
    assert list(pickle.loads(pickle.dumps(records))) == expected


MISTAKES = {
    "one": [line(), line(width=0), line()],
    "several": [line(), "[]", line(), "{", line(zzz=1), line(objects=[{"desc": "a", "bbox_2d": [9, 9, 1, 1]}])],
    "more than are shown": [line(width=-k) for k in range(30)] + [line()] * 9,
    "blank lines count": ["", "  ", line(), "", line(height="6")],
    "no records": ["", "   "],
}


@pytest.mark.parametrize("lines", MISTAKES.values(), ids=MISTAKES)
def test_refused_lines_are_reported_together_each_time(tmp_path: Path, lines: list[str]) -> None:
    path = write(tmp_path, *lines)
    expected = message(lambda: read_jsonl(path))
    for _ in range(2):
        assert message(lambda: cached(path)) == expected
    assert files("*.arrow") == []


def test_lines_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(metadata={"n": 1}), "[]")
    assert list(cached(path, 2)) == read_jsonl(path, limit=2)
    assert list(cached(path, 1)) == read_jsonl(path, limit=1)
    assert message(lambda: cached(path, 3)) == message(lambda: read_jsonl(path, limit=3))
    assert message(lambda: cached(path, 0)) == message(lambda: read_jsonl(path, limit=0))
    assert message(lambda: cached(tmp_path / "none.jsonl")) == message(lambda: read_jsonl(tmp_path / "none.jsonl"))


def test_problems_of_images_are_reported_together_each_time(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (900, 2)).save(tmp_path / "thin.png")
    others = [line(images=[f"{name}.png"]) for name in ("none", "text", "thin", "a", "none")]
    first = write(tmp_path, line(), line(width=9), *others, line(images=["thin.png"], width=900, height=2))
    missing = write(tmp_path, line(images=["none.png"]), name="missing.jsonl")
    second = write(tmp_path, line(), line(height=7), name="other.jsonl")
    expected = message(lambda: check_dataset([*read_jsonl(first), *read_jsonl(second)]))
    assert "7 problems" in expected
    for _ in range(2):
        assert message(lambda: check_images(cached(first), cached(second))) == expected
        assert "none.png" in message(lambda: check_images(cached(missing)))
    assert message(lambda: check_images(read_jsonl(first), cached(second))) == expected
    check_images(cached(first, 1), cached(second, 1))


def test_only_changed_images_are_opened_again(tmp_path: Path) -> None:
    path, image = write(tmp_path, *[line()] * 9), tmp_path / "a.png"
    check_images(cached(path))
    seen = image.stat()
    image.write_bytes(b"?" * seen.st_size)
    os.utime(image, ns=(0, seen.st_mtime_ns))
    check_images(cached(path))  # size and time are the same: not opened
    os.utime(image)
    assert message(lambda: check_images(cached(path))) == message(lambda: check_dataset(read_jsonl(path)))
    Image.new("RGB", (8, 6)).save(image)
    check_images(cached(path))
    image.unlink()
    assert message(lambda: check_images(cached(path))) == message(lambda: check_dataset(read_jsonl(path)))


def test_changed_lines_are_validated_again(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line())
    mapped = cached(path)
    before = files("*.arrow")
    assert list(cached(path)) == list(mapped) and files("*.arrow") == before
    write(tmp_path, line(), line(objects=[]))
    assert list(cached(path)) == read_jsonl(path)
    assert len(files("*.arrow")) == 1 and files("*.arrow") != before
    assert mapped[1].objects  # the old file is gone, and stays mapped
    write(tmp_path, line(), "[]")
    assert message(lambda: cached(path)) == message(lambda: read_jsonl(path))


def test_a_new_version_validates_again_and_small_files_are_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, line())
    monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 1000)
    assert open_records(path) == read_jsonl(path) and files("*") == []
    monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 0)
    cached(path)
    before = files("*.arrow")
    monkeypatch.setattr(dataset_cache, "CACHE_VERSION", -1)
    assert list(cached(path)) == read_jsonl(path)
    assert len(files("*.arrow")) == 1 and files("*.arrow") != before


@pytest.mark.parametrize("content", [b"no array", b""], ids=["other", "empty"])
def test_a_damaged_file_is_made_again_or_named(content: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, line())
    check_images(cached(path))
    (states,) = cache_folder().rglob("*.npy")
    states.write_bytes(content)
    check_images(cached(path))
    assert states.read_bytes() != content
    (records,) = cache_folder().rglob("*.arrow")
    other = records.with_name("other.arrow")
    other.write_bytes(b"no table")
    assert other.name in message(lambda: CachedRecords(other, path))


def test_unwritable_cache_folders_are_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert cache_folder() == tmp_path / "users" / "coordexp"
    assert "file/cache" in caplog.text and VARIABLE in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder().parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert VARIABLE in message(cache_folder)


def test_a_link_among_temporary_files_is_not_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is known, so another user can put one there that leads to any folder of ours."""
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "ours").mkdir()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"coordexp-{os.getuid()}").symlink_to(tmp_path / "ours")
    assert "another user's, or a link" in message(cache_folder)
    assert not list((tmp_path / "ours").iterdir())


OPEN = """
import sys
from coordexp.data import dataset_cache
dataset_cache.CACHE_MIN_BYTES = 0
validate = dataset_cache._validate
dataset_cache._validate = lambda *given: print("validated") or validate(*given)
records = dataset_cache.open_records(sys.argv[1])
dataset_cache.check_images(records)
print(len(records))
"""


def test_processes_that_start_together_validate_once(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(metadata={"n": n}) for n in range(2000)])
    started = [
        subprocess.Popen([sys.executable, "-c", OPEN, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[0].split() for process in started]
    assert sorted(map(tuple, said)) == [("2000",), ("2000",), ("validated", "2000")]


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_terminated(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.parametrize("end", [be_killed, be_terminated])
def test_a_worker_that_ends_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None]
) -> None:
    path = write(tmp_path, line())
    monkeypatch.setattr(dataset_cache, "_validate_piece", end)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as a command does
    try:
        assert "was killed, probably for lack of memory" in message(lambda: cached(path))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert files("*.arrow") == files(".*.partial") == []


def test_waiting_for_another_process_times_out(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    cached(path)
    (lock,) = cache_folder().rglob("lock")
    with FileLock(lock):
        said = message(lambda: cached(path, wait_s=0.2))
    assert str(lock) in said and "training.ddp_timeout" in said


@pytest.mark.parametrize(
    "rules", [[RULE] * 5, [RULE, None, RULE], [None] * 3, [RULE, RULE | {"factor": 16}], [RULE, {"factor": 1}]]
)
def test_cached_and_plain_records_give_the_same_image_preparation(tmp_path: Path, rules: Sequence[Any]) -> None:
    path = write(
        tmp_path,
        *[line(width=8 + n, metadata={} if rule is None else {"prepared": rule}) for n, rule in enumerate(rules)],
    )
    try:
        expected = preparation_of(read_jsonl(path))
    except DataError as error:
        assert message(lambda: preparation_of(cached(path))) == str(error)
    else:
        assert preparation_of(cached(path)) == expected


def test_cached_and_plain_records_give_the_same_class_list(tmp_path: Path) -> None:
    box = [1, 2, 3, 4]
    names = [["dog", "cat", "cat"], [], ["手提包"]]
    path = write(tmp_path, *[line(objects=[{"desc": name, "bbox_2d": box} for name in some]) for some in names])
    assert class_list(cached(path)) == class_list(read_jsonl(path)) == ("cat", "dog", "手提包")
