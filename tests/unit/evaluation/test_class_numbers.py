"""A class has the same number for every folder, by every door: its position in the class list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from coordexp.checkpoints.card import UNTRAINED, read_card, write_card
from coordexp.data.class_list import (
    OTHER_NAMES,
    ClassList,
    ClassNumbers,
    check_known,
    choose_list,
    class_list,
    read_class_list,
)
from coordexp.data.jsonl import write_jsonl
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, class_list_of, write_answers
from coordexp.evaluation.coco_results import to_coco
from coordexp.evaluation.summary import WITH_OWN_SCORES, summarise, write_summary
from coordexp.evaluation.users_terms import read_terms
from coordexp.inference.detections import Detections, as_detections
from coordexp.inference.session import checked_class_names, read_class_names
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import Cli

BOX = (100, 100, 900, 900)
LIST = ("ant", "bee", "cow", "dog")


def saved(folder: Path, *names: str, annotated: bool = False) -> Path:
    """Predictions as ``coordexp predict`` leaves them, of one object of each name, by a checkpoint with LIST."""
    folder.mkdir(parents=True)
    Image.new("RGB", (50, 40)).save(folder / "a.png")
    found = tuple(ScoredObject(name, "bbox_2d", BOX, 0.5, 0.5) for name in names)
    gt = tuple(GTObject(name, "bbox_2d", BOX) for name in names) if annotated else None
    write_answers([ImageAnswer("a.png", str(folder / "a.png"), 50, 40, gt, found)], folder / "predictions.jsonl")
    (folder / "prediction.json").write_text(json.dumps({"class_list": list(LIST)}))
    return folder


def detected(*names: str, classes: Sequence[str] = LIST) -> Detections:
    pred = tuple(ScoredObject(name, "bbox_2d", BOX, 0.5) for name in names)
    return as_detections(ImageAnswer("a", "a", 9, 9, None, pred), None, classes)


def users_coco(folder: Path, **content: object) -> Path:
    path = folder / "users.json"
    path.write_text(json.dumps({"images": [], **content}))
    return path


def yolo_numbers(cli: Cli, source: Path, *options: object) -> tuple[dict[int, str], list[str]]:
    out = source.parent / f"yolo of {source.stem}"
    done = cli("export", "yolo", source, "--out", out, *options)
    assert done.code == 0, done.err
    labels = [line.split()[0] for path in sorted(out.rglob("*.txt")) for line in path.read_text().splitlines()]
    return yaml.safe_load((out / "data.yaml").read_text())["names"], labels


def coco_numbers(cli: Cli, source: Path, *options: object) -> list[int]:
    out = source.parent / f"coco of {source.stem}"
    done = cli("export", "coco", source, "--out", out, *options)
    assert done.code == 0, done.err
    names = {one["id"]: one["name"] for one in json.loads((out / "dataset.json").read_text())["categories"]}
    assert [names[number] for number in (1, 2, 3, 4)] == list(LIST)
    return [one["category_id"] for one in json.loads((out / "results.json").read_text())]


@pytest.mark.parametrize(("names", "numbers"), [(("dog",), [3]), (("cow", "ant", "cow"), [2, 0, 2])])
def test_exports_number_by_the_checkpoints_list(
    names: tuple[str, ...], numbers: list[int], tmp_path: Path, cli: Cli
) -> None:
    source = saved(tmp_path / "run", *names)
    listed, labels = yolo_numbers(cli, source)
    assert listed == dict(enumerate(LIST)) and labels == [str(number) for number in numbers]
    assert coco_numbers(cli, source) == [number + 1 for number in numbers]
    assert [one["category_id"] for one in detected(*names).to_coco()] == [number + 1 for number in numbers]


def test_all_names_outside_of_the_list_share_the_next_number(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "yak", "ant", "gnu", "yak")
    listed, labels = yolo_numbers(cli, source)
    assert listed == {**dict(enumerate(LIST)), 4: OTHER_NAMES} and labels == ["4", "0", "4", "4"]
    assert coco_numbers(cli, source) == [5, 1, 5, 5]
    done = cli("export", "yolo", source, "--out", tmp_path / "again")
    assert "3 objects of 2 names outside of the class list share number 4" in done.out and "'yak' (2)" in done.out


def test_a_users_list_replaces_the_checkpoints(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "cow", "dog")
    mine = tmp_path / "mine.txt"
    mine.write_text("dog\ncow\n")
    model = tmp_path / "model"
    model.mkdir()
    write_card(replace(UNTRAINED, classes=("cow", "dog")), model)
    assert yolo_numbers(cli, source, "--classes", mine) == ({0: "dog", 1: "cow"}, ["1", "0"])
    assert yolo_numbers(cli, source, "--classes", model, "--overwrite") == ({0: "cow", 1: "dog"}, ["0", "1"])
    refused = cli("export", "voc", source, "--out", tmp_path / "v", "--classes", mine)
    assert refused.code == 2 and "--classes has no use here" in refused.err


def test_without_any_list_the_numbers_are_said_to_hold_for_these_images_alone(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "cow", "bee")
    (source / "prediction.json").unlink()
    done = cli("export", "yolo", source, "--out", tmp_path / "y")
    assert "without a class list these numbers hold for these images alone" in done.out
    with pytest.raises(DataError, match="no class list"):
        detected("cow", classes=()).to_coco()


def test_a_split_of_a_dataset_is_numbered_by_the_split_that_is_named(tmp_path: Path, cli: Cli) -> None:
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    for name, descs in (("train", LIST), ("val", ("cow",))):
        objects = tuple(GTObject(desc, "bbox_2d", BOX) for desc in descs)
        write_jsonl([ImageRecord(name, tmp_path / "a.png", 50, 40, objects)], tmp_path / f"{name}.jsonl")
    assert yolo_numbers(cli, tmp_path / "val.jsonl", "--classes", tmp_path / "train.jsonl") == (
        dict(enumerate(LIST)), ["2"]
    )  # fmt: skip
    assert yolo_numbers(cli, tmp_path / "train.jsonl")[1] == ["0", "1", "2", "3"]


def test_an_evaluation_keeps_the_list_for_its_files(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "dog", "yak", annotated=True)
    done = cli("evaluate", source, "--out", tmp_path / "figures")
    assert done.code == 0, done.err
    truth = json.loads((tmp_path / "figures" / "coco_ground_truth.json").read_text())
    assert [one["name"] for one in truth["categories"]] == [*LIST, "yak"], "annotated names follow the list"
    assert [one["category_id"] for one in truth["annotations"]] == [4, 5]
    assert class_list_of(tmp_path / "figures") == LIST


def test_the_list_that_is_kept_next_to_the_answers_is_theirs(tmp_path: Path) -> None:
    """A folder's own answers are read before those in its ``evaluation``, and so is their list; answers of a run's
    evaluations, without any, have that of the run's card."""
    run = saved(tmp_path / "run", "cow")
    saved(run / "evaluation", "cow")
    (run / "prediction.json").unlink()
    assert class_list_of(run) == () and class_list_of(run / "evaluation") == LIST
    write_card(replace(UNTRAINED, classes=("bee", "cow")), run)
    (run / "predictions.jsonl").rename(run / "last_evaluation.jsonl")
    assert class_list_of(run / "last_evaluation.jsonl") == ("bee", "cow") and class_list_of(run) == LIST
    for broken in ('"cow"', '["cow", 1]', r'["cow", "\ud800"]'):  # the last is half a character, which no file can hold
        (run / "evaluation" / "prediction.json").write_text(f'{{"class_list": {broken}}}')
        with pytest.raises(DataError, match="class_list is not a list of names"):
            class_list_of(run)


