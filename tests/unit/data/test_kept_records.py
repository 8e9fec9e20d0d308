"""A dataset validated once and mapped into memory gives the records, the errors and the samples of a plain reading."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from coordexp.config.data import AugmentConfig
from coordexp.data import kept_records, line_validation
from coordexp.data.arrow_records import ArrowRecords
from coordexp.data.cache_folder import VARIABLE, SharedWork, cache_folder
from coordexp.data.dataset import RecordDataset
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.data.kept_records import check_images, open_records
from coordexp.data.preparation import preparation_of
from coordexp.errors import DataError
from coordexp.records import ImageRecord, RolloutRequest

BOX: dict[str, Any] = {"desc": "cup", "bbox_2d": [1, 2, 30, 40]}
RULE = {"factor": 32, "min_pixels": 1024, "max_pixels": 4096}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(line_validation, "PIECE_BYTES", 300)  # lines of several pieces, in several processes


def line(**fields: Any) -> str:
    return json.dumps({"images": ["a.png"], "width": 8, "height": 6, "objects": [BOX]} | fields, ensure_ascii=False)


def write(folder: Path, *lines: str, name: str = "set.jsonl", size: tuple[int, int] = (8, 6)) -> Path:
    Image.new("RGB", size).save(folder / "a.png")
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def kept(path: Path, limit: int | None = None, **options: Any) -> ArrowRecords:
    records = open_records(path, limit=limit, kept_from=0, **options)
    assert isinstance(records, ArrowRecords)
    return records


def files(pattern: str) -> list[tuple[str, int]]:
    """Name and inode of what the cache holds."""
    return sorted((path.name, path.stat().st_ino) for path in cache_folder().rglob(pattern))


SEEN = st.characters(exclude_categories=["C", "Z"])
PRINTABLE = SEEN | st.just(" ")
DESCS = st.builds("{}{}{}".format, st.text(PRINTABLE, max_size=4), SEEN, st.text(PRINTABLE, max_size=3)).filter(
    lambda text: "<|" not in text
)
BOXES = st.lists(st.integers(0, 499), min_size=2, max_size=2).map(lambda at: [*at, at[0] + 500, at[1] + 3])
POLYGONS = st.lists(st.integers(0, 999), min_size=3, max_size=9).map(
    lambda xs: [v for x in xs for v in (x, "<|coord_7|>")]
)
OBJECTS = st.one_of(
    st.fixed_dictionaries({"desc": DESCS, "bbox_2d": BOXES}, optional={"soft": st.floats(0, 1, exclude_min=True)}),
    st.fixed_dictionaries({"desc": DESCS, "poly": POLYGONS}, optional={"soft": st.floats(0, 1, exclude_min=True)}),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LINES = st.fixed_dictionaries(
    {
        "images": st.sampled_from([["a.png"], ["häß 図/ü.png"], ["../b.png"], ["/abs//c.png"], ["./x/../a.png"]]),
        "width": st.integers(1, 1 << 40),
        "height": st.integers(1, 1 << 40),
        "objects": st.lists(OBJECTS, max_size=4),
    },
    optional={"metadata": st.dictionaries(st.text(max_size=4), ANYTHING, max_size=3)},
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(LINES, min_size=1, max_size=6),
    blank=st.integers(0, 3),
    limit=st.none() | st.integers(1, 7),
    ascii=st.booleans(),
)
def test_every_record_comes_back_as_the_plain_reader_gives_it(
    rows: list[Any], blank: int, limit: int | None, ascii: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sét.jsonl"
        lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
        path.write_bytes("\n".join([*lines[:1], *[" "] * blank, *lines[1:]]).encode("utf-8", "surrogatepass"))
        try:
            expected = read_jsonl(path, limit=limit)
        except DataError as error:  # a lone surrogate that is no UTF-8: the same words
            with pytest.raises(DataError) as raised:
                kept(path, limit)
            assert str(raised.value) == str(error)
            return
        found = kept(path, limit)
        assert list(found) == expected and len(found) == len(expected)
        assert found[-1] == expected[-1] and found[1:3] == expected[1:3]
        assert [type(v) for r in found for o in r.objects for v in (*o.bins, o.soft)] == [
            type(v) for r in expected for o in r.objects for v in (*o.bins, o.soft)
        ]
        assert [found.place_of(record.sample_id) for record in expected] == list(range(len(expected)))


def test_numbers_beyond_floats_and_half_characters_survive_in_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"images":["a.png"],"width":8,"height":6,"objects":[],"metadata":{"a":1e400,"b":"\\ud800","c":-0.0}}'
    )
    (found,), (expected,) = kept(path), read_jsonl(path)
    assert found == expected and str(found.metadata) == str(expected.metadata)


def test_a_record_that_no_column_holds_is_read_plainly_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, line(), line(width=10**30))
    with caplog.at_level(logging.WARNING, "coordexp"):
        assert open_records(path, kept_from=0) == read_jsonl(path)
    assert any("is read anew" in message for message in caplog.messages)


def told(act: Any) -> str:
    with pytest.raises(DataError) as raised:
        act()
    return str(raised.value)


MISTAKES = {
    "one": [line(), line(width=0), line()],
    "several": [line(), "[]", line(), "{", line(zzz=1), line(objects=[{"desc": "a", "bbox_2d": [9, 9, 1, 1]}])],
    "more than are shown": [line(width=-k) for k in range(30)] + [line()] * 9,
    "blank lines count": ["", "  ", line(), "", line(height="6")],
    "no records": ["", "   "],
}


@pytest.mark.parametrize("lines", MISTAKES.values(), ids=MISTAKES)
def test_refused_lines_are_told_in_the_same_words_each_time(tmp_path: Path, lines: list[str]) -> None:
    path = write(tmp_path, *lines)
    expected = told(lambda: read_jsonl(path))
    assert told(lambda: kept(path)) == expected
    assert told(lambda: kept(path)) == expected
    assert files("*.arrow") == []


def test_a_mistake_beyond_the_limit_is_not_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(), "[]")
    assert list(kept(path, 2)) == read_jsonl(path, limit=2)
    assert told(lambda: kept(path, 3)) == told(lambda: read_jsonl(path, limit=3))
    assert told(lambda: kept(path, 0)) == told(lambda: read_jsonl(path, limit=0))
    assert told(lambda: kept(tmp_path / "none.jsonl")) == told(lambda: read_jsonl(tmp_path / "none.jsonl"))


def test_images_problems_are_told_in_the_same_words_each_time_and_together(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    Image.new("RGB", (900, 2)).save(tmp_path / "thin.png")
    others = [line(images=[f"{name}.png"]) for name in ("none", "text", "thin", "a", "none")]
    first = write(tmp_path, line(), line(width=9), *others, line(images=["thin.png"], width=900, height=2))
    second = write(tmp_path, line(), line(height=7), name="other.jsonl")
    expected = told(lambda: check_dataset([*read_jsonl(first), *read_jsonl(second)]))
    assert "7 problems" in expected
    for _ in range(2):
        assert told(lambda: check_images(kept(first), kept(second))) == expected
    assert told(lambda: check_images(read_jsonl(first), kept(second))) == expected
    check_images(kept(first, 1), kept(second, 1))


def test_only_images_that_changed_are_opened_again_and_a_cure_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line())
    check_images(kept(path))
    before = files("*")
    check_images(kept(path))
    assert [one for one in files("*.npy") + files("*.arrow") if one not in before] == []
    Image.new("RGB", (6, 8)).save(tmp_path / "a.png")
    assert told(lambda: check_images(kept(path))) == told(lambda: check_dataset(read_jsonl(path)))
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    check_images(kept(path))
    (tmp_path / "a.png").unlink()
    assert told(lambda: check_images(kept(path))) == told(lambda: check_dataset(read_jsonl(path)))


def test_another_content_is_validated_anew_and_a_touched_file_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line())
    mapped = kept(path)
    before = files("*.arrow")
    path.write_bytes(path.read_bytes())  # another time of change, no other content
    assert list(kept(path)) == list(mapped) and files("*.arrow") == before
    write(tmp_path, line(), line(objects=[]))
    assert list(kept(path)) == read_jsonl(path)
    assert len(files("*.arrow")) == 1 and files("*.arrow") != before  # the old one is gone, and stays mapped
    assert mapped[1].objects
    write(tmp_path, line(), "[]")
    assert told(lambda: kept(path)) == told(lambda: read_jsonl(path))


def test_other_rules_validate_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, line())
    kept(path)
    before = files("*.arrow")
    monkeypatch.setattr(kept_records, "_version_of", lambda modules: f"other {len(modules)}".replace(" ", "-"))
    assert list(kept(path)) == read_jsonl(path)
    assert len(files("*.arrow")) == 1 and files("*.arrow") != before


def test_a_limit_takes_the_beginning_of_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(metadata={"n": n}) for n in range(9)])
    kept(path)
    before = files("*.arrow")
    assert list(kept(path, 4)) == read_jsonl(path, limit=4) and files("*.arrow") == before
    assert list(kept(path, 99)) == read_jsonl(path)


def test_small_files_leave_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    assert open_records(path) == read_jsonl(path) and files("*") == []


def test_a_place_that_cannot_be_written_to_gives_way_to_the_next_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    with caplog.at_level(logging.WARNING, "coordexp"):
        assert cache_folder() == tmp_path / "users" / "coordexp"
    assert any("file/cache" in message and VARIABLE in message for message in caplog.messages)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder().parent == Path(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert VARIABLE in told(cache_folder)


def test_a_copy_for_another_process_reads_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(metadata={"n": n}) for n in range(9)])
    records = kept(path, 5)
    assert list(copy.copy(records)) == list(records)


HOLDER = """
import sys
from pathlib import Path
from coordexp.data.cache_folder import SharedWork
work = SharedWork(Path(sys.argv[1]))
with work.turn(5.0) as found:
    print("held" if found is None else "taken over", flush=True)
    if sys.stdin.readline().strip() == "leave":
        work.leave({"said": "by the other"})
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(("last_words", "expected"), [("leave", {"said": "by the other"}), ("die", None)])
def test_who_waited_takes_over_what_was_found_meanwhile(tmp_path: Path, last_words: str, expected: Any) -> None:
    process = holder(tmp_path)
    assert process.stdin is not None
    threading.Timer(1.0, lambda: (process.stdin.write(f"{last_words}\n"), process.stdin.flush())).start()
    with SharedWork(tmp_path).turn(60.0) as found:
        assert found == expected
    process.wait(60)
    with SharedWork(tmp_path).turn(60.0) as found:
        assert found is None  # who came later looks for itself


