"""``coordexp predict`` and ``coordexp evaluate`` on what it wrote: streaming, resuming, scores, comparison."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from coordexp.data import read_jsonl
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.data.tiles import Tiling
from coordexp.evaluation.answers import ImageAnswer, read_answers, write_answers
from coordexp.evaluation.detection import detection_metrics
from coordexp.evaluation.summary import GroupRow, Summary, summary_tables
from support.cli_runs import Cli, files_of_at_most, write_run
from support.scored_answers import CLASSES, random_answers, with_soft

DEMO = asset("checkpoints/demo-stage1")  # ends its answers, unlike random weights


def test_an_interrupted_prediction_resumes_and_a_whole_one_loads_no_model(
    tmp_path: Path, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data = write_run(tmp_path, 1, model), tmp_path / "scenes.jsonl"
    whole = cli("predict", run, data, "--out", tmp_path / "whole", "--json")
    assert whole.code == 0 and json.loads(whole.out)["images"] == 4
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("prediction.json", "predictions.jsonl"):
        (broken / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    lines = (broken / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (broken / "predictions.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])  # killed while writing
    again = cli("predict", run, data, "--out", broken, "--json")
    assert json.loads(again.out)["resumed"] == 2
    assert read_answers(broken) == read_answers(tmp_path / "whole")
    assert [answer.sample_id for answer in read_answers(broken)] == [r.sample_id for r in read_jsonl(data)]
    assert (broken / "coco_results_bbox.json").is_file() and (broken / "coco_ground_truth.json").is_file()
    other = cli("predict", run, data, "--out", broken, "--constant-score", "1.0")
    assert other.code == 2 and "another score" in other.err
    monkeypatch.setattr("coordexp.inference.asking.open_session", None)
    again = cli("predict", run, data, "--out", broken, "--save-images", "--min-confidence", 0.99)
    assert again.code == 0 and "4 images answered, 4 of them by an earlier run" in again.out
    assert len(list((broken / "images").iterdir())) == 4


def test_a_prediction_that_a_full_disk_ends_says_how_it_continues(tmp_path: Path, cli: Cli, model: Path) -> None:
    run, data, out = write_run(tmp_path, 1, model), tmp_path / "scenes.jsonl", tmp_path / "out"
    asked = ("predict", run, data, "--out", out)
    assert cli("predict", run, data, "--out", tmp_path / "whole").code == 0
    first, second, *_ = (tmp_path / "whole" / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    assert cli(*asked, "--limit", "1").code == 0
    with files_of_at_most(len(first) + len(second) // 2):
        ended = cli(*asked, "rollout_matching.decode_batch_size=1")
    assert ended.code == 2 and len(ended.err.splitlines()) == 1, ended.err
    assert "predictions.jsonl: File too large; " in ended.err
    assert ended.err.endswith(f"answers so far are in {out}; the same command with --out {out} continues\n")
    assert " 1 of them by an earlier run" in cli(*asked).out
    evaluated = ("evaluate", run, "--out", tmp_path / "figures")
    with files_of_at_most(200):
        ended = cli(*evaluated)
    assert ended.code == 2 and "metrics.json: File too large; " in ended.err, ended.err
    assert ended.err.endswith("the evaluation is not finished; the same command starts it again\n")
    assert cli(*evaluated).code == 0


def test_several_answers_are_predicted_and_evaluated(tmp_path: Path, cli: Cli) -> None:
    data, out = write_scenes(tmp_path, 2, SPARSE, 77), tmp_path / "out"
    asked = ("predict", data, "--model", DEMO)
    assert cli(*asked, "--out", out, "--answers", "3", "--limit", "1").code == 0
    done = cli(*asked, "--out", out, "--answers", "3")
    assert done.code == 0 and "2 images answered, 1 of them by an earlier run" in done.out and " 3/3 (" in done.out
    settings = json.loads((out / "prediction.json").read_text())
    assert (settings["answers"], settings["decoding"]["temperature"]) == (3, 0.7)
    merged = read_answers(out)
    assert all(answer.num_answers == 3 for answer in merged)
    other = cli(*asked, "--out", out)
    assert other.code == 2 and "another answers" in other.err
    seeded = tmp_path / "seeded"
    assert cli(*asked, "--out", seeded, "--answers", "3", "--limit", "1", "--seed", "5").code == 0
    (reseeded,) = read_answers(seeded)
    assert reseeded.text == merged[0].text and reseeded.further_texts != merged[0].further_texts

    figures = tmp_path / "figures"
    evaluated = ("evaluate", "--model", DEMO, "--data", data)
    done = cli(*evaluated, "--out", figures, "--answers", "3")
    assert done.code == 0 and "several answers per image" in done.out
    saved = json.loads((figures / "metrics.json").read_text())
    assert saved["answers"] == 3 and list(saved["by_answers"]) == ["one", "union", "majority", "oracle"]
    assert saved["by_answers"]["union"]["f1"] == saved["metrics"]["f1"]
    recall = {name: column["recall"] for name, column in saved["by_answers"].items()}
    assert recall["one"] <= recall["oracle"]
    again = [(answer.text, answer.further_texts) for answer in read_answers(figures)]
    assert again == [(answer.text, answer.further_texts) for answer in merged], "the same seeds"
    single = cli(*evaluated, "--out", figures)
    assert single.code == 2 and "another answers" in single.err
    alone = tmp_path / "alone"
    assert cli(*evaluated, "--out", alone).code == 0
    figures_of_one = json.loads((alone / "metrics.json").read_text())
    assert figures_of_one["answers"] is None and figures_of_one["metrics"]["f1"] == saved["by_answers"]["one"]["f1"]


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_impossible_numbers_of_answers_are_one_line(tmp_path: Path, cli: Cli, command: str) -> None:
    data, out = write_scenes(tmp_path, 1, SPARSE, 77), tmp_path / "out.jsonl"
    images = (data,) if command == "predict" else ("--data", data)
    same = "temperature: 0 makes all 2 answers the same"
    for words, reason in (
        (("0",), "--answers"),
        (("2", "rollout_matching.decoding.temperature=0"), same),
        (("2", "rollout_matching.decoding={temperature: 0}"), same),
        (("2", "rollout_matching.decode_mode=beam", "rollout_matching.num_beams=2"), "beam search"),
    ):
        refused = cli(command, *images, "--model", DEMO, "--out", out, "--answers", *words)
        assert refused.code == 2 and reason in refused.err and "Traceback" not in refused.err
        assert len(refused.err.splitlines()) == 1 or reason != same
    assert not out.exists()


def test_several_answers_have_no_use_for_saved_predictions(tmp_path: Path, cli: Cli) -> None:
    write_answers(random_answers(3, 1), tmp_path / "predictions.jsonl")
    refused = cli("evaluate", tmp_path, "--answers", "2")
    assert refused.code == 2 and "--answers has no use here" in refused.err
    data = write_scenes(tmp_path / "scenes", 1, SPARSE, 77)
    for option in (("--answers", 2), ("--tiles", 64), ("--constant-score", 1)):
        refused = cli("evaluate", "--model", DEMO, "--data", data, "--calibrate", *option)
        assert refused.code == 2 and "calibrate: fits the confidences of single answers to whole images" in refused.err


def test_predict_with_class_names(tmp_path: Path, cli: Cli) -> None:
    out, data = tmp_path / "out", write_scenes(tmp_path, 2, SPARSE, 77)
    asked = ("predict", data, "--model", DEMO, "--constant-score", "1.0")
    done = cli(*asked, "--out", out, "--classes", "red circle,yellow triangle")
    assert done.code == 0, done.err
    found = {obj.desc for answer in read_answers(out) for obj in answer.pred}
    assert found and found <= {"red circle", "yellow triangle"}
    assert json.loads((out / "prediction.json").read_text())["classes"] == ["red circle", "yellow triangle"]
    other = cli(*asked, "--out", out)
    assert other.code == 2 and "another classes" in other.err
    for wrong in ("cat,,dog", str(tmp_path / "gone.txt")):
        refused = cli(*asked, "--out", tmp_path / "x", "--classes", wrong)
        assert refused.code == 2 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_the_bar_moves_within_a_batch(command: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch holds all images; their answers end at different tokens, and each moves the bar."""
    monkeypatch.setattr("coordexp.data.progress_bar.LINE_EVERY_S", 0.0)  # every move is a line
    keys = {"rollout_matching__decode_batch_size": 4, "rollout_matching__max_new_tokens": 96}
    run = write_run(tmp_path, 1, DEMO, **keys)
    images = (tmp_path / "scenes.jsonl",) if command == "predict" else ()
    outcome = cli(command, run, *images, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    counts = [int(count) for count in re.findall(r"(\d)/4 images", outcome.out)]
    assert counts[0] == 0 and counts[-1] == 4 and {1, 2, 3} & set(counts), outcome.out


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path, cli: Cli, model: Path) -> None:
    run = write_run(tmp_path, 1, model)
    outcome = cli("predict", run, tmp_path / "scenes.jsonl", "--out", tmp_path)
    assert outcome.code == 2 and "not empty" in outcome.err


