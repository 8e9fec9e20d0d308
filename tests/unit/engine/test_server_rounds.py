"""A step's rollouts by servers: concurrent calls, the log, and servers refused at start."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordexp import distributed
from coordexp.engine.trainer.server_backend import check_servers
from coordexp.errors import AlignmentError, ConfigError, MissingDependency, RolloutError
from coordexp.matching import MatchingConfig
from coordexp.recording.writer import RolloutLog
from coordexp.rollouts import RolloutRound, SeedContext
from coordexp.training.checked_run import check_run
from coordexp.training.step_answers import AnswerReader, RolloutQueue
from support.fake_servers import FakeRolloutServer
from support.lying_server import lying
from support.ports import free_ports
from support.server_backends import PretendSync, answers, backend_of, requests_, section
from support.tiny_run import load_tiny, run_config, tiny_samples

WORLD_SIZES = (2, 1)  # with a decode_batch_size of 2, four and two sequences at most


class Busy:
    """Counts the sequences that each server decodes at once. No call is answered until ``full`` are open together."""

    def __init__(self, full: int) -> None:
        self.most: Counter[int] = Counter()
        self._open: Counter[int] = Counter()
        self._full = full
        self._was_full = threading.Event()
        self._lock = threading.Lock()

    def infer(self, server: int) -> Callable[[dict[str, Any]], tuple[int, Any]]:
        def act(body: dict[str, Any]) -> tuple[int, Any]:
            size = len(body["infer_requests"])
            with self._lock:
                self._open[server] += size
                self.most[server] = max(self.most[server], self._open[server])
                if self._open.total() >= self._full:
                    self._was_full.set()
            together = self._was_full.wait(20)
            time.sleep(0.02)
            with self._lock:
                self._open[server] -= size
            return answers(body) if together else (400, {"error": f"only {dict(self.most)} were open at once"})

        return act


@contextmanager
def busy_servers(full: int) -> Iterator[tuple[list[FakeRolloutServer], Busy]]:
    busy, ours = Busy(full), {"server": "coordexp serve", "workers": []}  # of ms-swift, calls may travel together
    with FakeRolloutServer(WORLD_SIZES[0], ours) as first, FakeRolloutServer(WORLD_SIZES[1], ours) as second:
        for index, fake in enumerate((first, second)):
            fake.infer = busy.infer(index)
        yield [first, second], busy


def test_calls_of_all_micro_steps_are_concurrent_within_the_limits() -> None:
    """Twelve micro-steps of one sample each: six are open before the first answer, never more."""
    rounds = [RolloutRound((request,), SeedContext(1, 2, i, 0)) for i, request in enumerate(requests_(12))]
    with busy_servers(full=6) as (fakes, busy), backend_of(fakes) as backend:
        backend.sync_weights(0)
        assert {answer.round_idx for answer in backend.generate_rounds(rounds)} == set(range(12))
    assert busy.most == {0: 4, 1: 2}


def test_two_ranks_together_keep_every_device_within_decode_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_servers(full=6) as (fakes, busy), ExitStack() as opened:
        backends = []
        for rank in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(distributed, "world_size", lambda: 2)
                patched.setattr(distributed, "rank", lambda rank=rank: rank)
                backends.append(opened.enter_context(backend_of(fakes)))
        for backend in backends:
            backend.sync_weights(0)
        assert [backend.last_report()["caps"] for backend in backends] == [[3, 0], [1, 2]]
        with ThreadPoolExecutor() as asking:
            answered = list(asking.map(lambda b: len(b.generate(requests_(9), SeedContext(1, 0, 0, 0))), backends))
    assert answered == [9, 9]
    assert busy.most == {0: 4, 1: 2}


def test_a_fallback_is_logged_and_counted_once(tmp_path: Path) -> None:
    with FakeRolloutServer(1) as fake:
        fake.infer = answers
        with backend_of([fake], PretendSync(None, "RolloutError: the engine cannot adapt it")) as backend:
            log = RolloutLog(tmp_path, 0)
            counted = []
            for step in range(3):
                backend.sync_weights(step)
                backend.generate(requests_(1), SeedContext(1, step, 0, 0))
                log.write(step, backend.last_report())
                counted.append(backend.take_metrics().get("rollout/sync_fallbacks_total", 0))
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    event = "version 1: RolloutError: the engine cannot adapt it"
    assert [line["fallbacks"] for line in lines] == [[], [event], [event]]
    assert [line["sync"]["fallback"] is not None for line in lines] == [False, True, False]
    assert counted == [0, 1, 0]


@pytest.mark.parametrize("answered_by", [0, 1])
def test_an_answer_has_the_weight_version_of_its_request(answered_by: int) -> None:
    """Not of the newest version: the trainer may have changed its weights since."""

    def infer(body: dict[str, Any]) -> tuple[int, Any]:
        status, items = answers(body)
        stamp = {"weight_version": answered_by, "trainer_id": "this"}
        return status, [item | {"coordexp": stamp | {"uuid": str(place)}} for place, item in enumerate(items)]

    ours = {"server": "coordexp serve", "workers": [], "engine_silent_s": 0.0}
    with FakeRolloutServer(1, ours) as fake:
        fake.infer = infer
        with backend_of([fake]) as backend:
            backend.sync_weights(0)
            stream = backend.generate_rounds([RolloutRound(requests_(2), SeedContext(1, 0, 0, 0))])
            backend.sync_weights(1)
            if answered_by == 0:
                assert {answer.rollout.weight_version for answer in stream} == {0}
            else:
                with pytest.raises(RolloutError, match="weights of version 1 of trainer this, not version 0"):
                    list(stream)


@pytest.mark.scenario("Server mode produces token ids suitable for strict alignment")
@pytest.mark.parametrize("differs", [False, True], ids=["the same prompt", "another prompt"])
def test_a_servers_prompt_tokens_are_compared_with_the_trainers(differs: bool) -> None:
    loaded = load_tiny()
    samples = tiny_samples(loaded, 3)
    prompt_of = {str(sample.request.image): list(sample.request.prompt_token_ids) for sample in samples}
    ended = [*loaded.vocab.encode("{}"), loaded.vocab.eos_id]

    def infer(body: dict[str, Any]) -> tuple[int, Any]:
        items = []
        for request in body["infer_requests"]:
            prompt = prompt_of[request["images"][0]]
            choice = {"message": {"content": "{}"}, "finish_reason": "stop", "token_ids": ended}
            read = [*prompt[:3], prompt[3] + 1, *prompt[4:]] if differs and prompt is last else prompt
            items.append({"response": {"choices": [choice], "prompt_token_ids": read}})
        return 200, items

    last = prompt_of[str(samples[-1].request.image)]
    with FakeRolloutServer(1) as fake:
        fake.infer = infer
        with backend_of([fake], vocab=loaded.vocab) as backend:
            queue = RolloutQueue(backend, AnswerReader(loaded.vocab, MatchingConfig()), 3)
            if differs:
                with pytest.raises(AlignmentError, match=f"{samples[-1].record.sample_id}.*they part at token 3"):
                    queue.take([samples], 0, {})
            else:
                answers = queue.take([samples], 0, {})
                assert [answer.rollout.prompt_token_ids for answer in answers.all] == [
                    s.request.prompt_token_ids for s in samples
                ]


def server_run(folder: Path, urls: Sequence[str], **keys: Any) -> Any:
    """A run with these servers and a missing model: loading the model first would raise another error."""
    entries = [{"base_url": url, "group_port": 40000 + index} for index, url in enumerate(urls)]
    vllm = {"mode": "server", "tensor_parallel_size": 1, "server": {"servers": entries, "timeout_s": 1.0}}
    run_keys = {"rollout_matching__rollout_backend": "vllm", "rollout_matching__vllm": vllm, "model__model": "/nowhere"}
    return run_config(folder, 2, **run_keys | keys)


@contextmanager
def nobody() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_ports(1)[0]}"


WRONG_ADDRESSES = [
    (nobody, "no rollout server accepts connections there.*start it", "nothing listens"),
    (lambda: lying("hangs"), "no answer within", "it accepts, and never answers"),
    (lambda: lying("speaks_another_protocol"), "the connection broke", "another protocol"),
    (lambda: lying("knows_no_path"), "status 404.*is this a rollout server", "another web server"),
]


@pytest.mark.scenario("Invalid server configuration fails fast")
@pytest.mark.parametrize(
    ("address", "message"), [case[:2] for case in WRONG_ADDRESSES], ids=[case[2] for case in WRONG_ADDRESSES]
)
def test_a_run_without_reachable_servers_fails_before_loading(address: Any, message: str, tmp_path: Path) -> None:
    with FakeRolloutServer(1) as good, address() as url:
        began = time.monotonic()
        with pytest.raises(RolloutError, match=message) as refused:
            check_run(server_run(tmp_path, [good.url, url]))
        assert time.monotonic() - began < 20
        assert url in str(refused.value)
        # The way back is one key.
        with pytest.raises(Exception, match="/nowhere"):
            check_run(server_run(tmp_path, [good.url, url], rollout_matching__rollout_backend="hf"))


@pytest.mark.parametrize(
    ("trainer_gpu", "has_vllm", "error", "message"),
    [
        (None, True, ConfigError, "the server is on GPUs and this trainer is not"),
        ("GPU-1", False, MissingDependency, "NCCL binding, which the trainer needs too; pip install"),
        ("GPU-0", True, ConfigError, r"on the same GPU \(GPU-0\).*launch\.server_devices.*mode: colocate"),
        ("GPU-1", True, None, ""),
    ],
    ids=["no GPU", "no vLLM", "one GPU for both", "a GPU each"],
)
def test_settings_that_prevent_pushes_are_refused_before_loading(
    trainer_gpu: str | None, has_vllm: bool, error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: trainer_gpu is not None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_vllm else None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid=trainer_gpu))
    worker = {"device": "cuda:0", "device_uuid": "GPU-0", "repeat_terminate": {"active": False, "config": None}}
    with FakeRolloutServer(1, {"server": "coordexp serve", "workers": [worker]}) as fake:
        if error is None:
            check_servers(section([fake.url]), 1)
        else:
            with pytest.raises(error, match=message):
                check_servers(section([fake.url]), 1)


@pytest.mark.scenario("vLLM server mode fails fast when cap is infeasible")
def test_four_ranks_on_two_devices_are_refused_when_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with FakeRolloutServer(1) as first, FakeRolloutServer(1) as second, pytest.raises(ConfigError) as refused:
        check_run(server_run(tmp_path, [first.url, second.url], rollout_matching__decode_batch_size=1))
    for cure in ("increase the rollout servers' world size", "reduce the trainer's world size", "decode_batch_size"):
        assert cure in str(refused.value)
