"""Each benchmark runs at a tiny size and writes its figures. Times are not checked, equalities are."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordexp.data.jsonl import write_jsonl
from coordexp.evaluation.answers import ImageAnswer, read_answers, write_answers
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import small_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Run = Callable[..., Any]
STEPS = "--steps 1 --warmup 1 --batch 2 --max-new-tokens 12 --model MODEL"
# Flags; MODEL is a small checkpoint, FOLDER an empty folder. Not here: scripts that start servers.
TINY = {
    "attention": "--segments 1,3 --segment-length 16 --cache 24 --new 1,3 --batch 2 --repeats 1",
    "channels": f"{STEPS} --only A,",
    "cli": "--repeats 1",
    "data_start": "--records 30 --folder FOLDER",
    "dealing": "--ranks 3 --servers 3",
    "decode_transformers": "--images 2 --batches 1,2 --answers 2 --rounds 1",
    "draft_steps": "--answers 2 --objects 2 --rounds 2",
    "trainer": "--vocabulary 3000 --hidden 16 --positions 30 --samples 5 --lengths 30,60 --capacity 150 --batch 2 "
    "--repeats 1 --full-row 600",
    "packing": "--segments 8,24 --capacity 512 --trials 3 --stream-steps 12",
    "peers": "--only coordexp-sft --steps 1 --warmup 1 --images 2",
    "photos": "--side 256 --repeats 1",
    "repeat_guard": "--batch 2 --tokens 8 --saved-tokens 300",
    "rollouts": "--backends hf --batches 1,2 --objects 1 --model MODEL --check",
    "saving": "--mib 1 --rounds 2 --folder FOLDER",
    "scale": "--parameters 1e9",
    "step": STEPS,
    "targets": "--objects 4,12 --repeats 1 --no-published",
    "toolkit": "--images 2 --answers 6 --objects 4 --records 3 --resamples 2",
}

BY_HAND = ("fixed_boxes", "full_size", "gpu", "gpu_engine", "gpu_material", "gpu_profile", "gpu_run", "wide_checkpoint")
ENGINE = "--kind plain --model model --scenes scenes.jsonl --folder engine"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """``run("packing")`` → the results in its JSON; gives torch its threads back."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run_script(name: str) -> Any:
        words = TINY[name].split()
        if "MODEL" in words:
            words[words.index("MODEL")] = str(small_checkpoint(tmp_path / "model"))
        if "FOLDER" in words:
            (tmp_path / "folder").mkdir()
            words[words.index("FOLDER")] = str(tmp_path / "folder")
        importlib.import_module(name).main([*words, "--threads", "1", "--json", str(tmp_path)])
        document = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert (document["benchmark"], document["complete"], document["settings"]["threads"]) == (name, True, 1)
        assert document["machine"]["cpu"] and document["machine"]["packages"]["torch"]
        return document["results"]

    yield run_script
    torch.set_num_threads(threads)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


@pytest.mark.parametrize("name", TINY)
def test_benchmark_runs_and_writes_figures(name: str, run: Run) -> None:
    results = run(name)
    assert results and all(math.isfinite(number) for number in numbers(results))
    if name == "attention":
        assert all(row["max_difference"] < 1e-4 for row in results["packed"])
        assert all(row["max_difference_float32"] == 0.0 for row in results["cached"])
    if name == "dealing":
        assert all(row["planned_more_waves"] == 0 and row["planned_over"] == 1 for row in results)
    if name == "decode_transformers":
        assert [(row["equal"], row["answers"]) for row in results] == [(2, 2)] * 4 + [(4, 4)] * 2
    if name == "trainer":
        for forms in (row["forms"] for row in results["objective"]):
            assert forms["chunked"]["value"] == pytest.approx(forms["naive"]["value"], rel=1e-4)
        losses = [form["value"] for form in results["training"]["forms"].values()]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-4), "three forms, one loss"
    if name == "packing":
        assert all(pool["ratios"]["oldest-first"]["fill"] >= 1 for pool in results["pool"])
    if name == "photos":
        assert results["numbers"]["mb"] == 8 * results["bytes"]["mb"]
    if name == "rollouts":
        assert [(row["batch"], row["equal_to_first"]) for row in results] == [(1, 1), (2, 2)]
    if name == "scale":
        assert all(row["skipping_step_s"] < row["step_s"] for row in results.values())
    if name == "step":
        assert sum(stage["share"] for stage in results["stages"].values()) == pytest.approx(1)


def scripts() -> list[str]:
    """Names of the scripts that have a ``main``, without their modules."""
    found = []
    for path in sorted(BENCHMARKS.glob("*.py")):
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(one, ast.FunctionDef) and one.name == "main" for one in statements):
            found.append(path.stem)
    return found


def test_make_bench_runs_every_script_but_those_run_by_hand_and_no_module() -> None:
    command = ["make", "--dry-run", "bench"]
    shown = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True).stdout
    listed = [Path(word).stem for word in shown.split("for script in ")[1].split(";")[0].split()]
    assert {"step", "decode", "weight_push"} < set(listed) and "reporting" not in listed
    assert sorted(listed) == [name for name in scripts() if name not in BY_HAND]