RECORDS = [ImageRecord("a", Path("a.png"), 50, 40, tuple(GTObject(name, "bbox_2d", BOX) for name in ("yak", "gnu")))]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"users": {"cow": 7}, "checkpoint": LIST, "class_names": ("bee",), "records": RECORDS}, {"cow": 7}),
        ({"users": None, "checkpoint": LIST, "class_names": ("bee",), "records": RECORDS}, LIST),
        ({"checkpoint": (), "class_names": ("cow", "bee"), "records": RECORDS}, ("cow", "bee")),
        ({"checkpoint": (), "class_names": (), "records": RECORDS}, ("gnu", "yak")),
        ({}, ()),
    ],
)
def test_the_first_list_at_hand_is_chosen(given: dict[str, Any], chosen: ClassList) -> None:
    assert choose_list(**given) == chosen


@pytest.mark.parametrize(
    ("users", "numbers"),
    [
        ([" cow", "cafe\u0301"], [1, 2]),
        ({"caf\u00e9 ": 7, "cow": 4}, [4, 7]),
        (iter(["caf\u00e9", "cow"]), [2, 1]),
        (np.array(["cow", "caf\u00e9"]), [1, 2]),
        ({"cow": np.int64(3), "café": 3}, [3, 3]),
    ],
)
def test_a_users_list_in_python_has_names_as_models_write_them(users: Any, numbers: list[int]) -> None:
    found = detected("cow", "caf\u00e9").to_coco(category_ids=users)
    assert [one["category_id"] for one in found] == numbers


