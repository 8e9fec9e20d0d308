"""One of two learner processes fails: both end with one text, soon, and what was learned waits in a checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from coordexp.training.checkpoint import is_complete
from support.rollout_servers import descendants, is_alive, tail
from support.tiny_run import run_config
from support.torchrun import start

WORKER = Path(__file__).parent / "failing_rank_worker.py"
CASES = [
    ("answer", "RolloutError", "rank 1, rollouts of step 2: an answer nobody can read"),
    ("bug", "RuntimeError", "rank 1, rollouts of step 2: division by zero"),
    ("sample", "DataError", "rank 1, reading the samples of step 2: gone.png: not a readable image"),
]


@pytest.mark.parametrize(("what", "kind", "message"), CASES, ids=[case[0] for case in CASES])
def test_both_ranks_end_alike_and_a_checkpoint_waits(what: str, kind: str, message: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, 2, training__max_steps=3)
    folder, log = Path(config.training.output_dir), tmp_path / "log"
    agent = start(WORKER, tmp_path / "run.yaml", what, log=log)
    assert agent.pid is not None
    everything: set[int] = set()
    deadline = time.monotonic() + 240
    while agent.is_alive():
        assert time.monotonic() < deadline, tail(log)
        everything.update(descendants(agent.pid))
        time.sleep(0.1)
    assert agent.exitcode != 0
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank[:2] for rank in seen] == [[kind, message]] * 2, tail(log)
    assert abs(seen[0][2] - seen[1][2]) < 20, "neither waits for the other"
    assert not [pid for pid in everything if is_alive(pid)]
    assert is_complete(folder / "checkpoint-1")
