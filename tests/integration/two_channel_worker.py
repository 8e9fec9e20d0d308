"""A process of a distributed two-channel run in which some samples' answers cannot be closed."""

from __future__ import annotations

import sys
from typing import Any

import train_worker

from coordexp.errors import AppendError
from coordexp.training import answers as training_answers


def refuse(sample_ids: frozenset[str]) -> None:
    """Make target building fail for these samples, as it would behind a prefix that is not append-ready."""
    build = training_answers.build_target

    def build_or_refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs["sample_id"] in sample_ids:
            raise AppendError("the prefix does not end where an entry may follow")
        return build(*args, **kwargs)

    training_answers.build_target = build_or_refuse


if __name__ == "__main__":
    refuse(frozenset(sys.argv[2:]))
    train_worker.main(sys.argv[1])
