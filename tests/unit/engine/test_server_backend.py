"""The server backend against fake servers over real HTTP: requests of each server, retries, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordexp import distributed
from coordexp.data.dataset import RecordDataset
from coordexp.engine.trainer import server_backend as vllm_server
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.trainer.server_backend import check_servers
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.evaluation.answers import answer_dataset
from coordexp.records import GTObject, ImageRecord
from coordexp.rollouts import DatasetSeeds, RolloutRound, SeedContext
from coordexp.rollouts.chunking import Post
from support.fake_servers import FakeRolloutServer, numbered_image
from support.qwen_tokenizer import qwen_vocab
from support.server_backends import PretendSync, answers, backend_of, numbers, requests_, section

SEEDS = SeedContext(1, 2, 0, 0)


@pytest.fixture
def fakes() -> Iterator[list[FakeRolloutServer]]:
    with FakeRolloutServer(2) as two, FakeRolloutServer(1) as one:
        two.infer = one.infer = answers
        yield [two, one]


def test_requests_are_split_by_capacity_and_answers_keep_their_order(fakes: list[FakeRolloutServer]) -> None:
    with backend_of(fakes) as backend:
        backend.sync_weights(3)
        rollouts = backend.generate(requests_(8), SEEDS)
        report = backend.last_report()
    assert [rollout.response_token_ids for rollout in rollouts] == [(i,) for i in range(8)]
    assert {rollout.weight_version for rollout in rollouts} == {3}
    # Six slots a round: four of server 0, two of server 1; then the last two.
    assert sorted(numbers(call) for call in fakes[0].calls) == [[0, 1, 2, 3], [6, 7]]
    assert [numbers(call) for call in fakes[1].calls] == [[4, 5]]
    for fake in fakes:
        for call in fake.calls:
            assert call["request_config"]["seed"] == SEEDS.seed_of(numbers(call)[0])
    assert [(c["server"], c["first"], c["requests"], c["seed"]) for c in report["calls"]] == [
        (0, 0, 4, SEEDS.seed_of(0)), (1, 4, 2, SEEDS.seed_of(4)), (0, 6, 2, SEEDS.seed_of(6)),
    ]  # fmt: skip


@pytest.mark.scenario("Multi-server request distribution is deterministic")
@pytest.mark.parametrize("slow", [0, 1])
def test_answers_keep_the_order_of_requests_if_a_server_is_slow(fakes: list[FakeRolloutServer], slow: int) -> None:
    """Twelve requests in four posts. The slow server answers only when the other has answered everything."""
    other_is_done = threading.Event()
    left = 2

    def quick(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal left
        left -= 1
        if left == 0:
            threading.Timer(0.1, other_is_done.set).start()
        return answers(body)

    def late(body: dict[str, Any]) -> tuple[int, Any]:
        assert other_is_done.wait(20)
        return answers(body)

    fakes[slow].infer, fakes[1 - slow].infer = late, quick
    with backend_of(fakes) as backend:
        backend.sync_weights(3)
        reported: list[int] = []
        rollouts = backend.generate(requests_(12), SEEDS, reported.append)
    assert reported == list(range(1, 13)), "each answer is reported when it has arrived"
    assert [rollout.response_token_ids for rollout in rollouts] == [(i,) for i in range(12)]
    assert [rollout.sample_id for rollout in rollouts] == [f"s{i}" for i in range(12)]


def test_every_rank_expects_the_weights_of_rank_0(
    fakes: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "gather_json", lambda own: [{"trainer_id": "of rank 0"}, own])
    with backend_of(fakes) as backend:
        backend.sync_weights(4)
        report = backend.last_report()
    assert (report["weight_version"], report["sync"]["trainer_id"]) == (4, "of rank 0")


@pytest.mark.parametrize(
    ("status", "marks_answers"),
    [
        (None, False),
        ({"server": "swift rollout", "workers": []}, True),
        ({"server": "coordexp serve", "workers": []}, True),
    ],
)
def test_guarding_servers_get_the_index_of_each_request(status: dict[str, Any] | None, marks_answers: bool) -> None:
    with FakeRolloutServer(1, status) as fake, backend_of([fake]) as backend:
        fake.infer = answers
        backend.sync_weights(0)
        backend.generate(requests_(2), SeedContext(0, 0, 0, 0))
        sent = [request.get("uuid") for call in fake.calls for request in call["infer_requests"]]
        assert sent == (["0", "1"] if marks_answers else [None, None])


OURS = {"server": "coordexp serve", "workers": []}
SWIFTS = {"server": "swift rollout", "workers": []}


@pytest.mark.parametrize(
    ("status", "temperature", "posts"),
    [
        (OURS, 0.0, [[[0], [1], [2], [3], [6], [7]], [[4], [5]]]),
        (OURS, 0.7, [[[0], [1], [2], [3], [6], [7]], [[4], [5]]]),
        (SWIFTS, 0.7, [[[0], [1], [2], [3], [6], [7]], [[4], [5]]]),
        # ms-swift answers one post after the other, and a post of one request by its first worker alone.
        (SWIFTS, 0.0, [[[0, 1, 2, 3], [6, 7]], [[4, 5]]]),
        (None, 0.0, [[[0, 1, 2, 3], [6, 7]], [[4, 5]]]),
    ],
    ids=["ours", "ours, sampled", "swift, sampled", "swift with our plugin", "swift"],
)
def test_only_greedy_calls_to_ms_swift_share_a_post(
    fakes: list[FakeRolloutServer], status: dict[str, Any] | None, temperature: float, posts: list[list[list[int]]]
) -> None:
    rounds = [RolloutRound(requests_(1, i), SeedContext(1, 2, i, 0)) for i in range(8)]
    for fake in fakes:
        fake.status = status
    with backend_of(fakes, decoding__temperature=temperature) as backend:
        backend.sync_weights(0)
        got = {(a.round_idx, a.index): a.rollout.response_token_ids for a in backend.generate_rounds(rounds)}
    assert got == {(i, 0): (i,) for i in range(8)}
    assert [sorted(numbers(call) for call in fake.calls) for fake in fakes] == posts
    for call in [*fakes[0].calls, *fakes[1].calls]:
        first, *_ = numbers(call)
        assert call["request_config"]["seed"] == SeedContext(1, 2, first, 0).seed_of(0)


@pytest.mark.parametrize("status", [OURS, SWIFTS, None], ids=["ours", "with our plugin", "without"])
def test_greedy_rounds_are_greedy_on_servers(fakes: list[FakeRolloutServer], status: dict[str, Any] | None) -> None:
    rounds = [RolloutRound(requests_(2, 2 * k), DatasetSeeds(1, 0, k, k), greedy=k == 0) for k in range(3)]
    for fake in fakes:
        fake.status = status
    with backend_of(fakes, decoding__temperature=0.7) as backend:
        backend.sync_weights(0)
        assert len(list(backend.generate_rounds(rounds))) == 6
    asked = [(number, call["request_config"]["temperature"]) for fake in fakes for call in fake.calls
             for number in numbers(call)]  # fmt: skip
    assert sorted(asked) == [(0, 0.0), (1, 0.0), (2, 0.7), (3, 0.7), (4, 0.7), (5, 0.7)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("status", [OURS, SWIFTS, None], ids=["ours", "with our plugin", "without"])
def test_the_log_describes_each_call(
    fakes: list[FakeRolloutServer], status: dict[str, Any] | None, temperature: float
) -> None:
    """Every call with its server, its requests and its seed, however calls were joined into posts."""
    rounds = [RolloutRound(requests_(2, 2 * i), SeedContext(1, 2, i, 0)) for i in range(5)]
    for fake in fakes:
        fake.status = status
    with backend_of(fakes, decoding__temperature=temperature) as backend:
        backend.sync_weights(0)
        assert len(list(backend.generate_rounds(rounds))) == 10
        calls = backend.last_report()["calls"]
    logged = {}
    for call in calls:
        first = 2 * call["micro_step"] + call["first"]
        logged.setdefault((call["server"], call["post"], call["seed"]), []).extend(
            range(first, first + call["requests"])
        )
    sent = [(s, post["request_config"]["seed"], numbers(post)) for s, fake in enumerate(fakes) for post in fake.calls]
    assert sorted(sent) == sorted((server, seed, asked) for (server, _, seed), asked in logged.items())


def test_evaluation_keeps_every_device_busy(fakes: list[FakeRolloutServer]) -> None:
    """With two samples at a time (one device's worth) the second server would never get a request."""
    records = [ImageRecord(str(i), numbered_image(i), 9, 9, (GTObject("x", "bbox_2d", (1, 2, 3, 4)),))
               for i in range(9)]  # fmt: skip
    dataset = RecordDataset(records, lambda record: requests_(1, int(record.sample_id))[0], "file")
    with backend_of(fakes) as backend:
        backend.sync_weights(0)
        predictions = answer_dataset(dataset, backend, qwen_vocab(), seed=5)
    assert [one.sample_id for one in predictions] == [str(i) for i in range(9)]
    assert [[numbers(call) for call in fake.calls] for fake in fakes] == [[[0, 1, 2, 3], [6, 7]], [[4, 5], [8]]]
    for fake in fakes:  # each sample has the seed of its place, whichever server answers it
        for call in fake.calls:
            assert call["request_config"]["seed"] == DatasetSeeds(5, 0).seed_of(numbers(call)[0])


@pytest.mark.parametrize(("ranks", "size"), [(1, 6), (2, 3), (4, 1)])
def test_ranks_share_the_devices(
    fakes: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch, ranks: int, size: int
) -> None:
    with backend_of(fakes) as backend:
        monkeypatch.setattr(distributed, "world_size", lambda: ranks)
        assert backend.batch_size == size


def test_without_requests_no_server_is_called(fakes: list[FakeRolloutServer]) -> None:
    with backend_of(fakes) as backend:
        asked = [len(fake.seen) for fake in fakes]
        assert backend.generate([], SEEDS) == []
        assert list(backend.generate_rounds([RolloutRound((), SEEDS)])) == []
    assert [len(fake.seen) for fake in fakes] == asked


def test_servers_with_weights_of_another_run_get_no_requests(fakes: list[FakeRolloutServer]) -> None:
    with backend_of(fakes, PretendSync(failure=RolloutError("the cable"))) as backend:
        with pytest.raises(RolloutError, match="sync_weights"):
            backend.generate(requests_(1), SEEDS)
        with pytest.raises(RolloutError, match="the cable"):
            backend.sync_weights(1)
        with pytest.raises(RolloutError, match="sync_weights"):
            backend.generate(requests_(1), SEEDS)
    assert not fakes[0].calls


def failing_first(times: int, code: int) -> Any:
    left = [times]

    def infer(body: dict[str, Any]) -> tuple[int, Any]:
        left[0] -= 1
        return (code, {"detail": "engine hiccup"}) if left[0] >= 0 else answers(body)

    return infer


@pytest.mark.parametrize(
    ("times", "code", "status", "retries", "error"),
    [
        (1, 500, {"workers": []}, 1, None),  # succeeds, is logged and counted
        (2, 500, {"workers": []}, 1, "engine hiccup"),
        (1, 400, {"workers": []}, 0, "engine hiccup"),  # refused for good
        (1, 500, None, 1, "does not report which weights it has"),  # ms-swift's own: it may have been restarted
    ],
)
def test_calls_are_retried_unless_refused(
    times: int, code: int, status: dict[str, Any] | None, retries: int, error: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(vllm_server, "RETRY_WAIT_S", 0.01)
    with FakeRolloutServer(1, status) as fake:
        fake.infer = failing_first(times, code)
        with backend_of([fake], decoding__temperature=0.7) as backend:
            backend.sync_weights(0)
            if error is None:
                assert len(backend.generate(requests_(2), SEEDS)) == 2
                first, second = fake.calls
                assert first == second, "the same seed, or samples would depend on the network"
            else:
                with pytest.raises(ServerRefused, match=error):
                    backend.generate(requests_(2), SEEDS)
            assert backend.take_metrics()["rollout/server_retries_total"] == retries
            assert backend.take_metrics()["rollout/server_retries_total"] == 0
    assert sum("retry 1 of 1" in record.getMessage() for record in caplog.records) == retries


@pytest.mark.parametrize(("outages", "retries"), [(2, 3), (2, 2)])
def test_a_server_that_is_not_reached_for_a_while_gets_all_retries(
    outages: int, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "RETRY_WAIT_S", 0.01)
    with FakeRolloutServer(1, OURS) as fake:
        fake.infer = failing_first(1, 503)
        with backend_of([fake], vllm__server__retries=retries) as backend:
            backend.sync_weights(0)
            status, left = ServerClient.status, [outages]

            def unreachable(client: ServerClient) -> Any:
                left[0] -= 1
                if left[0] >= 0:
                    raise ServerUnreachable("no route")
                return status(client)

            monkeypatch.setattr(ServerClient, "status", unreachable)
            if outages < retries:
                assert len(backend.generate(requests_(2), SEEDS)) == 2
            else:
                with pytest.raises(ServerUnreachable, match="no route"):
                    backend.generate(requests_(2), SEEDS)
            assert backend.take_metrics()["rollout/server_retries_total"] == retries


def test_an_unresponsive_server_ends_the_run_even_without_a_timeout(
    fakes: list[FakeRolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """infer_timeout_s: null sets no deadline for answers; a dead machine must still end the wait."""
    monkeypatch.setattr(vllm_server, "WATCH_S", 0.1)
    fakes[0].status = {"server": "coordexp serve", "workers": []}  # this one answers while it decodes
    with backend_of(fakes) as backend:
        backend.sync_weights(0)
        fakes[0].wedged.set()
        started = time.monotonic()
        with pytest.raises(ServerTimeout, match="gave no sign of life"):
            backend.generate(requests_(6), SEEDS)
        assert time.monotonic() - started < 30


def test_a_slow_server_that_keeps_answering_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server may miss health checks; its answers show that it is alive."""
    now = [0.0]

    def slow_posts(posts: Sequence[Post], _: Any, ask: Any, watch: Any, __: float) -> Iterator[tuple[Post, Any]]:
        for post in posts:
            for _ in range(2):
                watch({post.server})
                now[0] += 0.4  # timeout_s is 1
            yield post, ask(post)

    def silent(self: ServerClient, timeout_s: float | None = None) -> float:
        raise ServerTimeout("no answer")

    with FakeRolloutServer(1, status={"server": "coordexp serve", "workers": []}) as fake:
        fake.infer = answers
        with backend_of([fake]) as backend:
            backend.sync_weights(0)
            monkeypatch.setattr(ServerClient, "engine_stall_seconds", silent)
            monkeypatch.setattr(vllm_server, "in_flight", slow_posts)
            monkeypatch.setattr(vllm_server, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
            assert len(backend.generate(requests_(8), SEEDS)) == 8
    assert len(fake.calls) == 4


def test_a_guard_that_cannot_be_verified_fails_at_start(fakes: list[FakeRolloutServer]) -> None:
    with pytest.raises(RolloutError, match=r"repeat_terminate is not active as configured.*its workers report \[\]"):
        check_servers(section([fakes[0].url], repeat_terminate={"enabled": True}), 1)


def test_a_server_of_another_trainer_is_refused_at_start() -> None:
    worker = {"owner": "trainer 3f (process 7 on here: coordexp train a.yaml)", "repeat_terminate": None}
    with (
        FakeRolloutServer(1, {"server": "coordexp serve", "workers": [worker]}) as fake,
        pytest.raises(RolloutError, match=r"belongs to trainer 3f \(process 7 on here: .*, which is connected"),
    ):
        check_servers(section([fake.url]), 1)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"max_model_len": 1023}, r"http\S+: its max_model_len is 1023, and 1024 in this run"),
        ({"max_model_len": 2048}, None),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, and float32 in this run"),
        ({"kv_cache_dtype": "fp8"}, "its kv_cache_dtype is fp8, and auto in this run"),
    ],
)
def test_a_server_that_was_started_with_another_engine_is_refused_at_start(
    server: dict[str, Any], message: str | None
) -> None:
    engine = {"max_model_len": 1024, "dtype": "float32", "kv_cache_dtype": "auto", **server}
    with FakeRolloutServer(1, {"server": "coordexp serve", "workers": [{"engine": engine}]}) as fake:
        config = section([fake.url])
        own = config.vllm.model_copy(update={"max_model_len": 1024, "dtype": "float32"})
        config = config.model_copy(update={"vllm": own})
        if message is None:
            check_servers(config, 1)
        else:
            with pytest.raises(RolloutError, match=message):
                check_servers(config, 1)
