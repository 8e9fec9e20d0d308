"""One rank's failure is everybody's, with one text, and so is what is known of annotations; two real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp import distributed
from coordexp.errors import RolloutError
from support.torchrun import torchrun

WORKER = Path(__file__).parent / "together_worker.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("together")
    done = torchrun(WORKER, folder)
    assert done.returncode == 0, done.output[-2000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("second", "RolloutError", "rank 1, the test: server 0 is gone"),
        ("both", "DataError", "rank 0, the test: a.png: no image (2 of 2 ranks failed)"),
        ("a bug", "RuntimeError", "rank 0, the test: division by zero"),
    ],
)
def test_all_ranks_raise_the_first_failure(case: str, kind: str, message: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank[case]
        assert found is not None and found[:2] == [kind, message]


def test_nobody_fails_when_nobody_failed(seen: list[dict[str, Any]]) -> None:
    assert [rank["nobody"] for rank in seen] == [None, None]


def test_the_failing_rank_keeps_its_own_traceback(seen: list[dict[str, Any]]) -> None:
    causes = [found[2] if (found := rank["a bug"]) is not None else None for rank in seen]
    assert causes == ["ZeroDivisionError", "NoneType"]


def test_annotations_are_taken_as_complete_by_the_answers_of_all_ranks(seen: list[dict[str, Any]]) -> None:
    """Three of four objects are annotated: all of the first rank's, half of the second's."""
    assert [rank["complete above 0.75"] for rank in seen] == [[True, True]] * 2  # of the step itself, of the one before
    assert [rank["complete above 0.76"] for rank in seen] == [[False, False]] * 2


@pytest.mark.parametrize(("case", "step"), [("no answers", 1), ("no answers ahead", 2)])
def test_a_rank_without_answers_leaves_none_waiting_for_its_share(
    case: str, step: int, seen: list[dict[str, Any]]
) -> None:
    message = f"rank 1, rollouts of step {step}: server 0 is gone"
    assert [rank[case] for rank in seen] == [
        ["RolloutError", message, "NoneType"], ["RolloutError", message, "RolloutError"],
    ]  # fmt: skip


def test_alone_an_error_is_left_as_it_is() -> None:
    error = RolloutError("as it was")
    with pytest.raises(RolloutError) as raised, distributed.raise_on_all_ranks("anywhere"):
        raise error
    assert raised.value is error