@pytest.mark.parametrize(
    ("users", "says"),
    [
        (5, "the class list is 5"),
        ({"cow", "bee"}, "the class list is {"),
        ("cow", "the class list is 'cow'"),
        ((), "the class list is ()"),  # not the same as no list
        ({}, "the class list is {}"),
        (["cow", "bee", "cow "], "'cow' is name 0 and name 2"),
        (["cow", 3], "has 3, which is not text"),
        ({1: "cow"}, "has 1, which is not text"),
        ([{"id": 1, "name": "cow"}], "which is not text"),
        ({"cow": "1"}, "gives 'cow' the number '1'"),
        ({"cow": 1.0}, "gives 'cow' the number 1.0"),
        ({"cow": True}, "gives 'cow' the number True"),
        ({"cow": -1}, "gives 'cow' the number -1"),
    ],
)
def test_a_users_list_that_is_not_one_is_refused_in_words(users: Any, says: str) -> None:
    found = detected("cow")
    for ask in (lambda: found.to_supervision(users), lambda: found.to_coco(category_ids=users)):
        with pytest.raises(DataError, match=re.escape(says)):
            ask()


@pytest.mark.parametrize("names", [5, {"cow"}, "cow", b"cow", {"cow": 3}])
def test_class_names_that_are_not_a_list_are_refused(names: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a list of names"):
        checked_class_names(names, tmp_path)


@pytest.mark.parametrize(("names", "listed"), [(10_000, 10_000), (10_001, 0)])
def test_more_than_10000_descriptions_are_free_text_and_no_classes(names: int, listed: int) -> None:
    objects = tuple(GTObject(f"thing {k}", "bbox_2d", BOX) for k in range(names))
    assert len(class_list([ImageRecord("a", Path("a.png"), 50, 40, objects)])) == listed


def test_numbers_of_a_list_with_gaps_are_kept() -> None:
    numbers = ClassNumbers.of({"dog": 9, "cat": 4}, 0)
    assert (numbers["dog"], numbers["cat"], numbers["x"]) == (9, 4, 10)
    assert numbers.names(["dog"]) == {4: "cat", 9: "dog"} and numbers.note(["cat"]) is None
    assert ClassNumbers.of(["cat", "cat", "dog"], 0)["x"] == 3, "no number of the list, which has a name twice"


@pytest.mark.parametrize(
    ("given", "near"),
    [("red circel", "red circle"), ("Red circle", "red circle"), ("yelow triangle", "yellow triangle")],
)
def test_a_misspelt_class_is_refused_with_the_nearest(given: str, near: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_card(replace(UNTRAINED, classes=("red circle", "yellow triangle")), model)
    for ask in (
        lambda: checked_class_names(["red circle", given], model),
        lambda: read_class_names(f"red circle,{given}", model),
    ):
        with pytest.raises(ConfigError, match=rf"classes: '{given}' is not a class of .*; did you mean '{near}'\?"):
            ask()
    assert checked_class_names(["yellow triangle"], model) == ("yellow triangle",)
    write_card(replace(read_card(model), classes=()), model)
    assert checked_class_names([given], model) == (given,), "a checkpoint without a list knows no names"


def test_every_command_refuses_a_misspelt_class_before_torch_is_imported(tmp_path: Path, cli: Cli) -> None:
    from coordexp.data.files import asset
    from coordexp.data.scenes import SPARSE, write_scenes

    demo, data = asset("checkpoints/demo-stage1"), write_scenes(tmp_path, 1, SPARSE, 1)
    for command in (("predict", data), ("evaluate", "--data", data)):
        refused = cli(*command, "--model", demo, "--classes", "red circel", "--out", tmp_path / "out")
        assert refused.code == 2 and "did you mean 'red circle'" in refused.err and not (tmp_path / "out").exists()


def test_far_names_are_listed_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"'zebra' is not a class of M\nits classes are: ant, bee") as refused:
        check_known(["zebra"], ("ant", "bee"), "M")
    assert "did you mean" not in str(refused.value)


# -- sizes: in pixels of the user's image -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "expected"),
    [(None, "AP_small"), ((600, 600), "AP_medium"), ((2240, 2240), "AP_large")],
)
def test_sizes_are_measured_in_the_users_pixels(
    original: tuple[int, int] | None, expected: str, tmp_path: Path
) -> None:
    """An object of 0.1 of a side: 22 pixels of the copy that the model saw."""
    from coordexp.data.preparation import OriginalImage

    box = (100, 100, 200, 200)
    users = None if original is None else OriginalImage("photo.jpg", *original)
    gt, found = (GTObject("cat", "bbox_2d", box),), (ScoredObject("cat", "bbox_2d", box, 0.9, 0.9),)
    answer = ImageAnswer("a", "copy.png", 224, 224, gt, found, original=users)
    summary = summarise([answer])
    assert {name for name in summary.figures if name.startswith("AP_")} == {expected}
    (image,) = to_coco([answer]).ground_truth["images"]
    assert (image["file_name"], image["width"]) == (
        ("copy.png", 224) if original is None else ("photo.jpg", original[0])
    )
    write_summary(tmp_path, summary, [answer], {}, WITH_OWN_SCORES)
    (annotation,) = json.loads((tmp_path / "coco_ground_truth.json").read_text())["annotations"]
    side = 224 if users is None else users.width
    assert annotation["bbox"][2] == pytest.approx(side * 100 / 999)


