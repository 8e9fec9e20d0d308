"""Two pictures never share a file, a name or an answer, and a line of text is one line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.class_list import names_of_lines, unseen_note
from coordexp.data.convert import ImageOptions, convert_csv
from coordexp.data.files import asset
from coordexp.data.image_sources import find_images
from coordexp.data.images import open_rgb
from coordexp.data.preparation import ImagePreparation, ResizeRule, several_rules_note, unprepared_note
from coordexp.data.subset import split_records
from coordexp.data.tiles import Tiling, write_tiles
from coordexp.errors import DataError
from coordexp.evaluation.answers import from_line
from coordexp.evaluation.export import is_dataset
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import Cli

COLOURS = {"cat": (255, 0, 0), "dog": (0, 255, 0), "cow": (0, 0, 255)}


def dataset(path: Path, *images: tuple[str, str]) -> Path:
    """A picture of 64 pixels in the colour of its only object, for each (file, name)."""
    records = []
    for file, name in images:
        image = path.parent / file
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), COLOURS[name]).save(image)
        records.append(ImageRecord(file, image, 64, 64, (GTObject(name, "bbox_2d", (1, 1, 900, 900)),)))
    write_jsonl(records, path)
    return path


def test_tiles_of_equal_names_keep_their_own_pixels(tmp_path: Path) -> None:
    data = dataset(tmp_path / "d.jsonl", ("x/a.png", "cat"), ("y/a.png", "dog"), ("z/a-2.png", "cow"))
    write_tiles(list(read_jsonl(data)), tmp_path / "t" / "t.jsonl", Tiling.of(64))
    for tile in read_jsonl(tmp_path / "t" / "t.jsonl"):
        assert Image.open(tile.image).convert("RGB").getpixel((5, 5)) == COLOURS[tile.objects[0].desc]


def test_a_users_own_metadata_has_any_form(tmp_path: Path, cli: Cli) -> None:
    """Keys that commands write themselves, here with values of the user's: they were tracebacks."""
    data = dataset(tmp_path / "d.jsonl", ("a.png", "cat"), ("b.png", "dog"))
    own = {"tile": "x3_y4", "photograph": {"camera": 1}, "window": 5, "completion": ["v1", {"added": 3}]}
    write_jsonl([replace(record, metadata=own) for record in read_jsonl(data)], data)
    assert [len(part) for part in split_records(read_jsonl(data), [0.5, 0.5], 0)] == [1, 1]
    assert cli("export", "coco", data, "--out", tmp_path / "coco").code == 0
    model = asset("checkpoints/demo-stage1")
    asked = ("predict", data, "--model", model, "--max-new-tokens", "4", "--out", tmp_path / "out")
    assert cli(*asked).code == 0 and cli(*asked).code == 0


@pytest.mark.parametrize(
    ("form", "suffix"), [("voc", ".xml"), ("labelme", ".json"), ("dota", ".txt"), ("yolo", ".txt")]
)
def test_each_image_has_an_annotation_file_of_its_own(form: str, suffix: str, tmp_path: Path, cli: Cli) -> None:
    data = dataset(tmp_path / "d.jsonl", ("img/a.jpg", "cat"), ("img/a.2.jpg", "dog"), ("img/a.png", "cow"))
    assert cli("export", form, data, "--out", tmp_path / "out").code == 0
    written = [file for file in (tmp_path / "out").rglob(f"*{suffix}") if file.stem.startswith("a")]
    assert len(written) == 3
    if form == "yolo":
        found = cli("data", "convert", "yolo", tmp_path / "out", "--split", "train", "--out", tmp_path / "back")
        assert found.code == 0
        for record in read_jsonl(next((tmp_path / "back").glob("*.jsonl"))):
            red, green, blue = Image.open(record.image).convert("RGB").getpixel((32, 32))  # pyright: ignore
            assert max(zip((red, green, blue), COLOURS, strict=True))[1] == record.objects[0].desc


