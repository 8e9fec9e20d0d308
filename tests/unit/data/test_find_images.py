"""Which image a name means, and which files of a folder are read: the same for every converter, predict and export."""

from __future__ import annotations

import doctest
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordexp.data import read_jsonl
from coordexp.data.convert import (
    ConversionReport,
    convert_cvat,
    convert_openimages,
    convert_voc,
    convert_yolo,
)
from coordexp.data.find_images import ImageFolder, list_files, match_names, only_file, unsafe_file_name
from coordexp.data.image_sources import find_images
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer
from coordexp.evaluation.export import export_coco
from coordexp.evaluation.users_terms import UsersTerms
from support.annotation_folders import SMALL, paint, voc_object, voc_xml
from support.box_formats import Convert, coco, csv, cvat, dota, labelme, labelstudio, via, voc, written

# --- names ---

NAMES: list[tuple[str, list[str], list[str], list[str | None], int]] = [  # files, names, their files, notes
    ("exact", ["a.png", "b/a.png"], ["a.png", "b/a.png"], ["a.png", "b/a.png"], 0),
    ("backslashes", ["b/a.png"], ["b\\a.png"], ["b/a.png"], 0),
    ("steps", ["b/a.png"], ["./b/a.png"], ["b/a.png"], 0),
    ("an absolute path", ["x.png"], ["/home/someone/images/x.png"], ["x.png"], 1),
    ("a path of Windows", ["x.png"], ["C:\\data\\x.png"], ["x.png"], 1),
    ("the longest tail", ["b/c.png", "d/c.png"], ["a/b/c.png"], ["b/c.png"], 1),
    ("the folder left out", ["train/a.png"], ["a.png"], ["train/a.png"], 1),
    ("no suffix", ["a.png", "b/c.jpg"], ["a", "b/c"], ["a.png", "b/c.jpg"], 0),
    ("no suffix, deeper", ["b/c.jpg"], ["c"], ["b/c.jpg"], 1),
    ("dots in a name", ["v1.2/a.b.png"], ["a.b"], ["v1.2/a.b.png"], 1),
    ("é in one or two characters", ["e\u0301.png"], ["\u00e9.png"], ["e\u0301.png"], 0),
    ("several files of the name", ["b/a.png", "c/a.png"], ["a.png"], [None], 0),
    ("two of a stem", ["a.png", "a.jpg"], ["a"], [None], 0),
    ("a file that another entry names", ["a.png"], ["a.png", "b/a.png"], ["a.png", None], 0),
    ("two names for one file", ["a.png"], ["x/a.png", "y/a.png"], [None, None], 0),
    ("one name twice", ["a.png"], ["x/a.png", "x/a.png"], ["a.png", "a.png"], 2),
    ("another folder, where names are right", ["one/1.png", "one/2.png"], ["one/1.png", "two/2.png"],
     ["one/1.png", None], 0),
    ("out of the folder", ["a.png"], ["../a.png"], ["a.png"], 1),
    ("another case is another name", ["A.png"], ["a.png"], [None], 0),
    ("no name", ["a.png"], [""], [None], 0),
    ("only steps", ["a.png"], ["../.."], [None], 0),
    ("a suffix is part of the name", ["a.jpg.png"], ["a.jpg"], [None], 0),
]  # fmt: skip


@pytest.mark.parametrize(("files", "names", "meant", "notes"), [row[1:] for row in NAMES], ids=[r[0] for r in NAMES])
def test_a_name_means_one_file_or_none(
    files: Sequence[str], names: Sequence[str], meant: Sequence[str | None], notes: int
) -> None:
    found = match_names([[name] for name in names], files)
    assert [match.file for match in found] == meant
    assert sum(match.note is not None for match in found) == notes
    for match in found:
        assert match.note is None or (match.file is not None and match.file in match.note)


def test_the_likeliest_name_comes_first() -> None:
    files = ["images/Train/0.jpg", "images/Test/0.jpg"]
    (found,) = match_names([["images/Test/0.jpg", "Test/0.jpg", "0.jpg"]], files)
    assert (found.file, found.note) == ("images/Test/0.jpg", None)


def test_a_hint_never_gives_the_image_of_another_entry() -> None:
    files, hints = ["a.png", "b.png"], [(), ["a.png"], ["b.png"]]
    found = match_names([["a.png"], ["x.png"], ["y.png"]], files, hints=hints)
    assert [match.file for match in found] == ["a.png", None, "b.png"]