@pytest.mark.parametrize(("width", "size"), [(224, "small"), (600, "medium"), (2240, "large")])
def test_a_dataset_loses_annotations_by_their_size_in_the_users_image(width: int, size: str) -> None:
    from coordexp.data.subset import object_size

    obj = GTObject("cat", "bbox_2d", (100, 100, 200, 200))
    source = {"source": {"file": "photo.jpg", "width": width, "height": width}}
    assert object_size(obj, ImageRecord("a", Path("copy.png"), 224, 224, (obj,), source)) == size


@pytest.mark.parametrize(
    ("name", "text", "numbers"),
    [
        ("a.txt", "cat\n\ndog \n", {"cat": 0, "dog": 2}),
        ("a.yaml", "names: [cat, 'no', dog]", ("cat", "no", "dog")),
        ("a.yaml", "names: {1: dog, 0: cat}", ("cat", "dog")),
        ("a.yml", "names: {3: cat, 1: dog}", {"dog": 1, "cat": 3}),
        ("a.names", "\ufeffcat\r\ndog", ("cat", "dog")),
        ("a.yaml", "names: [' cat', 'cafe\u0301']", ("cat", "caf\u00e9")),
        ("a.yaml", "names: [cat, dog]\nnc: 2", ("cat", "dog")),
    ],
)
def test_a_file_of_classes_is_read_in_one_way(name: str, text: str, numbers: ClassList, tmp_path: Path) -> None:
    """A mapping where positions are not the numbers; names as datasets contain them and models write them."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_class_list(tmp_path / name) == numbers
    assert read_class_names(str(tmp_path / name), tmp_path) == tuple(numbers), "in the order of their numbers"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("names: [cat, no]", "names[1] is False"),
        ("names: [cat, 1.0]", "1.0"),
        ("names: [a, b, a]", "'a' is name 0 and name 2"),
        ("names: []", "has no name"),
        ("names: {0: cat, 1: cow, 0: dog}", "the key '0' is given twice"),
        ("names: {0: cat, '0': dog}", "two of names have one number"),
        ("names: [cat, dog]\nnc: 3", "nc is 3, but names has 2"),
        ("# names: [cat]", "names must be a list"),
        ("path: .", "names must be a list"),
        ("[", "not readable as YAML"),
    ],
)
def test_a_file_of_classes_with_other_than_names_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(says)):
        read_class_list(tmp_path / "data.yaml")


@pytest.mark.parametrize(
    ("name", "text", "yolo", "coco"),
    [
        ("a.txt", "dog\ncow\nbee\n", ["1", "0"], [2, 1]),
        ("a.txt", "dog\n\ncow\nbee\n", ["2", "0"], [3, 1]),
        ("a.yaml", "names: {0: dog, 2: cow}", ["2", "0"], [3, 1]),
        ("a.yaml", "names: {1: dog, 2: cow}", ["2", "1"], [2, 1]),
    ],
)
def test_a_gap_in_a_file_does_not_change_the_numbers_around_it(
    name: str, text: str, yolo: list[str], coco: list[int], tmp_path: Path, cli: Cli
) -> None:
    """COCO's numbers were those of YOLO with a gap, and one higher without."""
    source, mine = saved(tmp_path / "run", "cow", "dog"), tmp_path / name
    mine.write_text(text)
    assert yolo_numbers(cli, source, "--classes", mine)[1] == yolo
    done = cli("export", "coco", source, "--out", tmp_path / "coco", "--classes", mine)
    assert done.code == 0, done.err
    assert [one["category_id"] for one in json.loads((tmp_path / "coco" / "results.json").read_text())] == coco


