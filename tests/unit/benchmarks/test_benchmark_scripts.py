"""Each benchmark runs at a tiny size and writes the figures it promises. Nothing here is timed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.cli_runs import small_checkpoint

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
Run = Callable[..., Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark as ``python benchmarks/NAME.py`` would; gives torch its threads back."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def run(script: Callable[[str], ModuleType], tmp_path: Path) -> Run:
    """``run("packing", "--trials", 1)`` → the ``results`` of its JSON, whose frame is checked here."""

    def run_script(name: str, *flags: object) -> Any:
        script(name).main([str(word) for word in (*flags, "--threads", 1, "--json", tmp_path)])
        document = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert (document["schema_version"], document["benchmark"], document["complete"]) == (1, name, True)
        assert document["settings"]["threads"] == 1
        where = document["machine"]
        assert where["cpu"] and where["cores"] >= 1 and where["date"].startswith("20")
        assert where["packages"]["torch"] and where["packages"]["coordexp"]
        return document["results"]

    return run_script


def test_dealing_finds_no_case_in_which_the_plan_is_slower_or_over_the_cap(run: Run) -> None:
    rows = run("dealing", "--ranks", 3, "--servers", 3)
    assert [row["ranks"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["cases"] > 1000 and row["planned_more_waves"] == 0 and row["planned_over"] == 1
        assert row["alone_more_waves"] > 0 and row["alone_over"] > 1


def test_cli_times_commands_that_need_no_model(run: Run) -> None:
    rows = run("cli", "--repeats", 1)
    assert {row["kind"] for row in rows} == {"start-up", "mistake", "reads"}
    for row in rows:
        assert row["code"] == (2 if row["kind"] == "mistake" else 0), row
        assert row["torch"] is False, row
        assert row["wall_s"] > 0 and row["cpu_s"] > 0


def test_rollouts_counts_the_same_answers_for_each_batch(run: Run, tmp_path: Path) -> None:
    model = small_checkpoint(tmp_path / "model")
    rows = run("rollouts", "--backends", "hf", "--batches", "1,2", "--objects", 1, "--model", model, "--check")
    assert [(row["backend"], row["batch"], row["equal_to_first"]) for row in rows] == [("hf", 1, 1), ("hf", 2, 2)]
    assert all(row["tokens"] > 0 and row["tokens_per_s"] > 0 for row in rows)


def test_rollouts_leaves_each_finished_cell_behind(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Ended in the middle, as by a time limit, it has shown and written what it knew."""
    rollouts = script("rollouts")
    measure = rollouts._Bench.measure

    def ended_at_batch_2(self: Any, name: str, batch: int) -> dict[str, Any]:
        if batch == 2:
            raise KeyboardInterrupt
        return measure(self, name, batch)

    monkeypatch.setattr(rollouts._Bench, "measure", ended_at_batch_2)
    flags = ["--backends", "hf", "--batches", "1,2", "--objects", "1", "--threads", "1", "--json"]
    with pytest.raises(KeyboardInterrupt):
        rollouts.main([*flags, str(tmp_path / "x.json"), "--model", str(small_checkpoint(tmp_path / "model"))])
    document = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert document["complete"] is False and [row["batch"] for row in document["results"]] == [1]
    assert "1/2  hf, batch 1:" in capsys.readouterr().out


def test_channels_measures_each_case_by_itself(run: Run, tmp_path: Path) -> None:
    model = small_checkpoint(tmp_path / "model")
    sizes = ("--steps", 1, "--warmup", 1, "--batch", 2, "--max-new-tokens", 12, "--model", model)
    plain = run("channels", *sizes, "--only", "A, 2")
    assert list(plain) == ["A, 2 forwards"]
    assert plain["A, 2 forwards"]["new_tokens"] == 0 and plain["A, 2 forwards"]["rollout_s"] == 0
    rollouts = run("channels", *sizes, "--only", "B, hf")["B, hf"]
    # Random weights never end an answer: 2 samples of 12 tokens.
    assert rollouts["new_tokens"] == 24 and rollouts["rollout_s"] > 0 and rollouts["step_s"] > rollouts["learner_s"] > 0


