"""One rank's failure is raised on all ranks with the same text; decisions use all ranks' answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from transformers import TrainerCallback

from coordexp import distributed
from coordexp.config import load_config
from coordexp.data import read_jsonl
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import DataError, RolloutError
from coordexp.matching import MatchingConfig
from coordexp.targets import TargetPolicy
from coordexp.training.checkpoint import is_complete
from coordexp.training.run import run_training
from coordexp.training.step_answers import AnswerReader, RolloutQueue, decide_policy
from support.answers import CAT, DOG, LEAF, answer, entry, record, request, tiny_vocab
from support.rollout_servers import descendants, is_alive, tail
from support.tiny_run import InMemoryBackend, run_config
from support.torchrun import results_of_two, start, yaml_of

FAILURES = {
    "none": {},
    "second": {1: RolloutError("server 0 is gone")},
    "both": {0: DataError("no image", path="a.png"), 1: RolloutError("server 0 is gone")},
    "a bug": {0: ZeroDivisionError("division by zero")},
}
# By rank; three of the four objects are annotated.
ANSWERS = [answer(entry(1), entry(2, LEAF)), answer(entry(1), entry(2, DOG))]


def taken_as_complete(rank: int, complete_above: float, fails: bool = False, ahead: bool = False) -> bool:
    """Whether this rank takes the annotations of a step with these answers as complete. ``ahead``: the answers were
    requested in the step before."""

    def text(_: object) -> str:
        if fails and rank == 1:
            raise RolloutError("server 0 is gone")
        return ANSWERS[rank]

    backend = InMemoryBackend(tiny_vocab(), text)
    queue = RolloutQueue(backend, AnswerReader(tiny_vocab(), MatchingConfig()), 3, ahead=ahead)
    one = record((CAT, LEAF))
    batches = [[Sample(one, request(one))]]
    if ahead:
        queue.submit(batches, 0, {})
    answers = queue.take(batches, int(ahead), {})
    return decide_policy(TargetPolicy(answer="rewritten", complete_above=complete_above), answers.all)[1]


def exchange_messages(folder: Path) -> None:
    """One of two ranks, whose group has gloo and a backend for GPUs, which are not there."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    dist.init_process_group("cuda:fake,cpu:gloo")
    rank, seen = distributed.rank(), {}
    seen["sum"], seen["max"] = (distributed.all_reduce([rank + 1, -rank], operation) for operation in ("sum", "max"))
    seen["gathered"] = distributed.gather_json({"rank": rank, "text": "é" * rank})
    distributed.barrier()
    try:
        with distributed.raise_on_all_ranks("the test"):
            if rank == 1:
                raise RolloutError("server 0 is gone")
    except RolloutError as error:
        seen["error"] = str(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


def wait_for_a_rank_that_does_not_come(folder: Path) -> None:
    """One of two ranks; writes how long rank 0 waited in a group of 60 s whose CPU tensors got one second."""
    distributed.join(use_cpu=True, timeout_s=60)
    distributed.limit_waits("cpu", 1)
    begun = time.monotonic()
    if distributed.rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
            distributed.barrier()
    else:
        time.sleep(5)
    waited = time.monotonic() - begun
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(waited), encoding="utf-8")


def raised(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error), type(error.__cause__).__name__]


def fail_and_decide(folder: Path) -> None:
    """One of two ranks; writes what it raised and decided."""
    dist.init_process_group("gloo")
    rank = distributed.rank()
    seen: dict[str, Any] = {}
    for name, failures in FAILURES.items():
        try:
            with distributed.raise_on_all_ranks("the whole"), distributed.raise_on_all_ranks("the test"):
                if rank in failures:
                    raise failures[rank]
            seen[name] = None
        except Exception as error:  # any: the error is the result
            seen[name] = raised(error)
    for share in (0.75, 0.76):
        seen[f"complete above {share}"] = [taken_as_complete(rank, share, ahead=ahead) for ahead in (False, True)]
    for name, ahead in (("no answers", False), ("no answers ahead", True)):
        try:
            taken_as_complete(rank, 0.75, fails=True, ahead=ahead)
        except RolloutError as error:
            seen[name] = raised(error)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("together")
    return results_of_two(folder, fail_and_decide, folder)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("second", "RolloutError", "rank 1, the test: server 0 is gone"),
        ("both", "DataError", "rank 0, the test: a.png: no image (2 of 2 ranks failed)"),
        ("a bug", "RuntimeError", "rank 0, the test: division by zero"),
    ],
)
def test_all_ranks_raise_the_first_failure(case: str, kind: str, message: str, seen: list[dict[str, Any]]) -> None:
    assert [rank[case][:2] for rank in seen] == [[kind, message]] * 2
    assert [rank["none"] for rank in seen] == [None, None]


