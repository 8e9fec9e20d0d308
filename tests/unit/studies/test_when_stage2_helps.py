"""The study's tables from counts, and its declared arms."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from coordexp.config import load_config
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.records import GTObject

STUDY = Path(__file__).parents[3] / "studies" / "when_stage2_helps"
DECLARED = yaml.safe_load((STUDY / "arms.yaml").read_text())


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STUDY.parents[1] / "benchmarks"))
    monkeypatch.syspath_prepend(str(STUDY))
    import study

    yield study
    for name in ("study", "tables", "stopping", "picture"):
        sys.modules.pop(name, None)


def answer(pred: list[GTObject], gt: list[GTObject]) -> ImageAnswer:
    return ImageAnswer(
        sample_id="x", image="x.png", width=128, height=128, gt=tuple(gt),
        pred=tuple(Detection(obj.desc, obj.kind, obj.bins, None) for obj in pred),
        dropped={}, truncated=False, repeat_terminated=False, text="", num_tokens=5,
    )  # fmt: skip


CAT = GTObject("cat", "bbox_2d", (100, 100, 300, 300))
DOG = GTObject("dog", "bbox_2d", (500, 500, 800, 800))


def test_counts_become_the_figures_that_they_stand_for(study: ModuleType) -> None:
    from tables import figures

    wide = GTObject("cat", "bbox_2d", (100, 100, 300, 350))  # IoU 0.8
    owl = GTObject("owl", "bbox_2d", DOG.bins)  # found, wrong name
    counts = study.counts([answer([wide, wide, owl], [CAT, DOG])])
    found = figures([counts["as_answered"]])
    assert found["F1@.5"] == pytest.approx(2 * 1 / (3 + 2))
    assert found["F1@.9"] == 0 and found["F1@.7"] == found["F1@.5"]
    assert (found["recall"], found["located"], found["name right"]) == (0.5, 1.0, 0.5)
    assert found["duplicates"] == pytest.approx(1 / 3) and found["objects"] == 3
    clean = figures([counts["without_duplicates"]])
    assert clean["F1@.5"] == pytest.approx(2 * 1 / (2 + 2)) and clean["duplicates"] == 0


def test_differences_are_paired(study: ModuleType) -> None:
    from tables import difference

    rng = np.random.default_rng(1)
    counts = [[[3, 3, int(m), 0, 0, 0, 0, 0, 0, 0] for m in rng.integers(0, 4, 60)] for _ in range(2)]
    better = [[[row[0], row[1], min(3, row[2] + 1), *row[3:]] for row in one] for one in counts]
    assert difference(counts, counts) == (0, 0, 0)
    gain, low, high = difference(better, counts)
    assert 0 < low < gain < high < 0.5
    assert difference(counts, better)[0] == -gain


def test_a_table_lists_every_arm_and_says_what_is_missing(study: ModuleType) -> None:
    from tables import markdown

    counts = study.counts([answer([CAT], [CAT, DOG]), answer([], [])])
    lines = [{"arm": arm, "seed": 0, "train_cpu_s": 3.0, "counts": counts} for arm in ("sft", "mine")]
    rows = markdown(lines, "sft").splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["sft", "mine"]
    assert "+0.000 [+0.000, +0.000]" in rows[3]
    scored = markdown([*lines, {**lines[0], "seed": 1, "AP": 0.25}], "mine").splitlines()
    assert "| 0.250 (1) |" in scored[2] and "0.250" not in scored[3], "the average precision of one seed of two"
    with pytest.raises(SystemExit, match="no results of 'best'"):
        markdown(lines, "best")


@pytest.mark.parametrize("regime", sorted(DECLARED["arms"]))
def test_declared_arms_can_be_run(regime: str, study: ModuleType) -> None:
    known = {"config", "steps", "lr", "set", "complete", "stop", "keep", "of", "after", "prompts", "group"}
    known |= {"served", "rollouts_ahead", "variant", "decode"}
    paths = {"custom.train_jsonl": "x.jsonl", "model.model": "x", "training.output_dir": "x"}
    start = DECLARED["regimes"][regime]["start"]
    assert {start[key] for key in ("of", "after") if key in start} <= set(DECLARED["regimes"])
    assert start.get("from", "random") == "random"
    for name, arm in DECLARED["arms"][regime].items():
        assert set(arm) <= known, name
        assert all("config" in DECLARED["arms"][regime][arm[key]] for key in ("of", "after") if key in arm), name
        load_config(STUDY / "configs" / "base.yaml", paths | {"training.max_steps": 1} | arm.get("decode", {}))
        if arm.get("config") == "grpo":
            assert set(arm) == {"config", "steps", "prompts", "group", "lr"}, name
        elif "config" in arm:
            numbers = {"training.max_steps": arm["steps"], "training.learning_rate": arm["lr"]}
            keys = paths | numbers | study.with_keys(DECLARED["regimes"][regime], arm)["set"]
            if arm.get("served"):
                keys |= {f"rollout_matching.{key}": value for key, value in study.answered_by_a_server(arm).items()}
            config = load_config(STUDY / "configs" / f"{arm['config']}.yaml", keys)  # an error names the keys
            assert config.training.max_steps == arm["steps"], name


def test_committed_results_are_of_declared_arms() -> None:
    for path in (STUDY / "results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            arms = DECLARED["arms"][path.stem] | DECLARED["removed"].get(path.stem, {})
            assert one["declared"] == arms[one["arm"]]
            assert len(one["counts"]["as_answered"]) == DECLARED["regimes"][path.stem]["images"][one["split"]]


def test_the_manuals_picture_and_its_first_table_are_of_the_committed_results(study: ModuleType) -> None:
    from picture import compare

    docs = STUDY.parents[1] / "docs"
    described = ElementTree.parse(docs / "images" / "when-it-helps.svg").find(
        ".//{http://purl.org/dc/elements/1.1/}description"
    )
    rows = [compare(entry, STUDY / "results") for entry in DECLARED["compared"]]
    assert described is not None and described.text is not None
    assert described.text.splitlines() == [str(row) for row in rows], "draw it anew: python study.py picture"

    page = (docs / "when-it-helps.md").read_text(encoding="utf-8")
    first_table = page.partition("## In short")[2].partition("\n## ")[0]
    told = [line for line in first_table.splitlines() if re.search(r"0\.\d{3}", line) and line.startswith("|")]
    assert len(told) == len(rows)
    for line, row in zip(told, rows, strict=True):
        start, control, ours, seeds = (cell.replace("**", "").strip() for cell in line.split("|")[-5:-1])
        assert (start, control.split(",")[0]) == (f"{row.start:.3f}", f"{row.control:.3f}"), line
        assert ours.startswith(f"{row.ours:.3f}"), line
        assert seeds == f"{row.seeds}" + ", validation" * (row.split == "val"), line


def test_a_picture_shows_each_row_and_needs_results_of_its_three_arms(study: ModuleType, tmp_path: Path) -> None:
    from picture import compare, draw

    counts = study.counts([answer([CAT], [CAT, DOG]), answer([DOG], [CAT, DOG])])
    lines = [
        {"arm": arm, "seed": seed, "split": split, "counts": counts}
        for arm, seed, split in (("start", 0, "test"), ("start", 1, "test"), ("sft", 1, "test"), ("mine", 0, "val"))
    ]
    results = tmp_path / "few.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"data": "few", "regime": "few", "split": "test", "control": "sft", "ours": "mine"}
    with pytest.raises(SystemExit, match="few: no seed of the test split has all three arms"):
        compare(entry, tmp_path)
    results.write_text(results.read_text() + json.dumps({**lines[2], "arm": "mine"}) + "\n")
    row = compare(entry, tmp_path)
    assert (row.seeds, row.start, row.control, row.ours, row.gain) == (1, 2 / 3, 2 / 3, 2 / 3, (0, 0, 0))
    draw([row], tmp_path / "picture.svg")
    assert str(row) in (tmp_path / "picture.svg").read_text()


# Columns of the pages' tables, as a result's figures are called.
COLUMNS = {name: name for name in (
    "F1@.5", "F1@.7", "F1@.9", "precision", "recall", "located", "name right", "IoU", "duplicates", "truncated",
    "objects", "AP", "CPU s",
)} | {
    "F1, repeats removed": "clean", "F1@.5, repeats removed": "clean", "AP (seeds)": "AP",
    "objects (truth 3.39)": "objects", "objects (truth 13.1)": "objects",
}  # fmt: skip


def committed_figures() -> Iterator[dict[str, str]]:
    """Of each arm of a regime and split, and of each choice of its seeds, the figures as a table prints them."""
    from tables import figures

    for path in sorted((STUDY / "results").glob("*.jsonl")):
        lines_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            lines_of.setdefault((line["arm"], line["split"]), []).append(line)
        for lines in lines_of.values():
            for count in range(1, len(lines) + 1):
                for chosen in itertools.combinations(lines, count):
                    found = figures([line["counts"]["as_answered"] for line in chosen])
                    found["clean"] = figures([line["counts"]["without_duplicates"] for line in chosen])["F1@.5"]
                    scored = [line["AP"] for line in chosen if "AP" in line]
                    found |= {"AP": np.mean(scored)} if scored else {}
                    cpu = np.mean([line["train_cpu_s"] for line in chosen])
                    yield {name: f"{value:.3f}" for name, value in found.items()} | {"CPU s": f"{cpu:.0f}"}


def rows_with_figures(page: Path) -> Iterator[tuple[str, dict[str, str]]]:
    header: list[str] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip(" *`") for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None or header is None:
            header = cells
            continue
        named = {COLUMNS[name]: cell for name, cell in zip(header, cells, strict=True) if name in COLUMNS}
        numbers = {name: cell for name, cell in named.items() if re.fullmatch(r"\d+|\d+\.\d{3}", cell)}
        if "F1@.5" in numbers:
            yield f"{page.name}:{number}: {line}", numbers


def test_every_row_of_the_pages_tables_is_of_committed_results(study: ModuleType) -> None:
    committed = list(committed_figures())
    rows = [
        row
        for page in (STUDY / "README.md", STUDY.parents[1] / "docs" / "when-it-helps.md")
        for row in rows_with_figures(page)
    ]
    assert len(rows) > 200
    unknown = [where for where, row in rows if not any(row.items() <= one.items() for one in committed)]
    assert unknown == []
