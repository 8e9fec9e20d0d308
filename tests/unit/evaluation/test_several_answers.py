"""Several answers of one image: generated, merged, and compared with a single one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt

import pytest

from coordexp.coords import serialize_objects
from coordexp.data.dataset import RecordDataset
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, answer_dataset, from_line, to_line
from coordexp.evaluation.several_answers import (
    answers_table,
    best_answer,
    merge_all,
    merge_answers,
    of_majority,
    side_by_side,
)
from coordexp.evaluation.summary import COUNTS_ONLY, WITH_OWN_SCORES
from coordexp.records import GTObject, Rollout
from coordexp.rollouts.backend import DatasetSeeds, IndexedRollout, RolloutRound
from support.answers import CAT, DOG, record, request
from support.qwen_tokenizer import qwen_vocab
from support.tiny_run import QuietBackend


def box(x: int, y: int, desc: str = "cup", score: float | None = 0.5, confidence: float | None = 0.8) -> ScoredObject:
    return ScoredObject(desc, "bbox_2d", (x, y, x + 100, y + 100), score, confidence)


def answer(*pred: ScoredObject, gt: Sequence[GTObject] | None = (), **fields: object) -> ImageAnswer:
    one = ImageAnswer("s", "s.png", 64, 64, None if gt is None else tuple(gt), pred, text="{}", num_tokens=5)
    return replace(one, **fields)  # pyright: ignore[reportArgumentType]


def test_objects_are_merged_by_overlap_and_description() -> None:
    merged = merge_answers(
        [
            answer(box(0, 0), box(500, 500)),
            answer(box(505, 500), box(10, 0), box(0, 0, desc="mug")),
            answer(box(40, 0), box(5, 0)),  # the first overlaps box(0, 0) by less than a half
        ]
    )
    assert [(obj.desc, obj.bins[:2], obj.answers) for obj in merged.pred] == [
        ("cup", (0, 0), 3),
        ("cup", (500, 500), 2),
        ("mug", (0, 0), 1),
        ("cup", (40, 0), 1),
    ]
    assert merged.num_answers == 3


def test_two_objects_of_one_answer_stay_two() -> None:
    """In a crowd, neighbours overlap."""
    crowd = answer(box(0, 0), box(20, 0))
    merged = merge_answers([crowd, crowd, crowd])
    assert [(obj.bins[:2], obj.answers) for obj in merged.pred] == [((0, 0), 3), ((20, 0), 3)]


def test_polygons_are_compared_by_their_masks() -> None:
    corner = ScoredObject("leaf", "poly", (0, 0, 400, 0, 400, 50, 50, 50, 50, 400, 0, 400))
    whole = ScoredObject("leaf", "bbox_2d", (0, 0, 400, 400))  # the corner's bounding box, of which it covers a quarter
    shifted = replace(corner, bins=tuple(x + 3 for x in corner.bins))
    assert [obj.answers for obj in merge_answers([answer(corner), answer(whole), answer(shifted)]).pred] == [2, 1]


def test_confidence_combines_share_and_tokens() -> None:
    merged = merge_answers(
        [
            answer(box(0, 0, score=0.6, confidence=0.9)),
            answer(box(0, 0, score=0.2, confidence=0.5)),
            answer(),
            answer(),
        ]
    )
    (obj,) = merged.pred
    assert obj.confidence == pytest.approx(sqrt(2 / 4) * 0.7) and obj.score == pytest.approx(sqrt(2 / 4) * 0.4)
    unscored = box(0, 0, score=None, confidence=None)
    (obj,) = merge_answers([answer(unscored), answer(unscored), answer(unscored), answer()]).pred
    assert (obj.score, obj.confidence) == (None, 0.75)


def test_a_single_answer_is_unchanged() -> None:
    one = answer(box(0, 0), box(0, 0))
    assert merge_answers([one]) is one and merge_all([one, one], 1) == [one, one]
    assert "answers" not in to_line(one) and "further" not in to_line(one)


def test_a_merged_answer_counts_all_of_them_and_survives_its_file() -> None:
    merged = merge_answers(
        [
            answer(box(0, 0), dropped={"bad_json": 1}, text='{"a"'),
            answer(dropped={"bad_json": 2, "no_desc": 1}, truncated=True, text="{}"),
        ]
    )
    assert (dict(merged.dropped), merged.truncated, merged.num_tokens) == ({"bad_json": 3, "no_desc": 1}, True, 10)
    assert (merged.text, merged.further_texts) == ('{"a"', ("{}",))
    assert merged.problem is not None and "one of 2 answers was cut off" in merged.problem
    assert replace(merged, truncated=False).problem == (
        "4 entries of 2 answers could not be read (bad_json 3, no_desc 1)"
    )
    assert "repeated itself" in (replace(merged, repeat_terminated=True).problem or "")
    assert replace(merged, truncated=False, dropped={}).problem is None
    assert from_line(to_line(merged)) == merged


@pytest.mark.parametrize(("count", "least"), [(2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_is_more_than_half(count: int, least: int) -> None:
    for found in range(1, count + 1):
        answers = [answer(box(0, 0)) if k < found else answer() for k in range(count)]
        assert bool(of_majority(merge_answers(answers)).pred) == (found >= least)


TRUTH = [GTObject("cup", "bbox_2d", (x, 0, x + 100, 100)) for x in (0, 300, 600)]
POOR, WORDY, GOOD = (
    answer(*found, gt=TRUTH)
    for found in ([box(0, 0)], [box(0, 0), box(300, 0), box(0, 500)], [box(300, 0), box(600, 0)])
)


def test_the_best_answer_finds_most_with_fewest() -> None:
    assert best_answer([POOR, WORDY, GOOD]) is GOOD
    assert best_answer([POOR, WORDY]) is WORDY
    assert best_answer([POOR, replace(POOR, text="later")]) is POOR


def test_figures_are_side_by_side() -> None:
    asked = [POOR, WORDY, GOOD]
    figures = side_by_side(asked, merge_all(asked, 3), COUNTS_ONLY)
    assert {name: (column["matched_objects"], column["pred_objects"]) for name, column in figures.items()} == {
        "one": (1, 1),
        "union": (3, 4),
        "majority": (2, 2),
        "oracle": (2, 2),
    }
    assert figures["union"]["recall"] == 1 and "AP" not in figures["union"]
    scored = side_by_side(asked, merge_all(asked, 3), WITH_OWN_SCORES)
    assert scored["union"]["AP50"] > scored["oracle"]["AP50"] > scored["one"]["AP50"]
    for one, row in ((figures, None), (scored, "AP50")):
        table = answers_table(one)
        labels = list(table.columns[0].cells)
        assert [str(column.header) for column in table.columns] == ["", "one", "union", "majority", "oracle"]
        assert "recall" in labels and ("AP50" in labels) == (row is not None)


class Sampling(QuietBackend):
    """Answers a request of the greedy round with a cat, and others with a dog too; records rounds."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.windows: list[list[RolloutRound]] = []

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        self.windows.append(list(rounds))
        vocab = qwen_vocab()
        for number, one in reversed(list(enumerate(rounds))):  # finished in any order
            for index, asked in enumerate(one.requests):
                text = serialize_objects([CAT] if one.greedy else [CAT, DOG])
                ids = tuple(vocab.encode(text))
                yield IndexedRollout(number, index, Rollout(asked.sample_id, asked.prompt_token_ids, ids, text, False))


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, [4, 1]), (5, [2, 2, 1]), (1, [1] * 5)])
def test_images_times_answers_fit_the_batch(batch_size: int, sizes: list[int]) -> None:
    data = RecordDataset([record([CAT], f"s{i}") for i in range(5)], request, "file")
    backend, seen = Sampling(batch_size), []
    answers = answer_dataset(
        data, backend, qwen_vocab(), seed=3, count=2, on_answer=lambda done, total: seen.append((done, total))
    )
    assert [len(rounds[0].requests) for rounds in backend.windows] == sizes
    first = 0
    for rounds in backend.windows:
        assert [one.greedy for one in rounds] == [True, False]
        assert [one.seeds for one in rounds] == [DatasetSeeds(3, first), DatasetSeeds(3, first, 1, 1)]
        first += len(rounds[0].requests)
    assert [(one.sample_id, len(one.pred)) for one in answers] == [(f"s{i}", n) for i in range(5) for n in (1, 2)]
    assert seen == sorted(seen) and all(total == 5 for _, total in seen) and max(done for done, _ in seen) <= 5