def test_the_failing_rank_keeps_its_own_traceback(seen: list[dict[str, Any]]) -> None:
    assert [rank["a bug"][2] for rank in seen] == ["ZeroDivisionError", "NoneType"]


def test_a_single_process_raises_the_error_itself() -> None:
    error = RolloutError("as it was")
    with pytest.raises(RolloutError) as caught, distributed.raise_on_all_ranks("anywhere"):
        raise error
    assert caught.value is error


def test_completeness_is_estimated_over_all_ranks(seen: list[dict[str, Any]]) -> None:
    """Three of four objects are annotated: all of the first rank's, half of the second's."""
    assert [rank["complete above 0.75"] for rank in seen] == [[True, True]] * 2
    assert [rank["complete above 0.76"] for rank in seen] == [[False, False]] * 2


@pytest.mark.parametrize(("case", "step"), [("no answers", 1), ("no answers ahead", 2)])
def test_a_rank_without_answers_ends_both_ranks(case: str, step: int, seen: list[dict[str, Any]]) -> None:
    message = f"rank 1, rollouts of step {step}: server 0 is gone"
    assert [rank[case] for rank in seen] == [
        ["RolloutError", message, "NoneType"], ["RolloutError", message, "RolloutError"],
    ]  # fmt: skip


# -- a whole run -------------------------------------------------------------------------------------------------------

# The call that fails on rank 1 in its second step; the error on both ranks. A rank has two samples a step.
IN_A_RUN: dict[str, tuple[Any, str, Exception, str, str]] = {
    "answer": (AnswerReader, "__call__", RolloutError("an unreadable answer"),
               "RolloutError", "rank 1, rollouts of step 2: an unreadable answer"),
    "sample": (RecordDataset, "__getitem__", DataError("not a readable image", path="gone.png"),
               "DataError", "rank 1, reading the samples of step 2: gone.png: not a readable image"),
}  # fmt: skip


def train_and_fail(yaml: Path, case: str) -> None:
    """One of two ranks, the second of which fails; writes what it raised, and when."""
    owner, name, failure, _, _ = IN_A_RUN[case]
    method, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise failure
        return method(*args, **kwargs)

    if distributed.rank() == 1:
        setattr(owner, name, failing)
    config = load_config(yaml)
    try:
        run_training(config, Console(quiet=True))
    except Exception as error:
        seen = [type(error).__name__, str(error), time.time()]
        Path(config.training.output_dir, f"rank{distributed.rank()}.json").write_text(json.dumps(seen))
        raise


@pytest.mark.parametrize("case", IN_A_RUN)
def test_both_ranks_end_with_one_error_and_a_checkpoint(case: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, 2, training__max_steps=3)
    folder, log = Path(config.training.output_dir), tmp_path / "log"
    agent = start(train_and_fail, tmp_path / "run.yaml", case, log=log)
    assert agent.pid is not None
    everything: set[int] = set()
    deadline = time.monotonic() + 240
    while agent.is_alive():
        assert time.monotonic() < deadline, tail(log)
        everything.update(descendants(agent.pid))
        time.sleep(0.1)
    assert agent.exitcode != 0
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank[:2] for rank in seen] == [list(IN_A_RUN[case][3:])] * 2, tail(log)
    assert abs(seen[0][2] - seen[1][2]) < 20, "neither waits for the other"
    assert not [pid for pid in everything if is_alive(pid)]
    assert is_complete(folder / "checkpoint-1")


