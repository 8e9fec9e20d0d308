"""The study's tables and the manual's picture agree with the committed results."""

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

STUDY = Path(__file__).parents[3] / "studies" / "when_stage2_helps"
DOCS = STUDY.parents[1] / "docs"
DECLARED = yaml.safe_load((STUDY / "arms.yaml").read_text())
# Columns of the pages' tables, by the names of a result's figures.
COLUMNS = {name: name for name in (
    "F1@.5", "F1@.7", "F1@.9", "precision", "recall", "located", "name right", "IoU", "duplicates", "truncated",
    "objects", "AP", "CPU s",
)} | {
    "F1, repeats removed": "clean", "F1@.5, repeats removed": "clean", "AP (seeds)": "AP",
    "objects (truth 3.39)": "objects", "objects (truth 13.1)": "objects",
}  # fmt: skip


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STUDY.parents[1] / "benchmarks"))
    monkeypatch.syspath_prepend(str(STUDY))
    import study

    yield study
    for name in ("study", "tables", "stopping", "picture"):
        sys.modules.pop(name, None)


def test_results_belong_to_declared_arms() -> None:
    for path in (STUDY / "results").glob("*.jsonl"):
        arms = DECLARED["arms"][path.stem] | DECLARED["removed"].get(path.stem, {})
        for one in map(json.loads, path.read_text().splitlines()):
            assert one["declared"] == arms[one["arm"]]
            assert len(one["counts"]["as_answered"]) == DECLARED["regimes"][path.stem]["images"][one["split"]]


def test_picture_and_first_table_of_the_manual_show_the_results(study: ModuleType) -> None:
    from picture import compare

    rows = [compare(entry, STUDY / "results") for entry in DECLARED["compared"]]
    picture = ElementTree.parse(DOCS / "images" / "when-it-helps.svg")
    described = picture.find(".//{http://purl.org/dc/elements/1.1/}description")
    assert described is not None and described.text is not None
    assert described.text.splitlines() == [str(row) for row in rows], "draw it again: python study.py picture"

    page = (DOCS / "when-it-helps.md").read_text(encoding="utf-8")
    first_table = page.partition("## In short")[2].partition("\n## ")[0]
    lines = [line for line in first_table.splitlines() if re.search(r"0\.\d{3}", line) and line.startswith("|")]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        start, control, ours, seeds = (cell.replace("**", "").strip() for cell in line.split("|")[-5:-1])
        assert (start, control.split(",")[0]) == (f"{row.start:.3f}", f"{row.control:.3f}"), line
        assert ours.startswith(f"{row.ours:.3f}"), line
        assert seeds == f"{row.seeds}" + ", validation" * (row.split == "val"), line


def test_every_row_of_the_tables_shows_a_result(study: ModuleType) -> None:
    committed = list(committed_figures())
    pages = (STUDY / "README.md", DOCS / "when-it-helps.md")
    rows = [row for page in pages for row in rows_with_figures(page)]
    assert len(rows) > 200
    unknown = [where for where, row in rows if not any(row.items() <= one.items() for one in committed)]
    assert unknown == []


def committed_figures() -> Iterator[dict[str, str]]:
    """For each arm of a regime and split, and each choice of its seeds: the figures as a table prints them."""
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