def test_saved_predictions_are_evaluated_without_a_model(tmp_path: Path, cli: Cli) -> None:
    write_answers(with_soft(random_answers(12, 1), 0), tmp_path / "predictions.jsonl")
    assert read_answers(tmp_path) == with_soft(random_answers(12, 1), 0)
    outcome = cli("evaluate", tmp_path)
    assert outcome.code == 0 and "soft objects" in outcome.out
    write_answers(random_answers(12, 1), tmp_path / "predictions.jsonl")
    outcome = cli("evaluate", tmp_path, "--segm", "--out", tmp_path / "figures")
    assert outcome.code == 0 and "by class" in outcome.out and "segm_AP" in outcome.out and "手提包" in outcome.out
    found = json.loads(cli("evaluate", tmp_path / "predictions.jsonl", "--json").out)
    written = json.loads((tmp_path / "figures" / "metrics.json").read_text(encoding="utf-8"))
    assert found["metrics"]["AP"] == written["metrics"]["AP"] and found["by_class"] == written["by_class"]
    assert found["predictions"] == str(tmp_path / "predictions.jsonl") and written["predictions"] == str(tmp_path)


def test_tables_fit_a_narrow_terminal_with_the_numbers_of_a_large_set() -> None:
    rates = {"precision": 0.5, "recall": None, "f1": 0.5, "mean_matched_iou": 0.5, "ap": 0.5}
    rows = tuple(
        GroupRow(name, 123_456, 123_456, 123_456, 123_456, **rates) for name in ("yellow triangle", "1-5 objects")
    )
    summary = Summary(detection_metrics({"images": 123_456}), rows, rows)
    console = Console(width=80, record=True, file=io.StringIO())
    for table in summary_tables(summary, "a title that is rather long for a table: " + "outputs/" * 9):
        console.print(table)
    text = console.export_text()
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert text.count("123456") == 3 * 2 * 2