TORN_DOWN = """
import os

class Guard:
    folder, mkdir = os.environ["TORN_DOWN"] + os.environ.get("RANK", "alone"), staticmethod(os.mkdir)

    def __del__(self):
        self.mkdir(self.folder)

guard = Guard()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "coordexp", "train")


class EndsOnOneRank(TrainerCallback):
    """As a limit of time does, if the clocks of two ranks differ."""

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        control.should_save = control.should_training_stop = distributed.rank() == 1 and state.global_step == 2


def train_with_a_limit(yaml: Path) -> None:
    trainer = run_training(load_config(yaml), Console(quiet=True), callbacks=[EndsOnOneRank()])
    (yaml.parent / f"rank{distributed.rank()}.json").write_text(str(trainer.state.global_step), encoding="utf-8")


def test_what_a_callback_asks_for_on_one_rank_is_done_on_both(tmp_path: Path) -> None:
    keys = {"training__max_steps": 5, "training__save_strategy": "steps", "training__ddp_timeout": 60}
    config = run_config(tmp_path, 1, **keys)
    assert results_of_two(tmp_path, train_with_a_limit, yaml_of(config)) == [2, 2]
    assert is_complete(tmp_path / "run" / "checkpoint-2")


def test_a_rank_ends_before_its_interpreter_is_taken_down(tmp_path: Path) -> None:
    """There a thread of gloo, with a tensor of the last message, aborted one rank in five on a busy machine."""
    config = run_config(tmp_path, 1, training__max_steps=1)
    (tmp_path / "sitecustomize.py").write_text(TORN_DOWN)
    places = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"TORN_DOWN": f"{tmp_path}/torn-down-", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, *TORCHRUN, yaml_of(config)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "saved to" in done.stdout, done.stderr
    assert {path.name for path in tmp_path.glob("torn-down-*")} == {"torn-down-alone"}, "torchrun's own process"


@pytest.mark.parametrize("kind", ["in the YAML", "in the images"])
def test_an_error_of_all_ranks_is_printed_once(kind: str, tmp_path: Path) -> None:
    """Under torchrun, before the ranks meet and after."""
    data = write_scenes(tmp_path / "scenes", 4, SPARSE, 5)
    config = run_config(tmp_path, 1, training__max_steps=1, custom__train_jsonl=str(data))
    words = []
    if kind == "in the YAML":
        words, says = ["training.lerning_rate=1"], "did you mean 'learning_rate'?"
    else:
        says = "cannot decode the image"
        for image in {record.image for record in read_jsonl(data)}:
            image.write_bytes(image.read_bytes()[:200])  # a header, and a little
    done = subprocess.run(
        [sys.executable, *TORCHRUN, yaml_of(config), *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and done.stderr.count("error: ") == done.stderr.count(says) == 1, done.stderr


def test_an_error_that_may_be_of_one_rank_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = RolloutError("server 0 is gone")
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        distributed.first_rank_prints(error)
    assert waited == [], "not under torchrun, which would end this rank"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(distributed, "_has_joined", True)
    distributed.first_rank_prints(error)
    assert waited == []
    error.is_every_ranks = True  # pyright: ignore[reportAttributeAccessIssue]
    distributed.first_rank_prints(error)
    assert waited == [distributed.FIRST_PRINTS_S]


def test_the_tensors_of_one_device_may_have_a_limit_of_their_own(tmp_path: Path) -> None:
    """As those that NCCL exchanges have; here the device is the CPU."""
    waited, _ = results_of_two(tmp_path, wait_for_a_rank_that_does_not_come, tmp_path)
    assert 0.9 < waited < 30


def test_messages_never_go_through_the_gpu(tmp_path: Path) -> None:
    """Where gradients would: a message that did would wait for the GPU's work, and fail here."""
    for seen in results_of_two(tmp_path, exchange_messages, tmp_path):
        assert seen["sum"] == [3.0, -1.0] and seen["max"] == [2.0, 0.0]
        assert seen["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
        assert "rank 1" in seen["error"] and "server 0 is gone" in seen["error"]