@pytest.mark.parametrize(
    ("name", "unsafe"),
    [("a.png", False), ("b/a.png", False), ("a..png", False), ("/a.png", True), ("C:/a.png", True), ("../a.png", True),
     ("b/../../a.png", True), ("a\0.png", True), (" ", True), ("\ud800.png", True), ("\udcff.png", False)],
)  # fmt: skip
def test_names_that_lead_out_of_a_folder_are_unsafe(name: str, unsafe: bool) -> None:
    assert unsafe_file_name(name) is unsafe


@pytest.mark.parametrize("outside", [False, True])
def test_a_name_leads_out_of_the_folder_only_if_allowed(tmp_path: Path, outside: bool) -> None:
    paint(tmp_path / "b.png")
    paint(tmp_path / "images" / "a.png")
    (found,) = ImageFolder(tmp_path / "images", outside=outside).find_all([["../b.png"]])
    assert (found.there, found.path == tmp_path / "b.png") == (outside, outside)


def test_the_example_of_match_names_is_as_documented() -> None:
    assert doctest.testmod(sys.modules[match_names.__module__]) == (0, 3)


# --- folders ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images behind links, in a loop, in folders of tools, and hidden."""
    for name in ("a.png", "deep/b.JPG", ".ipynb_checkpoints/a-checkpoint.png", "._a.png", "__MACOSX/a.png",
                 "deep/@eaDir/b.JPG"):  # fmt: skip
        paint(tmp_path / "images" / name)
    paint(tmp_path / "elsewhere" / "c.png")
    (tmp_path / "images" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images" / "deep" / "loop").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "d.png").symlink_to(tmp_path / "elsewhere" / "c.png")
    return tmp_path / "images"


def test_linked_folders_are_entered_once_and_hidden_files_counted(folder: Path) -> None:
    listing = list_files(folder)
    assert [path.relative_to(folder).as_posix() for path in listing.files] == [
        "a.png", "again/c.png", "d.png", "deep/b.JPG",
    ]  # fmt: skip
    assert dict(listing.passed_over) == {
        ".ipynb_checkpoints": "hidden", "._a.png": "hidden", "__MACOSX": "a tool's own folder",
        "deep/@eaDir": "a tool's own folder", "more": "a link to a folder that is read already",
        "deep/loop": "a link to a folder that is read already",
    }  # fmt: skip


def test_a_folder_has_its_own_name_rather_than_that_of_a_link(tmp_path: Path) -> None:
    paint(tmp_path / "images" / "z" / "a.png")
    (tmp_path / "images" / "b").symlink_to(tmp_path / "images" / "z")
    listing = list_files(tmp_path / "images")
    assert [path.relative_to(tmp_path).as_posix() for path in listing.files] == ["images/z/a.png"]
    assert listing.passed_over == (("b", "a link to a folder that is read already"),)


def test_a_folder_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone"):
        list_files(tmp_path / "gone")


def test_names_that_start_with_a_dot_are_read_when_named(tmp_path: Path) -> None:
    paint(tmp_path / ".hidden" / "a.png")
    (found,) = ImageFolder(tmp_path).find_all([[".hidden/a.png"]])
    assert found.there and found.note is None
    assert [path.name for path in list_files(tmp_path / ".hidden").files] == ["a.png"]


# --- every converter ---


def converted(convert: Convert, home: Path, names: Sequence[str]) -> ConversionReport:
    """Of annotations of one box in each image."""
    return convert(home, {name: [(4, 3, 20, 15)] for name in names}, (40, 24), options=SMALL)


CONVERTERS: list[Convert] = [coco, cvat, labelstudio, csv, via, labelme, voc, dota]


@pytest.mark.parametrize("convert", [coco, labelstudio, via, labelme])
@pytest.mark.parametrize("name", ["\ud800.jpg", "\ud800/x\udfff"])
def test_half_a_character_in_a_name_leaves_the_image_out(convert: Any, name: str, tmp_path: Path) -> None:
    paint(tmp_path / "images" / "a.jpg")
    report = converted(convert, tmp_path, ["a.jpg", name])
    reason = "unsafe_file_name" if convert is coco else "missing_image"
    assert (report.images, dict(report.skipped_images)) == (1, {reason: 1})


@pytest.mark.parametrize("convert", CONVERTERS)
def test_an_annotation_never_goes_to_another_image_unnoted(convert: Any, tmp_path: Path) -> None:
    """cam2/0001.jpg is missing; cam1 has a 0001.jpg, which another entry may name."""
    paint(tmp_path / "one" / "images" / "cam1" / "0001.jpg")
    report = converted(convert, tmp_path / "one", ["cam2/0001.jpg"])
    assert report.notes["found_by_tail"] == 1 and report.images == 1
    paint(tmp_path / "two" / "images" / "cam1" / "0001.jpg")
    report = converted(convert, tmp_path / "two", ["cam1/0001.jpg", "cam2/0001.jpg"])
    assert (report.images, report.skipped_images["missing_image"]) == (1, 1)
    (record,) = read_jsonl(report.jsonl)
    assert record.metadata["source"]["file"] == "cam1/0001.jpg" and len(record.objects) == 1
    for place in ("cam1/0001.jpg", "cam3/0001.jpg", "cam1/0002.jpg"):
        paint(tmp_path / "three" / "images" / place)
    report = converted(convert, tmp_path / "three", ["cam1/0002.jpg", "cam2/0001.jpg"])
    assert (report.images, report.skipped_images["missing_image"]) == (1, 1), "never one of several"
    assert any("2 files have this name" in problem.detail for problem in report.problems)


@pytest.mark.parametrize("convert", CONVERTERS)
def test_hidden_copies_are_passed_over_and_counted(convert: Any, tmp_path: Path) -> None:
    paint(tmp_path / "images" / "a.jpg")
    paint(tmp_path / "images" / ".ipynb_checkpoints" / "b.jpg")
    paint(tmp_path / "images" / "__MACOSX" / "._a.jpg")
    report = converted(convert, tmp_path, ["a.jpg"])
    assert report.images == 1 and report.notes["passed_over"] == 2
    assert not report.skipped


@pytest.mark.parametrize("convert", [coco, cvat, labelstudio, csv, via, labelme])
def test_images_that_no_annotation_names_are_counted(convert: Any, tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "deep/c.heic"):
        paint(tmp_path / "images" / name, format="JPEG")
    report = converted(convert, tmp_path, ["a.jpg"])
    assert (report.images, report.notes) == (1, {"unnamed_image": 2})
    assert "b.jpg, deep/c.heic" in report.problems[-1].detail


@pytest.mark.parametrize("convert", [csv, labelme])
def test_an_absolute_name_is_that_of_an_image_in_a_relative_folder(
    convert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "images" / "a.jpg")
    monkeypatch.chdir(tmp_path)
    report = converted(convert, Path("."), [str(tmp_path / "images" / "a.jpg")])
    assert (report.images, report.notes) == (1, {})


@pytest.mark.parametrize("convert", [coco, cvat, labelstudio, csv, via])
@pytest.mark.parametrize(
    "name", ["..\\\\..\\\\media\\\\upload\\\\4\\\\x.png", "/home/someone/images/x.png", "photos/1/x.png"]
)
def test_names_of_other_machines_are_found_with_a_note(convert: Any, name: str, tmp_path: Path) -> None:
    paint(tmp_path / "images" / "deep" / "x.png")
    report = converted(convert, tmp_path, [name.replace("\\\\", "\\")])
    assert (report.images, report.notes["found_by_tail"]) == (1, 1) and not report.skipped


@pytest.mark.parametrize("name", ["https://host/data/upload/1/x.png", "label\\x.png"])
def test_addresses_of_coco_are_found_with_a_note(name: str, tmp_path: Path) -> None:
    paint(tmp_path / "images" / "x.png")
    assert converted(coco, tmp_path, [name]).notes == {"found_by_tail": 1}


@pytest.mark.parametrize("again", [coco, csv])
def test_images_that_an_earlier_conversion_wrote_are_not_searched(again: Any, tmp_path: Path) -> None:
    """Otherwise there would be two files of the name."""
    paint(tmp_path / "images" / "raw" / "x.png")
    first = converted(again, tmp_path, ["photos/x.png"])
    first.jsonl.rename(tmp_path / "images" / "c.jsonl")
    first.path.rename(tmp_path / "images" / "c.conversion_report.json")
    paint(tmp_path / "images" / "images" / "c" / "x.png")
    (tmp_path / "images" / "c.jsonl").write_text('{"images": ["images/c/x.png"]}\n')
    names = [path.relative_to(tmp_path / "images").as_posix() for path in list_files(tmp_path / "images").files]
    assert "images/c/x.png" in names, "other searches read them"
    second = converted(again, tmp_path, ["photos/x.png"])
    assert second.images == 1 and second.notes == {"found_by_tail": 1, "passed_over": 1}


def test_subsets_of_a_cvat_project_may_repeat_names(tmp_path: Path) -> None:
    for k, part in enumerate(("Train", "Test")):
        paint(tmp_path / "images" / part / "img0.jpg", (40 + 8 * k, 24))
    box = '<box label="cat" xtl="4" ytl="3" xbr="20" ybr="15"/>'
    images = "".join(
        f'<image name="img0.jpg" subset="{part}" width="{width}" height="24">{box}</image>'
        for part, width in (("Train", 40), ("Test", 48))
    )
    report = convert_cvat(written(tmp_path / "a.xml", f"<annotations>{images}</annotations>"), tmp_path / "out",
                          options=SMALL)  # fmt: skip
    sources = [record.metadata["source"] for record in read_jsonl(report.jsonl)]
    assert [(source["file"], source["width"]) for source in sources] == [
        ("images/Train/img0.jpg", 40), ("images/Test/img0.jpg", 48),
    ]  # fmt: skip
    assert not report.notes and not report.skipped


def test_open_images_of_one_name_in_two_folders_are_not_guessed(tmp_path: Path) -> None:
    for place in ("0/a.jpg", "1/a.jpg", "1/b.jpg"):
        paint(tmp_path / "photos" / place)
    (tmp_path / "class-descriptions.csv").write_text("/m/1,cat\n")
    rows = "".join(f"{name},/m/1,0.1,0.5,0.1,0.5\n" for name in "ab")
    table = written(tmp_path / "boxes.csv", f"ImageID,LabelName,XMin,XMax,YMin,YMax\n{rows}")
    report = convert_openimages(table, tmp_path / "out", options=SMALL)
    assert [record.image.name for record in read_jsonl(report.jsonl)] == ["b.jpg"]
    assert report.skipped_images == {"missing_image": 1}


def yolo(home: Path, images: Path) -> ConversionReport:
    written(home / "data.yaml", f"train: {images.name}\nnames: [cat]\n")
    return convert_yolo(home / "data.yaml", home / "out", options=SMALL)


def test_yolo_reads_behind_links_and_not_the_copies_of_tools(folder: Path) -> None:
    for stem in ("a", "deep/b", "again/c", "d"):
        written(folder.parent / "labels" / f"{stem}.txt", "0 0.5 0.5 0.5 0.5\n")
    report = yolo(folder.parent, folder)
    sources = [record.metadata["source"]["file"] for record in read_jsonl(report.jsonl)]
    assert sources == ["a.png", "again/c.png", "d.png", "deep/b.JPG"]
    assert report.objects == 4 and report.notes == {"passed_over": 6}


def test_formats_that_are_not_read_are_named_next_to_their_labels(tmp_path: Path) -> None:
    """Before, the label counted as one without an image, or the image was unseen."""
    paint(tmp_path / "images" / "a.png")
    paint(tmp_path / "images" / "b.gif")
    for name in ("c.heic", "d.jp2", "e.tga"):
        (tmp_path / "images" / name).write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    for stem in "abcde":
        written(tmp_path / "labels" / f"{stem}.txt", "0 0.5 0.5 0.5 0.5\n")
    report = yolo(tmp_path, tmp_path / "images")
    assert (report.images, report.skipped_images) == (2, {"unreadable_image": 3})
    said = " ".join(problem.detail for problem in report.problems)
    assert "coordexp[heif]" in said and said.count("format that is not read") == 2


def test_the_only_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "boxes.JSON").touch()
    (tmp_path / "out.conversion_report.json").touch()
    assert only_file(tmp_path, ".json").name == "boxes.JSON"
    (tmp_path / "other.json").touch()
    with pytest.raises(DataError, match=r"2 files \*\.json below this folder \(a/boxes\.JSON, other\.json\)"):
        only_file(tmp_path, ".json")
    (tmp_path / "_annotations.coco.json").touch()  # Roboflow's
    assert only_file(tmp_path, ".json").name == "_annotations.coco.json"