def test_two_runs_are_compared(tmp_path: Path, cli: Cli) -> None:
    answers = random_answers(20, 1)
    write_answers(answers, tmp_path / "a" / "predictions.jsonl")
    write_answers(random_answers(20, 1)[::-1], tmp_path / "b" / "evaluation" / "predictions.jsonl")
    outcome = cli("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 20, "--json")
    found = json.loads(outcome.out)
    figures = {row["name"]: row for row in found["figures"]}
    assert figures["AP"]["difference"] == 0 and not figures["f1"]["clear"]
    assert (found["images"], found["resamples"], found["seed"]) == (20, 20, 0)
    assert {row["name"] for row in found["by_class"]} == set(CLASSES)
    assert [one["name"] for one in found["by_class"][0]["figures"]] == ["f1", "AP"]
    shown = cli("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 10)
    assert shown.code == 0
    for part in ("b − a", "F1 by class", "F1 by density", "手提包", "20 images; interval: 95% of 10"):
        assert part in shown.out
    assert all(len(line) <= 80 for line in shown.out.splitlines())


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("predict", "a.jpg"), "with --model"),
        (("predict", "run.yaml"), "name images"),
        (("predict", "https://example.org/a.jpg", "--model", "m"), "https://example.org/a.jpg: is an address"),
        (("predict", "saved", "--model", "m", "--out", "saved/predictions.jsonl"), "predictions.jsonl: is a file"),
        (("evaluate",), ""),
        (("evaluate", "saved", "--compare", "saved", "saved"), ""),
        (("evaluate", "saved", "training.seed=3"), "KEY=VALUE has no use here; it belongs to a configuration"),
        (("evaluate", "saved", "--model", "m"), "--model has no use here; it belongs to a configuration"),
        (("evaluate", "saved", "--data", "d.jsonl"), "--data has no use here"),
        (("evaluate", "--model", "m", "--data", "d.jsonl", "custom.val_jsonl=e.jsonl"), "both name the dataset"),
        (("evaluate", "saved", "--resamples", "10"), "--resamples has no use here; it belongs to --compare"),
        (("evaluate", "--compare", "saved", "saved", "--resamples", "99999999999999999999"), "equal to 1000000"),
        (("evaluate", "--model", "m", "--print", "--resamples", "10"), "--resamples has no use here"),
        (("evaluate", "--model", "m", "--print", "--calibrate", "--tiles", "64"), "leave out tiles"),
        (("evaluate", "--model", "m", "--print", "--embedding-threshold", "0.5"), "it belongs to --embedder"),
        (("doctor", "--timeout", "inf"), "equal to 1000000"),
        (("model", "tiny", "saved/tiny", "--seed", "4294967296"), "equal to 4294967295"),
        (("doctor", "--timeout", "3e6"), "equal to 1000000"),
        (("evaluate", "saved", "--embedding-threshold", "0.5"), "it belongs to --embedder"),
        (("evaluate", "--compare", "saved", "saved", "--out", "o"), "belongs to a configuration or saved predictions"),
        (("evaluate", "--compare", "saved", "saved", "--limit", "3"), "--limit has no use here"),
        (("evaluate", "--compare", "saved", "saved", "--segm"), "--segm has no use here"),
        (("predict", "saved", "run.yaml", "--model", "saved"), "run.yaml: is a configuration, not an image"),
    ],
)
def test_missing_arguments_and_options_without_effect_are_refused(
    tmp_path: Path, cli: Cli, argv: tuple[str, ...], complaint: str
) -> None:
    write_answers(random_answers(3, 1), tmp_path / "predictions.jsonl")
    outcome = cli(*(word.replace("saved", str(tmp_path)) for word in argv))
    assert outcome.code == 2 and complaint in outcome.err


