"""One of two processes that fail in turn; leaves what each saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from coordexp import distributed
from coordexp.errors import DataError, RolloutError

CASES = {
    "nobody": {},
    "second": {1: RolloutError("server 0 is gone")},
    "both": {0: DataError("no image", path="a.png"), 1: RolloutError("server 0 is gone")},
    "a bug": {0: ZeroDivisionError("division by zero")},
}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = distributed.rank()
    seen = {}
    for name, failures in CASES.items():
        try:
            with distributed.raise_on_all_ranks("the whole"), distributed.raise_on_all_ranks("the test"):
                if rank in failures:
                    raise failures[rank]
        except Exception as error:  # any: what was raised is the result
            seen[name] = [type(error).__name__, str(error), type(error.__cause__).__name__]
        else:
            seen[name] = None
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