def test_scale_takes_answers_and_passes_from_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    measured = {"objects": "10", "batch": 8, "answers": 8, "boxes": 80, "tokens": 2400, "passes_per_box": 7.5}
    rows = [{**measured, "form": "decoded", "passes_per_box": 30.0}, {**measured, "form": "skipped"}]
    (tmp_path / "decode.json").write_text(json.dumps({"results": rows}))
    words = ["--decoded", str(tmp_path / "decode.json"), "--sequence-speed", "100", "--json", str(tmp_path)]
    importlib.import_module("scale").main(words)
    results = json.loads((tmp_path / "scale.json").read_text())["results"]
    row = results["8 GPUs, 10 objects"]
    assert (row["answer_tokens"], row["decode_s"]) == (300, pytest.approx(3.0))
    assert row["skipping_decode_s"] == pytest.approx(3.0 * 7.5 / 30)
    assert results["8"]["answer_tokens"] == 500, "the first table keeps its assumption"


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("scale", "--flops -1", "argument --flops: -1 is no finite number above 0"),
        ("scale", "--decoded other.json", "--decoded other.json has no answers with skipped tokens"),
        ("scale", "--decoded cut.json", "--decoded cut.json: not a result of decode.py --objects"),
        ("photos", "--side 33", "--side 33 is not a multiple of 32"),
        ("channels", "--only ZZ", "--only 'ZZ': no case begins with it; there are ['A, 1 forward'"),
        ("peers", "--warmup -1", "argument --warmup: -1 is less than 0"),
        ("gpu_engine", f"{ENGINE} --batches 4,1 --images 8", "--images: [8] are not as many numbers as --batches"),
    ],
)
def test_an_option_that_would_measure_nothing_or_something_else_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    words: str,
    message: str,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"results": [{"ranks": 1}]}')
    Path("cut.json").write_text('{"results": [')
    with pytest.raises(SystemExit):
        importlib.import_module(script).main(words.split())
    assert message in capsys.readouterr().err


def test_a_benchmark_of_two_processes_needs_two_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SystemExit):
        importlib.import_module("rollouts_ahead").main([])
    assert "server and trainer take a core each, and this process may use one" in capsys.readouterr().err


@pytest.mark.parametrize(("warmup", "steps", "figures"), [(0, 2, (3.5, 2.0)), (1, 1, (2.0, 1.0))])
def test_peers_count_the_steps_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: int, steps: int, figures: tuple[float, float]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("peers")
    (tmp_path / "trl-sft.json").write_text(json.dumps([[10.0, 0.0], [20.0, 6.0], [24.0, 8.0]]))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    found = peers.measure("trl-sft", tmp_path, Namespace(warmup=warmup, steps=steps, images=2, deadline=1), 1)
    assert (found["seconds"], found["cpu_seconds"]) == figures
    marks, stopwatch = peers.clock()
    watched = stopwatch()
    watched.on_train_begin()
    watched.on_step_end()
    assert len(marks) == 2, "the first step has a beginning"


def test_a_peer_without_coordexp_in_the_run_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    alone = {"trl-sft": {"seconds": 2.0, "cpu_seconds": 1.5, "images": 8}}
    shown = importlib.import_module("peers").table(alone)
    assert list(shown.columns[-1].cells) == ["-"]
    row = {"what": "TRL", "rounds": [{"cpu_s": 1.5, "peak_gb": 2.0, "losses": [], "answer_tokens": []}]}
    results = {"trl-sft lora": row}
    width = importlib.import_module("peers_width")
    width.summarise(results)
    cells = [next(iter(column.cells)) for column in width.table("alone", results).columns]
    assert cells[1:7] == ["1.50", "-", "1.50", "-", "2.00", "-"]


def test_two_rounds_have_the_mean_of_both_as_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("decode_transformers")
    clock = iter([0.0, 2.0, 0.0, 1.0, 0.0, 4.0, 0.0, 3.0])  # every, skipping, every, skipping
    monkeypatch.setattr(script.time, "process_time", lambda: next(clock))
    language_model = SimpleNamespace(forward=None)
    loaded = SimpleNamespace(model=SimpleNamespace(model=SimpleNamespace(language_model=language_model)), vocab=None)
    every, skipping = script.compared(loaded, {"every": list, "skipping": list}, 2)
    assert (every["cpu_s"], skipping["cpu_s"], skipping["ratio"]) == (3.0, 2.0, 1.5)