@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        ("predict no.yaml no.png --model no", ["no such image, folder or dataset: no.png", "no.yaml: no such file",
                                               "--model: no: no such folder"]),
        ("evaluate --model no --data no.jsonl", ["--model: no: no such folder", "--data: no.jsonl: file not found"]),
        ("data complete no.yaml no.jsonl --model no --out o.jsonl",
         ["--model: no: no such folder", "CONFIG.yaml: no.yaml: file not found",
          "DATA.jsonl: no.jsonl: file not found"]),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_reported_at_once(
    argv: str, missing: list[str], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli(*argv.split())
    assert outcome.code == 2 and [line for line in missing if line not in outcome.err] == []


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"text": "{}"}, None),
        ({"text": "I see a cat", "dropped": {"prose": 1}}, "not JSON (prose 1): 'I see a cat'"),
        ({"text": '{"object_1"', "truncated": True, "num_tokens": 7}, "7 tokens"),
        ({"text": "{", "truncated": True, "repeat_terminated": True, "num_tokens": 9}, "9 tokens because it repeated"),
        ({"text": '{"a": 1}', "dropped": {"key_invalid": 2}}, "2 entries could not be read (key_invalid 2)"),
        ({"truncated": True, "tiling": Tiling(5, 5, 0)}, "at least one of the answers to 4 tiles was cut off"),
        (
            {"dropped": {"prose": 3}, "tiling": Tiling(5, 5, 0), "further_texts": ("",)},
            "3 entries of 2 answers to each of 4 tiles could not be read (prose 3)",
        ),
    ],
)
def test_an_answer_says_why_it_may_lack_objects(fields: dict[str, Any], part: str | None) -> None:
    problem = replace(ImageAnswer("s", "a.png", 10, 10, None, ()), **fields).problem
    assert problem is None if part is None else problem is not None and part in problem


def test_a_sheet_shows_the_mistakes(tmp_path: Path, cli: Cli) -> None:
    answers = []
    for k, answer in enumerate(random_answers(7, 1)):
        path = tmp_path / f"{k}.png"
        Image.new("RGB", (320, 240), "gray").save(path)
        answers.append(replace(answer, image=str(path)))
    write_answers(answers, tmp_path / "a" / "predictions.jsonl")
    write_answers([replace(answer, pred=()) for answer in answers], tmp_path / "b" / "predictions.jsonl")
    one = cli("evaluate", tmp_path / "a", "--sheet", tmp_path / "one.png")
    assert one.code == 0 and f"wrote {tmp_path / 'one.png'}" in one.out
    both = cli("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 10, "--sheet",
                   tmp_path / "both.png")  # fmt: skip
    assert both.code == 0 and re.search(r"^a:", both.out, re.M) and re.search(r"^b:", both.out, re.M)  # a line each
    with Image.open(tmp_path / "one.png") as sheet, Image.open(tmp_path / "both.png") as wider:
        # Seven images, three across with two panels each; six whose matches differ, two across with three. Names are
        # above, counts below.
        assert (sheet.size, wider.size) == ((3 * 2 * 320, 26 + 3 * 240 + 26), (2 * 3 * 320, 26 + 3 * 240 + 26))
    same = cli("evaluate", "--compare", tmp_path / "a", tmp_path / "a", "--resamples", 10, "--sheet",
                   tmp_path / "same.png")  # fmt: skip
    assert same.code == 0 and "F1 by class" in same.out and "no image has a mistake or a difference" in same.out
    Path(answers[0].image).unlink()
    gone = cli("evaluate", tmp_path / "a", "--sheet", tmp_path / "gone.png")
    assert gone.code == 2 and "0.png" in gone.err and "by density" in gone.out


