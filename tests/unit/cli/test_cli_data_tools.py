"""Commands of ``coordexp data`` as a person types them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.checkpoints.card import read_card, write_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import ScoredObject
from coordexp.evaluation.detection import match_by_desc
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import Cli
from support.config_samples import stage1, write_yaml
from support.one_scene import as_coco, as_labelme, as_yolo

DEMO = asset("checkpoints/demo-stage1")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 20, SPARSE, 3)


def test_check_json(scenes: Path, cli: Cli) -> None:
    outcome = cli("data", "check", scenes, "--json")
    found = json.loads(outcome.out)
    assert outcome.code == 0 and (found["images"], found["errors"], found["tokens"]) == (20, 0, None)
    assert sum(found["density"].values()) == 20 and sum(found["classes"].values()) == found["objects"]


@pytest.mark.parametrize(
    ("own", "order"), [(None, "desc_first"), (("Find the shapes.", "You look closely."), "geometry_first")]
)
def test_check_counts_tokens_as_training_does(
    own: tuple[str, str] | None, order: Any, scenes: Path, tmp_path: Path, cli: Cli, model: Path
) -> None:
    """With the prompt that the checkpoint was trained with, if it was."""
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import load_processor, load_vocab
    from coordexp.targets import build_gt_target

    if own is not None:
        model = shutil.copytree(model, tmp_path / "model")
        card = read_card(DEMO)
        assert card.training is not None
        trained = replace(card.training, prompt=own[0], system=own[1], object_field_order=order)
        write_card(replace(card, training=trained), model)
    outcome = cli("data", "check", scenes, "--model", model, "--max-tokens", 150, "--json")
    found = json.loads(outcome.out)
    records = read_jsonl(scenes)
    encoder, vocab = PromptEncoder(load_processor(model), *(own or (None, None))), load_vocab(model)
    lengths = [
        len(encoder.encode(r).prompt_token_ids)
        + len(build_gt_target(r.objects, vocab, sample_id="s", field_order=order).token_ids)
        for r in records
    ]
    assert (found["tokens"]["min"], found["tokens"]["max"]) == (min(lengths), max(lengths))
    too_long = sum(length > 150 for length in lengths)
    assert found["findings"].get("too_long", 0) == too_long
    assert outcome.code == (2 if too_long else 0)
    assert cli("data", "check", scenes, "--max-tokens", 150).code == 2  # the tokenizer is not given


@pytest.mark.parametrize(
    ("first", "size", "findings"),
    [("{", (64, 64), {"schema": 1, "missing_image": 1}), ("", (4020, 20), {"extreme_shape": 1, "missing_image": 1}),
     ("{", None, {"schema": 1, "missing_image": 2})],
)  # fmt: skip
def test_counting_and_drawing_do_not_end_a_check(
    first: str, size: tuple[int, int] | None, findings: dict[str, int], tmp_path: Path, cli: Cli
) -> None:
    """A broken first line, an image that no processor takes, no valid record at all: all findings are shown."""
    width, height = size or (64, 64)
    if size is not None:
        Image.new("RGB", size).save(tmp_path / "a.png")
    lines = [
        {"images": [name], "width": width, "height": height, "objects": [{"desc": "x", "bbox_2d": [0, 0, 500, 500]}]}
        for name in ("a.png", "gone.png")
    ]
    (tmp_path / "d.jsonl").write_text("\n".join([first, *map(json.dumps, lines)]) + "\n")
    found = cli("data", "check", tmp_path / "d.jsonl", "--model", DEMO, "--sheet", tmp_path / "s.png", "--json")
    assert found.code == 2 and json.loads(found.out)["findings"] == findings
    assert (tmp_path / "s.png").exists() == (size == (64, 64))


def test_the_sheet_shows_augmented_images(scenes: Path, tmp_path: Path, cli: Cli) -> None:
    config = stage1() | {"data": {"augment": {"horizontal_flip": 0.5, "scale": [0.5, 2.0]}}}
    run, sheet = write_yaml(tmp_path, config), tmp_path / "views.png"
    shown = cli("data", "check", scenes, "--sheet", sheet, "--augment", run, "--sheet-images", 8)
    assert shown.code == 0 and f"wrote {sheet}" in shown.out
    with Image.open(sheet) as image:
        assert image.size == (1280, 672)  # two images, four epochs, names below them
        tiles = {image.crop((320 * k, 0, 320 * k + 320, 320)).tobytes() for k in range(4)}
    assert len(tiles) == 4
    assert "--sheet" in cli("data", "check", scenes, "--augment", run).err
    plain = write_yaml(tmp_path, stage1(), "plain.yaml")
    refused = cli("data", "check", scenes, "--sheet", sheet, "--augment", plain)
    assert refused.code == 2 and "no section data.augment" in refused.err


def test_stats(scenes: Path, cli: Cli) -> None:
    assert "objects by size" in cli("data", "stats", scenes).out
    found = json.loads(cli("data", "stats", scenes, "--json").out)
    assert sum(found["size_percent"].values()) == found["objects"]


@pytest.mark.parametrize(("classes", "said"), [(20, False), (25, True)])
def test_stats_say_that_there_are_more_classes_than_are_shown(
    classes: int, said: bool, tmp_path: Path, cli: Cli
) -> None:
    objects = tuple(GTObject(f"class-{k:02d}", "bbox_2d", (0, 0, 500, 500)) for k in range(classes))
    write_jsonl([ImageRecord("d:1", tmp_path / "a.png", 64, 64, objects)], tmp_path / "d.jsonl")
    shown = " ".join(cli("data", "stats", tmp_path / "d.jsonl").out.split())
    assert ("objects by class: the 20 most frequent of 25, all with --json" in shown) == said
    assert shown.count("class-") == 20


def test_split_and_sample(scenes: Path, tmp_path: Path, cli: Cli) -> None:
    everything = read_jsonl(scenes)
    assert cli("data", "split", scenes, "--shares", "fit=0.75,rest=0.25", "--seed", 4).code == 0
    fit, rest = (read_jsonl(scenes.with_name(f"scenes.{name}.jsonl"), check_images=True) for name in ("fit", "rest"))
    assert (len(fit), len(rest)) == (15, 5)
    assert sorted(r.image for r in [*fit, *rest]) == sorted(r.image for r in everything)
    again = cli("data", "split", scenes, "--shares", "fit=0.75,rest=0.25")
    assert again.code == 2 and "exists already" in again.err
    assert cli("data", "split", scenes, "--shares", "fit=lots").code == 2
    drawn = tmp_path / "deep" / "few.jsonl"
    assert cli("data", "sample", scenes, "--count", 3, "--out", drawn).code == 0
    assert {r.image for r in read_jsonl(drawn, check_images=True)} < {r.image for r in everything}
    assert cli("data", "sample", scenes, "--count", 99, "--out", tmp_path / "x.jsonl").code == 2


def test_split_says_which_classes_no_training_image_has(tmp_path: Path, cli: Cli) -> None:
    def record(number: int, name: str) -> ImageRecord:
        Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / f"{number}.png")
        box = GTObject(name, "bbox_2d", (0, 0, 500, 500))
        return ImageRecord(f"d:{number}", tmp_path / f"{number}.png", 64, 64, (box,))

    write_jsonl([record(k, f"class {k}") for k in range(4)], tmp_path / "d.jsonl")
    shares = ("--shares", "train=0.5,val=0.25,test=0.25")
    err = cli("data", "split", tmp_path / "d.jsonl", *shares).err
    for part in ("val", "test"):
        (only,) = read_jsonl(tmp_path / f"d.{part}.jsonl")
        note = f"d.{part}.jsonl: 1 of 1 class names are in no training annotation: {only.objects[0].desc!r}"
        assert note in " ".join(err.split())
    write_jsonl([record(k, "cat") for k in range(4)], tmp_path / "e.jsonl")
    assert cli("data", "split", tmp_path / "e.jsonl", *shares).err == ""


def with_underscores(annotations: Path, images: Path) -> tuple[Path, Path]:
    """LVIS writes ``traffic_light``."""
    annotations.write_text(annotations.read_text(encoding="utf-8").replace("traffic light", "traffic_light"))
    return annotations, images


@pytest.mark.parametrize("form", ["yolo", "labelme", "coco", "lvis"])
def test_converters_have_commands(tmp_path: Path, cli: Cli, form: str) -> None:
    source = tmp_path / "in"
    arguments = {
        "yolo": lambda: [as_yolo(source, rings=True), "--split", "train", "--name", "data"],
        "labelme": lambda: [as_labelme(source, rings=True), "--name", "data"],
        "coco": lambda: [*as_coco(source, rings=True), "--geometry", "poly", "--name", "data"],
        "lvis": lambda: [*with_underscores(*as_coco(source, rings=True)), "--geometry", "poly", "--name", "data"],
    }[form]()
    common = ["--out", tmp_path / "out", "--factor", 8, "--min-pixels", 64, "--max-vertices", 3]
    outcome = cli("data", "convert", form, *arguments, *common)
    assert outcome.code == 0 and "polygons simplified" in outcome.out
    (first, _) = read_jsonl(tmp_path / "out" / "data.jsonl", check_images=True)
    assert [len(obj.bins) for obj in first.objects] == [6, 6]
    assert not any("_" in obj.desc for obj in first.objects)


def test_drop(scenes: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "deep" / "half.jsonl"
    outcome = cli("data", "drop", scenes, "--keep", "0.5", "--seed", 0, "--out", out, "--json")
    whole, half = read_jsonl(scenes), read_jsonl(out, check_images=True)
    left = sum(len(record.objects) for record in half)
    found = json.loads(outcome.out)
    assert outcome.code == 0 and (found["kept"], found["kept"] + found["dropped"]) == (
        left, sum(len(record.objects) for record in whole)
    )  # fmt: skip
    assert all(set(few.objects) <= set(all_.objects) for few, all_ in zip(half, whole, strict=True))
    before = out.read_bytes()
    again = cli("data", "drop", scenes, "--keep", "0.1", "--out", out)
    assert again.code == 2 and "--overwrite" in again.err and out.read_bytes() == before
    options = ["--per-class", "red circle =0", "--per-size", "large=1", "--allow-empty", "--overwrite"]
    outcome = cli("data", "drop", scenes, *options, "--out", out)
    assert outcome.code == 0 and "red circle" in outcome.out and "0 of" in outcome.out
    assert not any(obj.desc == "red circle" for record in read_jsonl(out) for obj in record.objects)
    before = out.read_bytes()
    onto_itself = cli("data", "drop", out, "--keep", "0.1", "--overwrite", "--out", out)
    assert onto_itself.code == 2 and "is the dataset itself" in onto_itself.err and out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--per-class", "red circle"], "expected a name and a number from 0 to 1"),
        (["--per-class", "red circle=2"], "expected a name and a number from 0 to 1"),
        (["--per-class", "red circle=0", "--per-class", "red circle=1"], "twice"),
        (["--per-class", "caf\u00e9=0", "--per-class", "cafe\u0301=1"], "twice"),
        (["--per-size", "huge=0.5"], "expected small, medium, large"),
        (["--per-class", "red crcle=0.5"], "no object is called 'red crcle'"),
        ([], "every annotation would be kept"),
        (["--soft", "--keep", "0.5"], "--soft"),
    ],
)
def test_drop_names_invalid_arguments(scenes: Path, tmp_path: Path, cli: Cli, options: list[str], says: str) -> None:
    outcome = cli("data", "drop", scenes, *options, "--out", tmp_path / "x.jsonl")
    assert outcome.code == 2 and says in " ".join(outcome.err.split()) and not (tmp_path / "x.jsonl").exists()


# --- data complete with the shipped checkpoint ---


@pytest.fixture
def half(tmp_path: Path, cli: Cli) -> Path:
    scenes = write_scenes(tmp_path, 6, SPARSE, 4)
    cli("data", "drop", scenes, "--keep", "0.5", "--out", tmp_path / "half.jsonl")
    return tmp_path / "half.jsonl"


def test_removed_objects_are_added_back_as_soft(half: Path, cli: Cli) -> None:
    out, sheet = half.with_name("full.jsonl"), half.with_name("sheet.png")
    command = ["data", "complete", half, "--model", DEMO, "--out", out, "--sheet", sheet, "--json"]
    outcome = cli(*command)
    assert outcome.code == 0, outcome.err
    counts = json.loads(outcome.out)
    added = counts["outcomes"]["added"]
    whole, before, after = read_jsonl(half.with_name("scenes.jsonl")), read_jsonl(half), read_jsonl(out)
    right = gone = 0
    for complete, few, found in zip(whole, before, after, strict=True):
        assert found.objects[: len(few.objects)] == few.objects
        soft = [ScoredObject(o.desc, o.kind, o.bins, o.soft) for o in found.objects[len(few.objects) :]]
        assert all((obj.score or 0) >= 0.5 for obj in soft)
        (entry,) = found.metadata["completion"]
        assert len(entry["added"]) == len(soft) and entry["model"] == str(DEMO)
        assert entry["fingerprint"] == fingerprint(DEMO)
        missing = [obj for obj in complete.objects if obj not in few.objects]
        right += len(match_by_desc(soft, missing, 0.5))
        gone += len(missing)
    assert gone >= 5 and right >= 0.6 * gone and right >= 0.6 * added
    written = json.loads(half.with_name("full.completion.json").read_text(encoding="utf-8"))
    assert written["outcomes"] == counts["outcomes"] and sum(written["outcomes"].values()) == written["predicted"]
    assert written["prompt"] == "Detect every object."  # as the run that made the checkpoint asked
    with Image.open(sheet) as image:
        assert image.width == 4 * 320

    # Other rules reuse the saved answers; existing files are not replaced without a flag.
    refused = cli(*command)
    assert refused.code == 2 and "--overwrite" in refused.err
    answers = half.with_name("full.answers") / "predictions.jsonl"
    made_at = answers.stat().st_mtime_ns, answers.read_bytes()
    lines = made_at[1].splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # killed while writing
    again = cli(*command, "--overwrite", "--threshold", "0.999", "--weight", "0.5")
    assert again.code == 0 and json.loads(again.out)["outcomes"]["added"] < added and answers.read_bytes() == made_at[1]
    other = cli(*command, "--overwrite", "--prompt", "Where is it?")
    assert other.code == 2 and "another prompt" in other.err


def test_a_model_that_predicts_nothing_may_have_another_prompt(half: Path, cli: Cli) -> None:
    for image in (half.parent / "images").iterdir():
        Image.new("RGB", (128, 128), "gray").save(image)
    command = ["data", "complete", half, "--model", DEMO, "--out", half.with_name("out.jsonl")]
    outcome = cli(*command)
    assert outcome.code == 0 and "Was the model trained with this prompt?" in outcome.out
    assert cli("data", "complete", half, "--out", half.with_name("x.jsonl")).code == 2  # which model?


def test_rename(scenes: Path, tmp_path: Path, cli: Cli) -> None:
    before = [obj.desc for record in read_jsonl(scenes) for obj in record.objects]
    one, other = sorted(set(before))[:2]
    done = cli("data", "rename", scenes, f"{one}={other}", "--out", tmp_path / "new.jsonl")
    assert done.code == 0 and f"{one} -> {other}: {before.count(one)} objects" in done.out
    after = [obj.desc for record in read_jsonl(tmp_path / "new.jsonl", check_images=True) for obj in record.objects]
    assert after == [other if desc == one else desc for desc in before]
    for words, says in (([f"{one}={other}"], "--overwrite"), (["none"], "OLD=NEW"), (["redd=x"], "no object")):
        out = tmp_path / ("new.jsonl" if "overwrite" in says else "other.jsonl")
        refused = cli("data", "rename", scenes, *words, "--out", out)
        assert refused.code == 2 and says in refused.err


def test_tiny_objects_are_enlarged_on_the_sheet(tmp_path: Path, cli: Cli) -> None:
    """A plate of 16 pixels in a wide photo: its tile is low, and the next one shows it."""
    photo = Image.new("RGB", (1600, 800), (60, 90, 60))
    photo.paste((250, 250, 0), (1000, 600, 1016, 608))
    photo.save(tmp_path / "a.png")
    bins = [round(999 * v / side) for v, side in ((1000, 1600), (600, 800), (1016, 1600), (608, 800))]
    line = {"images": ["a.png"], "width": 1600, "height": 800, "objects": [{"desc": "plate", "bbox_2d": bins}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(line) + "\n")
    done = cli("data", "check", tmp_path / "d.jsonl", "--model", DEMO, "--sheet", tmp_path / "s.png")
    assert done.code == 0, done.err
    with Image.open(tmp_path / "s.png") as sheet:
        assert sheet.size == (4 * 320, 158 + 4 + 16), "as high as a tile of the photo, not square"

        def yellow(left: int) -> int:
            found: Any = sheet.crop((left, 0, left + 320, 160)).getcolors(1 << 16)
            return sum(count for count, colour in found if min(colour[:2]) > 200 > colour[2])

        assert yellow(320) > 5 * max(yellow(0), 1)
