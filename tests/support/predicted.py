"""Answers of ``coordexp predict`` by transformers, which those by other engines are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coordexp.cli import main
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import ImageAnswer, read_answers
from support.cli_runs import write_run

IMAGES = 8
SCORED_ALIKE = 1e-4
KEYS: dict[str, Any] = {
    "template__prompt": "Detect every object.",
    "global_max_length": 512,
    "rollout_matching__max_new_tokens": 128,
    "rollout_matching__decode_batch_size": 2,
    "rollout_matching__decoding__temperature": 0.0,
}


class Own(NamedTuple):
    """A model, scenes, and transformers' answers to them."""

    model: Path
    folder: Path
    answers: list[ImageAnswer]

    @property
    def data(self) -> Path:
        return self.folder / "scenes.jsonl"

    def run(self, **keys: Any) -> Path:
        return write_run(self.folder, 1, self.model, **KEYS | keys)


def answered_by_transformers(model: Path, folder: Path) -> Own:
    write_scenes(folder, IMAGES, SPARSE, 77)
    found = Own(model, folder, [])
    with pytest.raises(SystemExit) as exit_:
        main(["predict", str(found.run()), str(found.data), "--out", str(folder / "hf")])
    assert not exit_.value.code
    found.answers.extend(read_answers(folder / "hf"))
    assert sum(len(answer.pred) for answer in found.answers) > IMAGES, "answers without objects would show nothing"
    return found


def assert_same(found: Sequence[ImageAnswer], expected: Sequence[ImageAnswer]) -> None:
    assert Counter(Path(a.image).name for a in found) == Counter(Path(a.image).name for a in expected)
    by_image = {Path(answer.image).name: answer for answer in expected}
    for answer in found:
        other = by_image[Path(answer.image).name]
        assert (answer.text, answer.num_tokens, answer.truncated) == (other.text, other.num_tokens, other.truncated)
        assert [(o.desc, o.bins) for o in answer.pred] == [(o.desc, o.bins) for o in other.pred]
        scores = [obj.score for obj in other.pred]
        assert None not in scores and [obj.score for obj in answer.pred] == pytest.approx(scores, abs=SCORED_ALIKE)