def test_predict_images_without_a_configuration(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("a.jpg", "b.png"):
        Image.new("RGB", (64, 48), "gray").save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "c.jpg").write_text("no image")
    Image.new("RGB", (3000, 12), "gray").save(tmp_path / "photos" / "thin.png")
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "photos" / "moving.gif", save_all=True, append_images=frames[1:])
    for name in ("clip.mp4", "phone.HEIC", "raw.dng"):
        (tmp_path / "photos" / name).write_text("not read")
    shown = cli("predict", "photos", "--model", DEMO, "--save-images")
    assert shown.code == 0, shown.err
    assert "2 images answered; 6 skipped, which could not be read" in shown.out
    for name, reason in (("c.jpg", "cannot identify"), ("thin.png", "3000x12"), ("moving.gif", "2 frames"),
                         ("clip.mp4", "ffmpeg"), ("phone.HEIC", "coordexp[heif]"), ("raw.dng", "JPEG")):  # fmt: skip
        assert re.search(rf"^skipped {re.escape(name)}: .*{re.escape(reason)}", shown.out, re.M), name
    assert "a.jpg: " in shown.out
    out = tmp_path / "outputs" / "predict"
    assert sorted(path.name for path in (out / "images").iterdir()) == ["a.jpg", "b.png"]
    assert Image.open(out / "images" / "a.jpg").size == (640, 480)  # small images are enlarged
    assert [(answer.width, answer.height, answer.gt) for answer in read_answers(out)] == [(64, 48, None)] * 2
    measured = cli("evaluate", out)
    assert measured.code == 2 and "has no annotations" in measured.err
    (tmp_path / "empty").mkdir()
    assert cli("predict", "empty", "--model", DEMO, "--out", "o2").code == 2  # no image there
    frames[0].save(tmp_path / "still.gif")
    Image.new("RGB", (64, 48), "gray").save(tmp_path / "still.avif")
    frames[0].save(tmp_path / "a: cat 1.00\nb.png")
    read = cli("predict", "still.gif", "still.avif", "a: cat 1.00\nb.png", "--model", DEMO, "--out", "o4")
    assert read.code == 0 and "3 images answered\n" in read.out
    assert r"a: cat 1.00\u000ab.png: " in read.out and "\nb.png: " not in read.out, "one line for each image"
    cut = cli("predict", "photos/a.jpg", "--model", DEMO, "--out", "o3", "--max-new-tokens", 2)
    assert "photos/a.jpg: nothing found [cut off after 2 tokens" in cut.out and "1 of them cut off" in cut.out
    again = cli("predict", "photos/a.jpg", "photos/b*.png", "--model", DEMO, "--json")
    found, second = json.loads(again.out), tmp_path / "outputs" / "predict-2"
    assert (found["images"], found["skipped"], found["problems"]) == (2, [], {})
    assert found["files"][0].startswith("outputs/predict-2/")
    assert [answer.sample_id for answer in read_answers(second)] == ["photos/a.jpg", "photos/b.png"]


def test_evaluate_skips_images_that_cannot_be_decoded(tmp_path: Path, cli: Cli) -> None:
    data, out = write_scenes(tmp_path, 3, SPARSE, 77), tmp_path / "out"
    broken = tmp_path / "images" / "000001.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])  # its header is sound
    asked = ("evaluate", "--model", DEMO, "--data", data)
    done = cli(*asked, "--out", out)
    assert done.code == 0, done.err
    assert re.search(r"^skipped scenes\.jsonl:2: .*000001\.png", done.out, re.M)
    assert "1 images cannot be decoded" in done.out
    content = json.loads((out / "metrics.json").read_text())
    assert list(content["skipped"]) == ["scenes.jsonl:2"] and "1 images cannot be decoded" in content["notes"][-1]
    assert [answer.sample_id for answer in read_answers(out)] == ["scenes.jsonl:1", "scenes.jsonl:3"]
    for image in (tmp_path / "images").iterdir():
        image.write_bytes(image.read_bytes()[:200])
    refused = cli(*asked, "--out", tmp_path / "none")
    assert refused.code == 2 and "no image that can be read" in refused.err