def test_repeat_guard_measures_its_share_and_what_it_saves(run: Run) -> None:
    figures = run("repeat_guard", "--batch", 2, "--tokens", 8, "--saved-tokens", 300)
    assert set(figures["alone"]) == {"runs and n-grams", "and object keys"}
    cost, saved = figures["cost"], figures["saved"]
    assert cost["tokens"] == 16 and 0 < cost["guard_s"] < cost["decode_s"]
    assert cost["share"] == pytest.approx(cost["guard_s"] / cost["decode_s"])
    # The repeating model is ended once the default limits allow it, at 256 tokens.
    assert saved["tokens_free"] == 600 and saved["sequences_ended"] == saved["sequences"] == 2
    assert saved["tokens_guarded"] == 512


def test_step_splits_a_step_into_stages_that_add_up(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_checkpoint(tmp_path / "model")
    sizes = ("--steps", 2, "--warmup", 1, "--batch", 2, "--max-new-tokens", 12)
    results = run("step", *sizes, "--model", model)
    stages = results["stages"]
    assert list(stages) == ["data", "rollout", "targets", "packing", "learner", "optimizer", "other"]
    for name, stage in stages.items():
        assert stage["seconds"] > 0, name
        assert stage["samples_per_s"] > 0 and stage["ms_per_sample"] > 0, name
    assert sum(stage["share"] for stage in stages.values()) == pytest.approx(1)
    # Random weights never end an answer: 2 samples of 12 tokens.
    assert stages["rollout"]["tokens"] == 24 and results["truncated_share"] == 1
    assert stages["rollout"]["tokens_per_s"] > 0
    assert stages["learner"]["tokens"] > 24 and stages["learner"]["tokens_per_s"] > 0
    assert results["step_s"] > 0 and results["samples_per_s"] > 0 and results["steps"] == 2
    assert str(model) in capsys.readouterr().out.replace("\n", "")


def test_step_names_the_checkpoint_it_falls_back_to(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordexp.assets._PACKAGED", tmp_path)
    monkeypatch.setattr("coordexp.assets._SOURCE_TREE", tmp_path)
    model, origin = script("step").checkpoint_or_tiny(None, tmp_path)
    assert (model / "config.json").is_file() and "random weights" in origin


def test_targets_measures_every_stage_for_every_size(run: Run) -> None:
    results = run("targets", "--objects", "4,12", "--repeats", 1)
    assert "tiny" in results and set(results) <= {"tiny", "qwen", "tiny_published", "qwen_published"}
    assert [(row["published_ms"], row["ours_ms"] > 0) for row in results["tiny_published"]] == [
        (31.0, True), (14.0, True), (6.0, True),
    ]  # fmt: skip
    for rows in (rows for name, rows in results.items() if not name.endswith("published")):
        assert [row["objects"] for row in rows] == [4, 12]
        assert rows[0]["tokens"] < rows[1]["tokens"]
        for row in rows:
            assert 0 < row["matched"] <= row["objects"]
            parts = [row["parse_ms"], row["match_ms"], row["build_ms"]]
            assert row["cold_ms"] > 0
            assert min(parts) > 0 and sum(parts) == pytest.approx(row["total_ms"])
            assert row["samples_per_s"] == pytest.approx(1000 / row["total_ms"])


def test_targets_says_what_the_qwen_column_lacks(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "dashscope" else find_spec(name))
    assert list(run("targets", "--objects", 3, "--repeats", 1, "--no-published")) == ["tiny"]
    assert "Qwen tokenizer left out: dashscope missing" in capsys.readouterr().out


def test_packing_compares_three_selectors(run: Run) -> None:
    results = run("packing", "--segments", "8,24", "--capacity", 512, "--trials", 3, "--stream-steps", 12)
    assert [pool["segments"] for pool in results["pool"]] == [8, 24]
    assert [case["steps"] for case in results["stream"]] == [12]
    for case in (*results["pool"], *results["stream"]):
        assert list(case["selectors"]) == ["select_segments", "oldest-first", "binpacking"]
        for found in case["selectors"].values():
            assert 0 < found["fill"] <= 1 and found["ms"] > 0
        ours, ratios = case["selectors"]["select_segments"], case["ratios"]
        for name in ("oldest-first", "binpacking"):
            assert ratios[name]["fill"] == pytest.approx(ours["fill"] / case["selectors"][name]["fill"])
            assert ratios[name]["time"] > 0
    # One choice at a time, the exact search is never emptier than the greedy one.
    assert all(pool["ratios"]["oldest-first"]["fill"] >= 1 for pool in results["pool"])
    assert all(found["max_wait"] >= 1 for found in results["stream"][0]["selectors"].values())


def test_attention_compares_every_way_that_runs_here_to_the_same_numbers(run: Run) -> None:
    results = run("attention", "--segments", "1,3", "--segment-length", 16, "--repeats", 1)
    packed = [row for row in results if row["implementation"] == "packed"]
    assert [(row["segments"], row["tokens"], row["work_ratio"]) for row in packed] == [(1, 16, 1.0), (3, 48, 3.0)]
    for row in results:
        assert row["max_difference"] < 1e-4, "packed attention and the block mask must agree"
        assert row["packed_ms"] > 0 and row["sdpa_ms"] > 0
        assert row["speedup"] == pytest.approx(row["sdpa_ms"] / row["packed_ms"])


def test_learner_compares_three_forms_of_one_loss(run: Run) -> None:
    sizes = ("--vocabulary", 3000, "--hidden", "16,24", "--positions", 30, "--samples", 5, "--lengths", "30,60")
    results = run("learner", *sizes, "--capacity", 150, "--batch", 2, "--repeats", 1, "--full-row", 600)
    assert [row["hidden"] for row in results["objective"]] == [16, 24]
    for row in results["objective"]:
        forms = row["forms"]
        assert list(forms) == ["chunked", "naive", "head_alone", "naive_from_logits"]
        assert forms["chunked"]["value"] == pytest.approx(forms["naive"]["value"], rel=1e-4)
        assert row["speedup_with_head"] == pytest.approx(forms["naive"]["seconds"] / forms["chunked"]["seconds"])
    training = results["training"]
    assert list(training["forms"]) == ["ours", "padded", "full"]
    losses = [form["value"] for form in training["forms"].values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4), "three forms, one loss"
    assert 0 < training["padding_share"] < 1 and 0 < training["fill"] <= 1 and training["samples"] == 5
    assert 0 < training["scored_positions"] < training["tokens"]
    for name, form in training["forms"].items():
        assert form["tokens_per_s"] == pytest.approx(training["tokens"] / form["seconds"])
        assert training["speedup"][name] > 0
    assert 0.9 < results["packing"]["fill"] <= 1 and results["packing"]["ms"] > 0
    assert list(results["rows"]) == ["trained", "played"]
    for rows in results["rows"].values():
        assert rows["rows"] >= 2 and rows["row_mb"] > 0
        assert 0 < rows["in_turn_share"] < 1 and 0 < rows["ahead_share"] < 1
        assert rows["speedup"] == pytest.approx(rows["in_turn_s"] / rows["ahead_s"])


def test_json_goes_to_a_file_where_one_is_named(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    script("reporting").write_json(tmp_path / "new" / "figures.json", "packing", {}, {}, [1])
    assert json.loads((tmp_path / "new" / "figures.json").read_text(encoding="utf-8"))["results"] == [1]


@pytest.mark.parametrize("name", ["step", "targets", "packing", "attention", "learner"])
def test_help_explains_the_question(
    script: Callable[[str], ModuleType], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        script(name).main(["--help"])
    assert exit_.value.code == 0
    told = capsys.readouterr().out
    assert "?" in told and "--json" in told and "--threads" in told


def test_every_script_is_in_the_readme() -> None:
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for path in BENCHMARKS.glob("*.py"):
        assert f"`{path.name}`" in readme


def test_toolkit_measures_conversion_evaluation_and_viewer(run: Run) -> None:
    results = run("toolkit", "--images", 2, "--answers", 6, "--objects", 4, "--records", 3, "--resamples", 2)
    rows = [name.split()[0] for name in results if not name.startswith("faster-coco-eval")]
    assert rows == ["convert", "pycocotools:", "coordexp:", "evaluate", "compare", "viewer"]
    by_name = {name.split()[0].rstrip(":"): row for name, row in results.items()}
    assert {name for name, row in by_name.items() if "cpu_ratios" in row} == {"coordexp", "evaluate"}
    for ours in ("coordexp", "evaluate"):
        ratios = by_name[ours]["cpu_ratios"]
        assert "pycocotools" in ratios  # faster-coco-eval too, where it is installed
        for peer, ratio in ratios.items():
            assert ratio == pytest.approx(by_name[ours]["cpu_seconds"] / by_name[peer]["cpu_seconds"])
    assert all(row["seconds"] > 0 and row["rate"] > 0 for row in results.values())


def test_saving_measures_a_save_and_a_resume_with_and_without_the_seal(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    results = run("saving", "--mib", 1, "--rounds", 2, "--folder", disk)
    assert {len(seconds) for seconds in results["seconds"].values()} == {2}
    assert results["added"].keys() == {"sealed save", "compared resume"} and not list(disk.iterdir())


def test_data_start_opens_the_same_set_in_every_way(run: Run, tmp_path: Path) -> None:
    rows = run("data_start", "--records", "30", "--folder", tmp_path)
    assert [row["how"] for row in rows] == ["cold", "warm", "plain", "datasets cold", "datasets warm"]
    assert {row["records"] for row in rows} == {30}
    assert all(row["wall_s"] > 0 and row["cpu_s"] > 0 for row in rows)


def test_peers_train_on_the_same_prompts_and_a_broken_one_says_why(
    run: Run, script: Callable[[str], ModuleType]
) -> None:
    rows = run("peers", "--only", "trl-sft", "--steps", 1, "--warmup", 1, "--images", 2)
    assert rows["trl-sft"]["cpu_seconds"] > 0 and rows["trl-sft"]["images"] == 2, rows
    rows = run("peers", "--only", "coordexp-sft", "--steps", 1, "--warmup", 1, "--images", 2, "--deadline", 1)
    assert rows == {"coordexp-sft": {"why": "not done after 1 s"}}
    peers = script("peers")
    with pytest.raises(SystemExit, match="the peer asks with"):
        peers.check_prompt([1, 2, 4], (1, 2, 3))
    table = {
        "coordexp-sft": {"cpu_seconds": 2.0},
        "swift-sft": {"cpu_seconds": 3.0},
        "trl-grpo-4": {"cpu_seconds": 1.0},
    }
    peers.add_ratios(table)
    assert table["swift-sft"]["ratio"] == 1.5 and "ratio" not in table["trl-grpo-4"]


def test_scale_counts_a_push_for_every_server_and_never_a_step_below_its_longest_answer(run: Run) -> None:
    rows = run("scale", "--parameters", 1e9)
    assert rows["64"]["push_gb"] == 5 * 2 and rows["512"]["push_gb"] == 48 * 2
    for row in rows.values():
        assert row["decode_s"] >= 500 / 120 and row["step_s"] >= row["ahead_s"] >= row["decode_s"]
    slow = run("scale", "--gpu-speed", 100)["512"]
    assert slow["decode_s"] == pytest.approx(4096 * 500 / (384 * 100))
