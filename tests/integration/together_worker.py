"""One of two processes that fail in turn, and learn from answers of which annotators know few on one rank alone; leaves
what each saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from coordexp import distributed
from coordexp.data.dataset import Sample
from coordexp.errors import DataError, RolloutError
from coordexp.matching import MatchingConfig
from coordexp.targets import TargetPolicy
from coordexp.training.answers import AnswerReader, RolloutQueue, decide_policy
from support.answers import CAT, DOG, LEAF, answer, entry, record, request, tiny_vocab
from support.tiny_run import InMemoryBackend

CASES = {
    "nobody": {},
    "second": {1: RolloutError("server 0 is gone")},
    "both": {0: DataError("no image", path="a.png"), 1: RolloutError("server 0 is gone")},
    "a bug": {0: ZeroDivisionError("division by zero")},
}
# Of each rank: three of four objects are annotated.
ANSWERS = [answer(entry(1), entry(2, LEAF)), answer(entry(1), entry(2, DOG))]


def taken_as_complete(rank: int, complete_above: float, fails: bool = False, ahead: bool = False) -> bool:
    """Whether this rank takes the annotations of a step with these answers as complete; asked for in it, or in the step
    before."""

    def text(_: object) -> str:
        if fails and rank == 1:
            raise RolloutError("server 0 is gone")
        return ANSWERS[rank]

    queue = RolloutQueue(
        InMemoryBackend(tiny_vocab(), text), AnswerReader(tiny_vocab(), MatchingConfig()), 3, ahead=ahead
    )
    one = record((CAT, LEAF))
    batches = [[Sample(one, request(one))]]
    if ahead:
        queue.submit(batches, 0, {})
    answers = queue.take(batches, int(ahead), {})
    return decide_policy(TargetPolicy(answer="rewritten", complete_above=complete_above), answers.all)[1]


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
    for share in (0.75, 0.76):
        seen[f"complete above {share}"] = [taken_as_complete(rank, share, ahead=ahead) for ahead in (False, True)]
    for name, ahead in (("no answers", False), ("no answers ahead", True)):
        try:
            taken_as_complete(rank, 0.75, fails=True, ahead=ahead)
        except RolloutError as error:
            seen[name] = [type(error).__name__, str(error), type(error.__cause__).__name__]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