@pytest.mark.parametrize("name", ["list.json", "list.CSV", "list.pbtxt"])
def test_lines_of_other_formats_are_not_taken_for_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('["cat", "dog"]\n')
    for read in (lambda: read_class_names(str(tmp_path / name), tmp_path), lambda: read_terms(None, tmp_path / name)):
        with pytest.raises(DataError, match="is not a class list"):
            read()


def test_class_names_may_be_longer_together_than_the_name_of_a_file(tmp_path: Path) -> None:
    names = tuple(f"class {k}" for k in range(80))
    assert read_class_names(",".join(names), tmp_path) == names


def test_class_names_are_those_of_a_checkpoints_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder without a class list"):
        read_class_names(str(tmp_path), tmp_path)
    write_card(replace(UNTRAINED, classes=LIST), tmp_path)
    assert read_class_names(str(tmp_path), tmp_path) == LIST


def test_a_list_that_an_export_wrote_has_a_number_for_other_names(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "yak", "ant")
    listed, _ = yolo_numbers(cli, source)
    again = tmp_path / "yolo of run" / "data.yaml"
    assert listed == {**dict(enumerate(LIST)), 4: OTHER_NAMES}
    assert yolo_numbers(cli, source, "--classes", again, "--overwrite") == (listed, ["4", "0"])


