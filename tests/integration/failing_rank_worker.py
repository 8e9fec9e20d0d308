"""One of two training processes, the second of which fails in its second step; leaves what each saw."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from coordexp.config import load_config
from coordexp.data.dataset import RecordDataset
from coordexp.distributed import rank
from coordexp.errors import DataError, RolloutError
from coordexp.training.answers import AnswerReader
from coordexp.training.run import run_training


def fail(method: Any, error: Exception, from_call: int) -> Any:
    """``method``, which raises ``error`` from its ``from_call``-th call on."""
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= from_call:
            raise error
        return method(*args, **kwargs)

    return failing


def main(yaml: str, what: str) -> None:
    if rank() == 1:  # two samples a step
        if what == "answer":
            AnswerReader.__call__ = fail(AnswerReader.__call__, RolloutError("an answer nobody can read"), 3)  # type: ignore[method-assign]
        elif what == "bug":
            AnswerReader.__call__ = fail(AnswerReader.__call__, ZeroDivisionError("division by zero"), 3)  # type: ignore[method-assign]
        elif what == "sample":
            error = DataError("not a readable image", path="gone.png")
            RecordDataset.__getitem__ = fail(RecordDataset.__getitem__, error, 3)  # type: ignore[method-assign]
    config = load_config(yaml)
    seen: list[Any] = [None, None, time.time()]
    try:
        run_training(config, Console(quiet=True))
    except Exception as error:  # any: what was raised is the result
        seen = [type(error).__name__, str(error), time.time()]
        raise
    finally:
        Path(config.training.output_dir, f"rank{rank()}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