def test_annotations_have_suffixes_in_any_case(tmp_path: Path) -> None:
    for stem, suffix in (("a", ".xml"), ("b", ".XML")):
        paint(tmp_path / "JPEGImages" / f"{stem}.jpg")
        voc_xml(tmp_path, stem, voc_object("cat", 4, 3, 20, 15))
        (tmp_path / "Annotations" / f"{stem}.xml").rename(tmp_path / "Annotations" / f"{stem}{suffix}")
    report = convert_voc(tmp_path, tmp_path / "out", options=SMALL)
    assert (report.images, report.objects) == (2, 2) and not report.skipped


# --- predict ---


def test_a_predicted_image_keeps_the_name_it_was_given(tmp_path: Path) -> None:
    """A split made of links, and a store of hashes."""
    for k in (0, 1):
        paint(tmp_path / "raw" / f"{k}.png", (40 + 8 * k, 24))
    paint(tmp_path / "blobs" / "8c0d4579.png")
    os.rename(tmp_path / "blobs" / "8c0d4579.png", tmp_path / "blobs" / "8c0d4579")
    (tmp_path / "val").mkdir()
    for name, target in (("0.png", "raw/1.png"), ("1.png", "raw/0.png"), ("cat.png", "blobs/8c0d4579")):
        (tmp_path / "val" / name).symlink_to(tmp_path / target)
    found = find_images([tmp_path / "val"])
    assert [(record.sample_id, record.image.name, record.width) for record in found.records] == [
        ("0.png", "0.png", 48), ("1.png", "1.png", 40), ("cat.png", "cat.png", 40),
    ]  # fmt: skip
    answers = [ImageAnswer(r.sample_id, str(r.image), r.width, r.height, None, ()) for r in found.records]
    terms = UsersTerms({"cat": 1}, {"0.png": 10, "1.png": 11, "cat.png": 12})
    exported = export_coco(answers, tmp_path / "exp", terms)
    images = json.loads((tmp_path / "exp" / "dataset.json").read_text())["images"]
    assert [(image["id"], image["width"]) for image in images] == [(10, 48), (11, 40), (12, 40)]
    assert not exported.notes