@pytest.mark.parametrize("form", ["coco", "csv", "voc", "labelme", "dota"])
def test_images_of_one_source_name_are_not_one(form: str, tmp_path: Path, cli: Cli) -> None:
    data = dataset(tmp_path / "d.jsonl", ("x/a.png", "cat"), ("y/a.png", "dog"))
    source = {"source": {"file": "a.png", "width": 64, "height": 64}}
    write_jsonl([replace(record, metadata=source) for record in read_jsonl(data)], data)
    words = ("export", form, data, "--out", tmp_path / "out")
    refused = cli(*words)
    assert refused.code == 2 and "d.jsonl:1 and d.jsonl:2 are both of the image 'a.png'" in refused.err
    assert cli(*words, "--images", "--overwrite").code == 0
    sources = {"coco": ("dataset.json", "images"), "csv": ("objects.csv",)}
    for words in [sources[form]] if form in sources else []:
        given = [tmp_path / "out" / word for word in words]
        assert cli("data", "convert", form, *given, "--name", "b", "--out", tmp_path / "back").code == 0
        for record in read_jsonl(tmp_path / "back" / "b.jsonl"):
            assert Image.open(record.image).convert("RGB").getpixel((32, 32)) == COLOURS[record.objects[0].desc]


def test_two_datasets_of_one_name_are_not_one(tmp_path: Path) -> None:
    one = dataset(tmp_path / "a" / "d.jsonl", ("1.png", "cat"))
    other = dataset(tmp_path / "b" / "d.jsonl", ("1.png", "dog"))
    assert len(find_images([one, one]).records) == 1
    with pytest.raises(DataError, match=r"d\.jsonl:1"):
        find_images([one, other])


def test_only_line_breaks_end_a_name() -> None:
    assert names_of_lines("traffic light\u2028\r\ndog\x0c\n\ncat\n") == {0: "traffic light", 1: "dog", 3: "cat"}


CHANGES = [
    {"pred": [{"desc": "cat", "bbox_2d": [500, 500, 10, 10]}]},
    {"gt": [{"desc": "cat", "bbox_2d": [1, 1, 9, 9], "soft": 0}]},
    {"gt": [{"desc": "cat", "bbox_2d": [1, 1, 9, 9], "soft": -5}]},
]


@pytest.mark.parametrize("change", CHANGES)
def test_saved_answers_follow_the_rules_of_datasets(change: dict[str, object]) -> None:
    line = {"sample_id": "1", "image": "/x", "width": 9, "height": 9, "gt": [], "pred": [], **change}
    with pytest.raises(DataError):
        from_line(json.dumps(line))


def test_names_of_saved_answers_are_those_of_datasets() -> None:
    objects = [{"desc": name, "bbox_2d": [1, 1, 9, 9]} for name in (" cafe\u0301 ", "a\tb")]
    line = {"sample_id": "1", "image": "/x", "width": 9, "height": 9, "gt": objects, "pred": objects}
    answer = from_line(json.dumps(line))
    for found in (answer.truth, answer.pred):
        assert [obj.desc for obj in found] == ["caf\u00e9", "a\tb"], "one that no dataset may contain stays"


def test_a_class_may_be_called_like_a_field(tmp_path: Path) -> None:
    pred = [{"desc": "images", "bbox_2d": [1, 1, 9, 9]}]
    answer = {"sample_id": "1", "image": "/x", "width": 9, "height": 9, "gt": None, "pred": pred}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(answer) + "\n", encoding="utf-8")
    assert not is_dataset(tmp_path / "predictions.jsonl")
    assert is_dataset(dataset(tmp_path / "d.jsonl", ("1.png", "cat")))


def test_colours_of_16_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.ppm").write_bytes(b"P6 2 2 4095\n" + b"\x0f\xa0" * 12)
    (tmp_path / "plain.ppm").write_bytes(b"P6 2 2 255\n" + b"\x0f" * 12)
    with pytest.raises(DataError, match="8-bit"):
        open_rgb(tmp_path / "deep.ppm")
    assert open_rgb(tmp_path / "plain.ppm").getpixel((1, 1)) == (15, 15, 15)


def test_a_replaced_picture_is_not_the_one_that_was_answered(tmp_path: Path, cli: Cli) -> None:
    data, out = dataset(tmp_path / "d.jsonl", ("1.png", "cat"), ("2.png", "dog")), tmp_path / "out"
    words = ("predict", data, "--model", asset("checkpoints/demo-stage1"), "--out", out)
    assert cli(*words).code == 0
    assert "2 of them by an earlier run" in cli(*words).out
    first, second = data.read_text(encoding="utf-8").splitlines()
    data.write_text(f"{second}\n{first}\n", encoding="utf-8")
    swapped = cli(*words)
    assert swapped.code == 2 and "another picture now" in swapped.err
    data.write_text(f"{first}\n{second}\n", encoding="utf-8")
    Image.new("RGB", (64, 64), COLOURS["cow"]).save(tmp_path / "1.png")
    later = max(file.stat().st_mtime for file in out.iterdir()) + 10
    os.utime(tmp_path / "1.png", (later, later))
    replaced = cli(*words)
    assert replaced.code == 2 and "or a newer one" in replaced.err