@pytest.mark.parametrize(("names", "listed"), [(0, None), (1, 1), (10_001, 10_001)])
def test_predict_and_export_read_the_same_names_of_a_dataset(names: int, listed: int | None, tmp_path: Path) -> None:
    """All of them if the user names it; an export took the checkpoint's list in place of one without names."""
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    objects = tuple(GTObject(f"thing {k:05}", "bbox_2d", BOX) for k in range(names))
    path = tmp_path / "data.jsonl"
    write_jsonl([ImageRecord("a", tmp_path / "a.png", 50, 40, objects)], path)
    for read in (lambda: read_class_names(str(path), tmp_path), lambda: read_terms(None, path).classes):
        if listed is None:
            with pytest.raises(DataError, match=r"data\.jsonl: has no name"):
                read()
        else:
            found = read()
            assert found is not None and [*found] == [f"thing {k:05}" for k in range(listed)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"categories": [{"id": 1, "name": "cow"}, {"id": 1, "name": "bee"}]},
         "categories 'cow' and 'bee' have one id, 1"),
        ({"images": [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}]},
         "images 'a.png' and 'b.png' have one id, 1"),
        ({"categories": [{"id": 1.5, "name": "cow"}]}, "the id of 'cow' in categories is 1.5"),
        ({"categories": [{"id": True, "name": "cow"}]}, "the id of 'cow' in categories is True"),
        ({"images": [{"id": -1, "file_name": "a.png"}]}, "the id of 'a.png' in images is -1"),
        ({"images": [{"id": 1, "file_name": "a.png"}, {"id": 2}]}, "images[1] has no file_name"),
        ({"images": [{"file_name": "a.png"}]}, "images[0] has no id"),
        ({"images": None}, "no list 'images' at the top level"),
        ({"categories": [{"id": 1}]}, "categories[0] has no name"),
        ({"categories": ["cow"]}, "categories[0] has no name"),
        ({"categories": []}, "has no categories"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_users_coco_file_is_named(content: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"users.json: {says}")):
        read_terms(users_coco(tmp_path, **{"categories": [{"id": 1, "name": "cow"}], **content}), None)


def test_ids_of_an_lvis_file_are_kept(tmp_path: Path) -> None:
    images = [{"id": 9, "coco_url": "http://images.cocodataset.org/train2017/01.jpg"}]
    categories = [{"id": 1183, "name": "baby_buggy"}]
    terms = read_terms(users_coco(tmp_path, images=images, categories=categories), None)
    assert (terms.images, terms.classes) == ({"train2017/01.jpg": 9}, {"baby buggy": 1183})
    images = [{"id": 9, "file_name": "01.jpg", "coco_url": images[0]["coco_url"], "neg_category_ids": [3]}]  # of v0.5
    (tmp_path / "users.json").write_text(json.dumps({"images": images, "categories": categories}))
    terms = read_terms(tmp_path / "users.json", None)
    assert (terms.images, terms.classes) == ({"01.jpg": 9}, {"baby buggy": 1183})
    images = [{"id": 9, "file_name": "01.jpg", "coco_url": images[0]["coco_url"]}]  # COCO's own file
    (tmp_path / "users.json").write_text(json.dumps({"images": images, "categories": categories}))
    assert read_terms(tmp_path / "users.json", None).classes == {"baby_buggy": 1183}


def test_a_coco_files_names_are_those_that_models_write(tmp_path: Path) -> None:
    categories = [{"id": 7, "name": "cow "}, {"id": 3, "name": "cafe\u0301"}]
    users = users_coco(tmp_path, categories=categories)
    assert read_terms(users, None).classes == {"cow": 7, "caf\u00e9": 3}
    (tmp_path / "data.jsonl").write_text("{}\n{}\n")
    with pytest.raises(DataError, match="not readable as JSON"):
        read_terms(tmp_path / "data.jsonl", None)
    with pytest.raises(ConfigError, match="--annotations has class numbers too"):
        read_terms(users, tmp_path / "data.jsonl")


def test_entries_of_one_name_in_a_users_coco_file_are_noted(tmp_path: Path, cli: Cli) -> None:
    source = saved(tmp_path / "run", "cow", "yak", annotated=True)
    images = [{"id": number, "file_name": "a.png"} for number in (4, 7)]
    categories = [{"id": 1, "name": "cow"}, {"id": 2, "name": "cow"}, {"id": 3, "name": "dog"}]
    users = users_coco(tmp_path, images=images, categories=categories)
    done = cli("export", "coco", source, "--out", tmp_path / "out", "--annotations", users)
    assert "note: categories 1, 2 have one name, 'cow': the first is used" in done.out
    assert "note: images 4, 7 have one file_name, 'a.png': the first is used" in done.out
    assert "note: 2 annotated and predicted objects of 1 names outside of the class list" in done.out
    first, second = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (first["image_id"], first["category_id"], second["category_id"]) == (4, 1, 4)