def test_every_file_of_a_folder_is_answered_named_or_counted(folder: Path) -> None:
    paint(folder / "e.ppm")
    paint(folder / "f.mpo", format="MPO", save_all=True)
    paint(folder / "0123abcd", format="PNG")
    (folder / "g.tga").write_bytes(b"0" * 40)
    for name in ("a.txt", "b.txt", "notes", "Thumbs.db"):
        (folder / name).write_text("no image")
    found = find_images([folder], skip_broken=True)
    assert [record.sample_id for record in found.records] == [
        "0123abcd", "a.png", "again/c.png", "d.png", "deep/b.JPG", "e.ppm", "f.mpo",
    ]  # fmt: skip
    ((name, reason),) = found.skipped
    assert name == "g.tga" and "not read" in reason
    told = "\n".join(found.passed_over)
    assert "4 files passed over, no images: .db: 1, .txt: 2, no suffix: 1" in told
    assert "2 passed over, hidden: ._a.png, .ipynb_checkpoints" in told and "@eaDir" in told and "deep/loop" in told


def test_a_pattern_finds_no_hidden_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = find_images([Path("**/*.png")])
    assert {record.sample_id for record in found.records} == {"a.png", "d.png"}
    assert any("hidden" in line for line in found.passed_over)
    named = find_images([Path(".ipynb_checkpoints/*.png")])
    assert [record.sample_id for record in named.records] == [".ipynb_checkpoints/a-checkpoint.png"]