def test_fixed_boxes_are_the_commonest_places_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    left, near, right = (100, 100, 300, 300), (110, 100, 310, 300), (600, 600, 900, 900)
    places = [("cat", left), ("cat", near), ("cat", left), ("dog", right), ("dog", right), ("cat", right)]
    objects = [GTObject(name, "bbox_2d", box) for name, box in places]
    records = [ImageRecord(f"t:{k}", tmp_path / "a.png", 10, 10, (obj,)) for k, obj in enumerate(objects)]
    write_jsonl(records, tmp_path / "train.jsonl")
    seen = [ImageAnswer(f"v:{k}", "a.png", 10, 10, (obj,), (), valid=7) for k, obj in enumerate(objects[:5])]
    write_answers(seen, tmp_path / "model.jsonl")
    paths = [str(tmp_path / name) for name in ("train.jsonl", "model.jsonl")]
    importlib.import_module("fixed_boxes").main([*paths, "--out", str(tmp_path / "out" / "fixed.jsonl")])
    answers = read_answers(tmp_path / "out" / "fixed.jsonl")
    assert [answer.sample_id for answer in answers] == [answer.sample_id for answer in seen]
    (cat, dog) = answers[0].pred
    assert (cat.desc, dog.desc, dog.bins) == ("cat", "dog", right) and 100 <= cat.bins[0] <= 110
    assert (cat.score, dog.score) == (3 / 6, 2 / 6) and all(answer.pred == (cat, dog) for answer in answers)
    assert {answer.num_valid for answer in answers} == {2}, "of the boxes, not of the model"


def test_decode_runs_without_a_pythonpath(tmp_path: Path) -> None:
    model, figures = small_checkpoint(tmp_path / "model"), tmp_path / "decode.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [
        sys.executable,
        str(BENCHMARKS / "decode.py"),
        "--no-engine",
        "--model",
        str(model),
        "--json",
        str(figures),
    ]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    rows = json.loads(figures.read_text())["results"]
    counted = [row for row in rows if "tokenizer" in row]
    assert {row["tokenizer"] for row in counted} == {"demo", "Qwen"}
    assert all(row["passes_per_box"] < row["tokens_per_box"] for row in counted)
    assert {row["batch"] for row in rows if "on_paper" in row} == {1, 8, 64}


def test_roofline_is_bound_by_memory_at_batch_1_and_by_arithmetic_for_long_drafts() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    roofline = importlib.import_module("decode").roofline
    counted = {"tokenizer": "Qwen", "objects": 10, "names": "different", "tokens_per_box": 30.0, "passes_per_box": 6.0}
    short = {row["batch"]: row for row in roofline([{**counted, "drafted_per_pass": 5.0}])}
    assert short[1]["times"] == pytest.approx(30 / 6), "a step costs the same, and there are fewer"
    assert short[1]["decoded_step_ms"] == pytest.approx(1e3 * 2 * 1.72e9 / 3.35e12, rel=0.1), "weights of 2B once"
    long = {row["batch"]: row for row in roofline([{**counted, "drafted_per_pass": 300.0}])}
    assert long[64]["skipped_step_ms"] > 10 * long[64]["decoded_step_ms"] and long[64]["times"] < 1


def test_peers_at_width_train_on_the_same_samples_packed_and_one_by_one(run: Run, tmp_path: Path) -> None:
    from coordexp.data.scenes import MODERATE, write_scenes

    width, variant = importlib.import_module("peers_width"), importlib.import_module("peers_variant")
    small_checkpoint(tmp_path / "checkpoint")
    work = width.write_samples(tmp_path, write_scenes(tmp_path / "scenes", 2, MODERATE, seed=1), 2)
    flags = ArgumentParser()
    width.add_flags(flags)
    options = flags.parse_args([], Namespace(images=2, warmup=0, steps=1))
    losses = []
    for name in ("coordexp-sft", "coordexp-sft-one"):
        found = variant.coordexp(width.specification(name, "full", tmp_path, work, options))
        assert len(found["marks"]) == 2 and found["peak_gb"] > 0
        losses += found["losses"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and len(losses) == 2


def test_peers_at_width_refuse_another_prompt(run: Run) -> None:
    import torch

    check = importlib.import_module("peers_variant").check_rows({"sequences": [([5, 6, 7], 2)]})
    batch = {"input_ids": [[5, 6, 7, 0]], "attention_mask": [[1, 1, 1, 0]], "labels": [[-100, 6, 7, -100]]}
    check({key: torch.tensor(value) for key, value in batch.items()})
    batch["input_ids"][0][0] = 4
    with pytest.raises(SystemExit, match="3 tokens"):
        check({key: torch.tensor(value) for key, value in batch.items()})


def test_peers_at_width_train_on_the_objects_of_their_photographs(tmp_path: Path, run: Run) -> None:
    """Blank lines of the dataset do not move objects to other photographs."""
    from coordexp.coords import serialize_objects
    from coordexp.data.jsonl import order_objects, read_jsonl
    from coordexp.data.scenes import MODERATE, write_scenes

    small_checkpoint(tmp_path / "checkpoint")
    scenes = write_scenes(tmp_path / "scenes", 3, MODERATE, seed=1)
    scenes.write_text("\n" + scenes.read_text())
    importlib.import_module("peers_width").write_samples(tmp_path, scenes, 2)
    lines = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    for record, line in zip(read_jsonl(tmp_path / "photos.jsonl"), lines, strict=True):
        assert [str(record.image)] == line["images"]
        assert serialize_objects(order_objects(record.objects, "sorted")) == line["messages"][1]["content"]
