"""A packed dataset equals its original in records, images, checks and training batches."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from coordexp.cli.commands import app
from coordexp.config.schema import AugmentConfig
from coordexp.data import dataset_cache
from coordexp.data.dataset import RecordDataset
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.files import VARIABLE, cache_folder
from coordexp.data.images import image_bytes, open_rgb, read_header
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.data.shards import Member, MemberFile, find_member
from coordexp.data.subset import pack, split_records
from coordexp.errors import DataError
from coordexp.records import ImageRecord, RolloutRequest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 0)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "plain", 7, SPECS["sparse"], 3)


def packed(scenes: Path, shard_bytes: int = 4000) -> Path:
    out = scenes.parent.parent / "packed" / scenes.name
    pack(read_jsonl(scenes), out, shard_bytes)
    return out


def told(act: object) -> str:
    assert callable(act)
    with pytest.raises(DataError) as raised:
        act()
    return str(raised.value)


def test_packed_records_have_the_same_contents_and_pack_again(scenes: Path, tmp_path: Path) -> None:
    plain, other = read_jsonl(scenes), read_jsonl(packed(scenes))
    check_dataset(other)
    for one, two in zip(plain, other, strict=True):
        assert (one.sample_id, one.width, one.height, one.objects, one.metadata) == (
            two.sample_id, two.width, two.height, two.objects, two.metadata,
        )  # fmt: skip
        assert image_bytes(two.image) == one.image.read_bytes() == image_bytes(one.image)
        assert open_rgb(two.image).tobytes() == open_rgb(one.image).tobytes()
        assert read_header(two.image) == read_header(one.image)
    assert len({record.image.parent for record in other}) > 2  # several shards
    one, two = (
        [[record.sample_id for record in part] for part in split_records(records, [0.5, 0.5], 0)]
        for records in (plain, other)
    )
    assert one == two
    pack(other, tmp_path / "again" / scenes.name, 4000)
    for path in (tmp_path / "packed").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_shards_of_another_dataset_in_the_folder_are_not_in_the_way(scenes: Path, tmp_path: Path) -> None:
    records = read_jsonl(scenes)
    for name in ("set-1", "set-00001", "set", "set[1]"):
        pack(records, tmp_path / "all" / f"{name}.jsonl", 1 << 20)
    assert sorted(path.name for path in (tmp_path / "all").glob("*.tar")) == [
        "set-00000.tar", "set-00001-00000.tar", "set-1-00000.tar", "set[1]-00000.tar",
    ]  # fmt: skip
    (tmp_path / "all" / "set[1].jsonl").unlink()
    with pytest.raises(DataError, match=r"set\[1\]-00000.tar: exists already"):
        pack(records, tmp_path / "all" / "set[1].jsonl", 1 << 20)


def test_webdataset_reads_a_shard(scenes: Path, tmp_path: Path) -> None:
    out = packed(scenes)
    lines = []
    for shard in sorted(out.parent.glob("*.tar")):
        with tarfile.open(shard) as tar:
            tar.extractall(tmp_path / "loose")
            names = tar.getnames()
        assert [Path(name).stem for name in names[::2]] == [Path(name).stem for name in names[1::2]]
        lines += [(tmp_path / "loose" / name).read_text() for name in names if name.endswith(".json")]
    (tmp_path / "loose" / "set.jsonl").write_text("".join(lines))
    loose = read_jsonl(tmp_path / "loose" / "set.jsonl", check_images=True)
    assert [record.objects for record in loose] == [record.objects for record in read_jsonl(scenes)]


@pytest.mark.parametrize("augment", [None, AugmentConfig(horizontal_flip=0.5, scale=(0.7, 1.4))])
def test_samples_of_packed_records_are_identical(scenes: Path, augment: AugmentConfig | None) -> None:
    def encode(record: ImageRecord, image: Image.Image | None = None) -> RolloutRequest:
        pixels = (image or open_rgb(record.image)).tobytes()
        return RolloutRequest(record.sample_id, Path("same"), (), (1,), {"pixels": pixels})

    out = packed(scenes)
    found = []
    for records in (read_jsonl(scenes), read_jsonl(out), open_records(out)):
        dataset = RecordDataset(records, encode, "random", 5, augment)
        dataset.set_epoch(2)
        found.append([(dataset[k].record.objects, dataset[k].request) for k in range(len(records))])
    assert found[0] == found[1] == found[2] and len(found[0]) == 7


def test_problems_inside_a_shard_are_reported_like_those_of_files(scenes: Path) -> None:
    out = packed(scenes, 1 << 20)
    (shard,) = out.parent.glob("*.tar")
    check_images(open_records(out))
    with tarfile.open(shard, "w") as tar:
        for name, data in (("00000000.png", b"no image"), ("00000001.png", b"")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    expected = told(lambda: check_dataset(read_jsonl(out)))
    assert f"cannot identify image file '{shard}/00000000.png'" in expected and "image not found" in expected
    assert told(lambda: check_images(open_records(out))) == expected  # the shard is another one now
    assert len(list(cache_folder().rglob("shards/*.npy"))) == 1  # of the shard as it is now
    shard.unlink()
    assert "image not found" in told(lambda: check_images(open_records(out)))
    shard.write_bytes(gzip.compress(b"x" * 2000))
    assert "uncompressed tar" in told(lambda: check_dataset(read_jsonl(out)))


def test_an_index_that_lost_its_content_is_made_again(scenes: Path) -> None:
    out = packed(scenes, 1 << 20)
    check_dataset(read_jsonl(out))
    (shard,) = out.parent.glob("*.tar")
    (index,) = cache_folder().rglob("shards/*.npy")
    time = shard.stat().st_mtime_ns
    os.utime(shard, ns=(time, time + 1))  # else this process knows the index
    lost = index.with_name(index.name.replace(str(time), str(time + 1)))
    lost.write_bytes(b"")
    check_dataset(read_jsonl(out))
    assert lost.stat().st_size > 0


def header(kind: bytes, size: bytes, name: bytes = b"a.png") -> bytes:
    """A tar header whose size field is ``size``, 12 bytes."""
    block = bytearray(tarfile.TarInfo(name.decode()).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157] = size, kind
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:]))
    return bytes(block)


def base256(number: int) -> bytes:
    return (b"\xff" if number < 0 else b"\x80") + (number % (1 << 88)).to_bytes(11, "big")


def pax(**fields: str) -> bytes:
    info = tarfile.TarInfo("a.png")
    info.pax_headers = fields
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (header(b"0", base256(-512)), "at byte 512 (the header of a member says -512 bytes"),
        (bytes(header(b"0", b"00000000000\0")) + header(b"0", base256(-1024)), "at byte 1024 (the header of a member"),
        (header(b"L", base256(-1)), "says -1 bytes"),
        (header(b"x", base256(1 << 40)), "says 1099511627776 bytes"),
        (header(b"0", base256(1 << 70)), "member 'a.png' has 1180591620717411303424 bytes from byte 512"),
        (pax(size="-512"), "member 'a.png' has -512 bytes"),
        (pax(path="a" * 5000), "a name of 5,000 bytes"),
        (pax(path="a" * (4 << 20)), "says 4194318 bytes"),
    ],
)
def test_a_tar_file_that_would_never_end_or_fill_the_memory_is_refused(
    content: bytes, says: str, tmp_path: Path
) -> None:
    shard = tmp_path / "set.tar"
    shard.write_bytes(content + bytes(10240))
    said = told(lambda: find_member(shard / "a.png"))
    assert said.startswith(f"{shard}: not readable at byte ") and says in said


def test_no_file_is_overwritten_or_partly_written(scenes: Path, tmp_path: Path) -> None:
    out = packed(scenes)
    assert "exists already" in told(lambda: pack(read_jsonl(scenes), out, 4000))
    out.unlink()
    assert "exists already" in told(lambda: pack(read_jsonl(scenes), out, 4000))  # its shards do
    records = read_jsonl(scenes)
    records[-1].image.unlink()
    assert "cannot be read" in told(lambda: pack(records, tmp_path / "new" / "set.jsonl", 4000))
    assert list((tmp_path / "new").iterdir()) == []


def test_a_check_reads_packed_datasets(scenes: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed.jsonl"
    done = CliRunner().invoke(app, ["data", "pack", str(scenes), "--out", str(out)])
    assert done.exit_code == 0 and "7 records, their images in 1 shard" in done.stdout
    assert json.loads(out.read_text().splitlines()[0])["images"] == ["packed-00000.tar/00000000.png"]
    checked = CliRunner().invoke(app, ["data", "check", str(out), "--deep", "--json"])
    assert checked.exit_code == 0 and json.loads(checked.stdout)["errors"] == 0


def test_a_folder_named_like_a_shard_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "old.tar").mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "old.tar" / "a.png")
    assert find_member(tmp_path / "old.tar" / "a.png") is None
    assert read_header(tmp_path / "old.tar" / "a.png").size == (4, 3)


@given(
    content=st.binary(max_size=60),
    moves=st.lists(st.tuples(st.sampled_from([os.SEEK_SET, os.SEEK_END]), st.integers(0, 70), st.integers(-1, 70))),
)
def test_a_member_reads_like_the_original_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, moves: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "around.bin"
    path.write_bytes(b"before" + content + b"behind")
    with MemberFile(Member(path, 6, len(content))) as found, io.BytesIO(content) as expected:
        for whence, offset, count in moves:
            place = offset if whence == os.SEEK_SET else -min(offset, len(content))
            assert found.seek(place, whence) == expected.seek(place, whence)
            assert found.read(count) == expected.read(count)