# --- export ---


@pytest.mark.parametrize(
    ("answered", "known", "ids", "notes"),
    [
        (["a/0.png", "b/0.png"], {"a/0.png": 5, "b/0.png": 6}, [5, 6], 0),
        (["val/0.png"], {"0.png": 5}, [5], 1),
        (["x/0.png", "y/0.png"], {"0.png": 5}, [6, 7], 1),  # never both, nor one of them
        (["0.png"], {"a/0.png": 5, "b/0.png": 6}, [7], 1),
        (["a/0.png", "0.png"], {"a/0.png": 5}, [5, 6], 1),
        (["0.png"], {"C:\\photos\\0.png": 5}, [5], 1),
    ],
)
def test_exported_images_have_the_ids_of_the_users_own(
    answered: list[str], known: dict[str, int], ids: list[int], notes: int, tmp_path: Path
) -> None:
    answers = [ImageAnswer(name, f"/data/{name}", 40, 24, None, ()) for name in answered]
    exported = export_coco(answers, tmp_path, UsersTerms({"cat": 1}, known))
    images = json.loads((tmp_path / "dataset.json").read_text())["images"]
    assert [image["id"] for image in images] == ids and len(exported.notes) == notes


def test_what_cannot_be_opened_or_named_is_passed_over_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "self.png").symlink_to("self.png")
    with open(os.fsencode(tmp_path) + b"/latin\xe9.png", "wb"):
        pass
    listing = list_files(tmp_path)
    assert [path.name for path in listing.files] == ["a.png"]
    reasons = dict(listing.passed_over)
    assert "Too many levels" in reasons["self.png"] and "UTF-8" in reasons[os.fsdecode(b"latin\xe9.png")]
