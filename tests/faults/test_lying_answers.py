"""Servers with wrong answers: one real backend, one server, one wrong answer per row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordexp.engine.trainer.server_backend import ServerBackend
from coordexp.errors import CoordExpError
from coordexp.rollouts import RolloutRound, SeedContext
from support.fake_servers import FakeRolloutServer
from support.server_backends import answers, backend_of, requests_

OURS = {"server": "coordexp serve", "engine_silent_s": 0.0, "workers": []}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(1, OURS) as running:
        yield running


@pytest.fixture(scope="module")
def backend(fake: FakeRolloutServer) -> Iterator[ServerBackend]:
    with backend_of([fake], max_new_tokens=4, decode_batch_size=8) as made:
        made.sync_weights(0)
        yield made


def at(path: str, value: Any) -> Callable[[list[Any]], Any]:
    """Correct answers with another value at ``path`` of the second; ``...`` removes it."""

    def lie(items: list[Any]) -> Any:
        here: Any = items[1]
        *before, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in before:
            here = here[part]
        if value is ...:
            del here[last]
        else:
            here[last] = value
        return items

    return lie


TOKENS, FINISH = "response.choices.0.token_ids", "response.choices.0.finish_reason"
LIES: dict[str, Callable[[list[Any]], Any]] = {
    "swapped within the call": lambda items: items[::-1],
    "one answer twice": lambda items: [items[0], copy.deepcopy(items[0]), items[2]],
    "rotated": lambda items: items[1:] + items[:1],
    "one too few": lambda items: items[:-1],
    "one too many": lambda items: [*items, items[0]],
    "none": lambda items: [],
    "null": lambda items: None,
    "an object": lambda items: {"answers": items},
    "a text": lambda items: "ok",
    "a number": lambda items: 3,
    "answers that are null": lambda items: [None] * 3,
    "answers that are lists": lambda items: [[one] for one in items],
    "no envelope": at("coordexp", ...),
    "envelope null": at("coordexp", None),
    "no version": at("coordexp.weight_version", ...),
    "weights of the future": at("coordexp.weight_version", 1),
    "version as text": at("coordexp.weight_version", "0"),
    "no place": at("coordexp.uuid", ...),
    "another place": at("coordexp.uuid", "7"),
    "no response": at("response", {}),
    "two choices": at("response.choices", [{"token_ids": [9], "finish_reason": "stop"}] * 2),
    "choices null": at("response.choices", None),
    "tokens null": at(TOKENS, None),
    "tokens that are texts": at(TOKENS, ["9"]),
    "tokens beyond any integer": at(TOKENS, [10**30]),
    "more tokens than allowed": at(TOKENS, [9] * 5),
    "480 tokens": at(TOKENS, [9] * 480),
    "tokens nested": at(TOKENS, [[9]]),
    "finish reason null": at(FINISH, None),
    "finish reason unknown": at(FINISH, "tired"),
    "prompt as text": at("response.prompt_token_ids", "1 2"),
}
STATUSES = (204, 301, 302, 307, 400, 401, 403, 404, 408, 409, 413, 429, 500, 502, 503, 504)


def ask(backend: ServerBackend) -> list[Any]:
    return list(backend.generate_rounds([RolloutRound(requests_(3), SeedContext(0, 0, 0, 0))]))


def test_correct_answers_are_accepted(fake: FakeRolloutServer, backend: ServerBackend) -> None:
    fake.infer = answers
    assert [one.rollout.response_token_ids for one in ask(backend)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_ends_the_step_and_names_the_server(
    lie: str, fake: FakeRolloutServer, backend: ServerBackend, seen: Callable[[object], None]
) -> None:
    fake.infer = lambda body: (200, LIES[lie](answers(body)[1]))
    with pytest.raises(CoordExpError) as refused:
        ask(backend)
    assert fake.url in str(refused.value) and len(str(refused.value)) < 2000
    seen(refused.value)


@pytest.mark.parametrize("status", STATUSES)
def test_an_error_status_ends_the_step(
    status: int, fake: FakeRolloutServer, backend: ServerBackend, seen: Callable[[object], None]
) -> None:
    """A redirection is not followed: it could lead anywhere."""
    fake.infer = lambda body: (status, {"error": "as told"})
    with pytest.raises(CoordExpError) as refused:
        ask(backend)
    assert fake.url in str(refused.value)
    seen(refused.value)