def test_waiting_has_an_end_and_says_for_whom(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    kept(path)
    (folder,) = (cache_folder() / "datasets").iterdir()
    process = holder(folder)
    try:
        message = told(lambda: kept(path, wait_s=0.2))
    finally:
        process.communicate("die\n", 60)
    assert f"process {process.pid}" in message and "training.ddp_timeout" in message


def requests(record: ImageRecord, image: Any = None) -> RolloutRequest:
    return RolloutRequest(record.sample_id, record.image, (), (len(record.objects),), {"image": image})


@pytest.mark.parametrize("ordering", ["sorted", "random", "file"])
@pytest.mark.parametrize("augment", [None, AugmentConfig(horizontal_flip=0.5)], ids=["as it is", "augmented"])
def test_samples_are_the_same(tmp_path: Path, ordering: Any, augment: AugmentConfig | None) -> None:
    objects = [BOX | {"bbox_2d": [5 * k, 900 - k, 999, 999], "desc": f"d{k}"} for k in range(7)]
    path = write(tmp_path, *[line(objects=objects[n:], metadata={"n": n}) for n in range(6)])
    plain, mapped = (
        RecordDataset(records, requests, ordering, 3, augment) for records in (read_jsonl(path), kept(path))
    )

    def seen(dataset: RecordDataset) -> list[Any]:
        found: list[Any] = []
        for epoch in range(3):
            dataset.set_epoch(epoch)
            for index in range(len(dataset)):
                sample = dataset[index]
                again = dataset.request_of(sample.record.sample_id)
                assert again.prompt_token_ids == sample.request.prompt_token_ids
                found.append((sample.record, sample.request.prompt_token_ids))
        return found

    assert seen(plain) == seen(mapped) and len(seen(mapped)) == 18
    for dataset in (plain, mapped):
        with pytest.raises(DataError, match=r"custom\.train_jsonl does not"):
            dataset.request_of("other.jsonl:1")


@pytest.mark.parametrize(
    "rules", [[RULE] * 5, [RULE, None, RULE], [None] * 3, [RULE, RULE | {"factor": 16}], [RULE, {"factor": 1}]]
)
def test_what_training_learns_of_images_is_the_same(tmp_path: Path, rules: Sequence[Any]) -> None:
    path = write(
        tmp_path,
        *[line(width=8 + n, metadata={} if rule is None else {"prepared": rule}) for n, rule in enumerate(rules)],
    )
    try:
        expected = preparation_of(read_jsonl(path))
    except DataError as error:
        assert told(lambda: preparation_of(kept(path))) == str(error)
    else:
        assert preparation_of(kept(path)) == expected
