"""The list of `make mutants` fits the code: every change can be made, to one place, and its tests exist."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))
from run import Mutation, read_mutations  # noqa: E402

MUTATIONS: list[Mutation] = read_mutations()


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 150
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


def test_every_changed_text_stands_once_in_its_file_and_the_change_is_one() -> None:
    counts = {one.name: (ROOT / one.file).read_text(encoding="utf-8").count(one.old) for one in MUTATIONS}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert [one.name for one in MUTATIONS if one.old == one.new or one.old.count("\n") > 1] == []


def test_every_test_file_is_there() -> None:
    assert [path for path in {path for one in MUTATIONS for path in one.tests} if not (ROOT / path).is_file()] == []
