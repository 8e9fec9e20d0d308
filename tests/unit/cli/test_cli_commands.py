"""Output and files of each command on small real input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from coordexp.data import read_jsonl
from coordexp.evaluation.detection import detection_metrics
from support import annotation_folders as folders
from support.cli_runs import Cli, small_checkpoint, write_run


def unwrapped(text: str) -> str:
    return " ".join(text.split())


# evaluate


def test_evaluate_writes_figures_and_one_line_per_image(tmp_path: Path, cli: Cli, model: Path) -> None:
    run = write_run(tmp_path, 1, model)
    outcome = cli("evaluate", run)
    assert outcome.code == 0
    records = read_jsonl(tmp_path / "scenes.jsonl")
    written = json.loads((tmp_path / "out1/evaluation/model/metrics.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out1/evaluation/model/predictions.jsonl").open(encoding="utf-8")]

    assert written["model"] == str(model) and written["data"] == str(tmp_path / "scenes.jsonl")
    assert written["metrics"].keys() >= detection_metrics({}).keys() | {"AP", "AP50", "AR100"}
    assert written["metrics"]["images"] == len(records) == 4
    assert written["metrics"]["gt_objects"] == sum(len(record.objects) for record in records)
    for line, record in zip(lines, records, strict=True):
        assert (line["sample_id"], line["image"]) == (record.sample_id, str(record.image))
        assert sorted(tuple(obj.get("bbox_2d", obj.get("poly"))) for obj in line["gt"]) == sorted(
            obj.bins for obj in record.objects
        )
        assert line["truncated"] is True and line["text"], "16 tokens are too few for an answer"
    assert "mean_matched_iou" in outcome.out and "by density" in outcome.out
    assert "4 images with" in unwrapped(outcome.out)


def test_evaluate_another_model_on_other_data_prints_only_the_file_on_stdout(
    tmp_path: Path, cli: Cli, model: Path
) -> None:
    run = write_run(tmp_path, 2, tmp_path / "not made yet", custom__val_jsonl=None)
    options = ["--model", model, "--data", tmp_path / "scenes.jsonl", "--limit", 3, "--out", tmp_path / "figures"]
    outcome = cli("evaluate", run, "--json", *options)
    found = json.loads(outcome.out)
    assert found == json.loads((tmp_path / "figures/metrics.json").read_text())
    assert (found["model"], found["data"]) == (str(model), str(tmp_path / "scenes.jsonl"))
    assert found["metrics"]["images"] == 3
    assert "3/3 images, eta 0 s" in outcome.err
    assert not (tmp_path / "out2").exists()


def test_the_section_by_which_a_checkpoint_answers(
    tmp_path: Path, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import coordexp.rollouts as rollouts

    seen = []

    def build_backend(rollout: object, *_: object) -> None:
        seen.append(rollout)
        raise SystemExit(0)

    monkeypatch.setattr(rollouts, "build_backend", build_backend)
    cli("evaluate", write_run(tmp_path, 1, model, rollout_matching=None))
    assert [rollout.rollout_backend for rollout in seen] == ["hf"]
    pushes = {"tuner__train_type": "lora", "tuner__train_coord_rows": False} | {
        f"rollout_matching__vllm__{key}": value for key, value in (("enable_lora", True), ("sync__mode", "adapter"))
    }
    cli("evaluate", write_run(tmp_path, 1, model, **pushes))
    assert seen[1].vllm.sync.mode == "full"  # the evaluated model has its adapters merged


# data


def test_convert_options_reach_the_converter(tmp_path: Path, cli: Cli) -> None:
    difficult = folders.voc_object("cat", 1, 1, 20, 20, extra="<difficult>1</difficult>")
    root = folders.voc(tmp_path / "voc", difficult + folders.voc_object("dog", 1, 1, 20, 20))
    options = ["--skip-difficult", "--factor", 8, "--min-pixels", 64, "--max-pixels", 256, "--name", "train"]
    outcome = cli("data", "convert", "voc", root, "--out", tmp_path / "out", *options)
    (record,) = read_jsonl(tmp_path / "out/train.jsonl", check_images=True)
    assert outcome.code == 0 and [obj.desc for obj in record.objects] == ["dog"] and "objects written" in outcome.out
    assert record.width % 8 == record.height % 8 == 0 and record.width * record.height <= 256


def test_scenes_and_check(tmp_path: Path, cli: Cli) -> None:
    made = cli("data", "scenes", "--out", tmp_path, "--count", 5, "--spec", "dense", "--seed", 7)
    assert made.code == 0 and "5 images" in made.out
    records = read_jsonl(tmp_path / "scenes.jsonl")
    checked = unwrapped(cli("data", "check", tmp_path / "scenes.jsonl").out)
    assert "5 of them valid records" in checked
    assert f"{sum(len(record.objects) for record in records)} objects in 5 images" in checked
    desc = records[0].objects[0].desc
    count = sum(obj.desc == desc for record in records for obj in record.objects)
    assert f"{desc} {count} " in checked


@pytest.mark.parametrize(
    ("limit", "part"), [((), ""), (("--limit", 3), ""), (("--limit", 2), "the first 2 records of ")]
)
def test_the_verdict_is_about_what_was_checked(limit: tuple[object, ...], part: str, tmp_path: Path, cli: Cli) -> None:
    cli("data", "scenes", "--out", tmp_path, "--count", 2, "--seed", 7)
    assert f"sound: training accepts {part}{tmp_path}" in cli("data", "check", tmp_path / "scenes.jsonl", *limit).out


def test_scenes_replace_others_only_on_request(tmp_path: Path, cli: Cli) -> None:
    cli("data", "scenes", "--out", tmp_path, "--count", 2, "--seed", 7)
    files = [tmp_path / "scenes.jsonl", *sorted((tmp_path / "images").iterdir())]
    before = [path.read_bytes() for path in files]
    refused = cli("data", "scenes", "--out", tmp_path, "--count", 3, "--seed", 8)
    assert refused.code == 2 and "scenes.jsonl: exists already" in unwrapped(refused.err)
    assert [path.read_bytes() for path in files] == before
    assert cli("data", "scenes", "--out", tmp_path, "--count", 3, "--seed", 8, "--overwrite").code == 0
    assert len(read_jsonl(tmp_path / "scenes.jsonl", check_images=True)) == 3


def test_check_reports_all_errors_at_once(tmp_path: Path, cli: Cli) -> None:
    cli("data", "scenes", "--out", tmp_path, "--count", 3)
    jsonl = tmp_path / "scenes.jsonl"
    jsonl.write_text(jsonl.read_text() + "{broken\n")
    (tmp_path / "images/000001.png").unlink()
    outcome = cli("data", "check", jsonl)
    assert outcome.code == 2 and "2 findings" in unwrapped(outcome.err)
    assert "scenes.jsonl:2" in outcome.out and "scenes.jsonl:4" in outcome.out


# model


def test_an_expanded_checkpoint_trains(tmp_path: Path, cli: Cli) -> None:
    plain = small_checkpoint(tmp_path / "plain", coord_tokens=False)
    assert cli("model", "expand-vocab", plain, tmp_path / "expanded").code == 0
    assert cli("train", write_run(tmp_path, 2, tmp_path / "expanded")).code == 0


def test_demo_is_given_its_folder(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import coordexp.cli.demo

    calls = []
    monkeypatch.setattr(coordexp.cli.demo, "run_demo", lambda output, console: calls.append((output, console)))
    monkeypatch.setenv("RANK", "1")  # of an earlier job
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli("demo", "--out", tmp_path / "demo").code == 0
    assert cli("demo").code == 0
    assert [output for output, _ in calls] == [tmp_path / "demo", Path("outputs/demo")]
    assert all(isinstance(console, Console) and not console.quiet for _, console in calls)
