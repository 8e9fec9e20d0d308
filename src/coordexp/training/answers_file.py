"""Answers that wait for their step, in a checkpoint: one file a rank, JSON, exact to the bit.

Images and annotations are not in it: the step reads its samples again, and makes targets of the answers anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.errors import CheckpointError
from coordexp.files import write_atomically
from coordexp.records import Rollout


@dataclass(frozen=True, slots=True)
class WaitingAnswers:
    """All answers of one window on this rank, by micro-step and in their order.

    ``step``: how many steps are finished when it is learned from; ``version``: of the weights that answered.
    ``rollout_s``, ``report``, ``counted``: as in an answered window.
    """

    step: int
    version: int
    rounds: tuple[tuple[Rollout, ...], ...]
    rollout_s: float
    report: Mapping[str, Any]
    counted: Mapping[str, float]

    def __post_init__(self) -> None:
        versions = {rollout.weight_version for one in self.rounds for rollout in one}
        if versions - {self.version}:
            raise ValueError(f"answers of the weights {sorted(versions)} in a window asked of weights {self.version}")

    @property
    def sample_ids(self) -> list[list[str]]:
        """Whose answers these are, by round and request."""
        return [[rollout.sample_id for rollout in one] for one in self.rounds]


def save_answers(answers: WaitingAnswers, folder: Path) -> None:
    """Write this rank's waiting answers to a checkpoint folder."""
    write_atomically(_path(folder), json.dumps(asdict(answers)))


def load_answers(checkpoint: Path, step: int) -> WaitingAnswers | None:
    """This rank's answers for the step behind ``checkpoint``, which was written after ``step`` steps; None where it
    holds none.

    Raises:
        CheckpointError: the file is unreadable, or of another step.
    """
    path = _path(checkpoint)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rounds = tuple(tuple(_rollout(one) for one in answers) for answers in data.pop("rounds"))
        answers = WaitingAnswers(rounds=rounds, **data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a window of answers ({error!r}); resume from an older checkpoint"
        ) from error
    if (answers.step, answers.version) != (step, step - 1):
        raise CheckpointError(
            f"{path}: answers of weights {answers.version} for the step behind {answers.step}, in a checkpoint of "
            f"{step} steps; resume from an older checkpoint"
        )
    return answers


def _rollout(data: Mapping[str, Any]) -> Rollout:
    known: dict[str, Any] = {field.name: data[field.name] for field in fields(Rollout)}
    ids: dict[str, Any] = {name: tuple(known[name]) for name in ("prompt_token_ids", "response_token_ids")}
    return Rollout(**known | ids)


def _path(folder: Path) -> Path:
    return folder / f"waiting_answers_rank{distributed.rank()}.json"