def test_images_that_were_resized_by_several_rules_are_noted() -> None:
    rules = [{"factor": 16, "min_pixels": 256, "max_pixels": most} for most in (1024, 4096)]
    one, other = (ImageRecord("a", Path("a"), 32, 32, (), {"prepared": rule}) for rule in rules)
    unprepared = ImageRecord("b", Path("b"), 32, 32, ())
    assert several_rules_note([one, one]) is None and several_rules_note([unprepared]) is None
    assert "by 2 rules (metadata.prepared: factor 16, 256 to 1024 pixels; factor 16, 256 to 4096 pixels)" in str(
        several_rules_note([one, other])
    )
    assert "by 2 rules (metadata.prepared: factor 16, 256 to 1024 pixels; none)" in str(
        several_rules_note([one, unprepared])
    )


def test_validation_images_without_the_training_images_resizing_are_noted() -> None:
    trained = ImagePreparation(ResizeRule(32, 1024, 4096))
    small, large = (ImageRecord(name, Path(name), side, side, ()) for name, side in (("a", 64), ("b", 128)))
    assert unprepared_note(trained, [small]) is None
    assert unprepared_note(ImagePreparation(), [large]) is None
    note = unprepared_note(trained, [small, large]) or ""
    assert note.startswith("1 of 2 images") and "convert both with the same options" in note


def test_limits_by_which_converted_images_are_resized_again_are_to_be_changed() -> None:
    rule = ResizeRule(32, 128**2, 128**2)
    converted = ImageRecord("a", Path("a"), *rule.size(101, 77), (), {"prepared": asdict(rule)})
    note = unprepared_note(ImagePreparation(rule), [converted]) or ""
    assert note.startswith("1 of 1 images would be resized") and note.endswith("further apart")


def named(*names: str) -> ImageRecord:
    return ImageRecord("d:1", Path("a"), 32, 32, tuple(GTObject(name, "bbox_2d", (0, 0, 9, 9)) for name in names))


def test_validation_names_that_training_never_shows_are_noted_with_the_name_that_was_meant() -> None:
    train = [named("car", "red light"), named("person")]
    assert unseen_note(train, [named("car"), named("person", "red light")]) is None
    assert unseen_note([named()], [named("car")]) is None, "training without any object has no names to differ from"
    note = str(unseen_note(train, [named("Car", "red lights", "lorry", "person"), named("lorry")]))
    assert note.startswith("3 of 4 class names are in no training annotation: ")
    assert "'Car' (training has 'car'), 'lorry', 'red lights' (training has 'red light');" in note
    many = str(unseen_note(train, [named(*(f"{k:02d}" for k in range(11)))]))
    assert "'07' and 3 more;" in many and "'08'" not in many
    captions = [named(f"caption {k}") for k in range(10_001)]
    assert unseen_note(captions, [named("another")]) is None and unseen_note(train, captions) is None, "free text"


@pytest.mark.parametrize("folder", ["images", "images/train"])
def test_a_converted_image_never_replaces_one_that_is_to_be_converted(folder: str, tmp_path: Path) -> None:
    dataset(tmp_path / "d.jsonl", ("images/a.png", "cat"), ("images/train/a.png", "dog"))
    (tmp_path / "t.csv").write_text("image,name,x1,y1,x2,y2\na.png,cat,1,1,20,20\ntrain/a.png,dog,1,1,20,20\n")
    options = ImageOptions(name="train", factor=16, min_pixels=256)
    with pytest.raises(DataError, match=r"images/train/a\.png: is an image to convert"):
        convert_csv(tmp_path / "t.csv", tmp_path, images_dir=tmp_path / folder, options=options)
    assert open_rgb(tmp_path / "images" / "train" / "a.png").getpixel((0, 0)) == COLOURS["dog"]
