"""If a server reports wrong weights or has another model, the push ends with a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import CoordExpError, RolloutError
from support.fake_servers import FakePushServer
from support.fused_model import FakeWeights

COMMIT = "/process_weights_after_loading/"


@contextmanager
def pushing(source: Any, interfere: dict[str, Callable[[Any], Any]]) -> Iterator[tuple[ServerPusher, FakePushServer]]:
    server = FakePushServer()
    server.interfere = interfere
    sync = ServerPusher([server.client()], source, SyncConfig(bucket_mb=1, timeout_s=10.0))
    try:
        yield sync, server
    finally:
        sync.close()
        server.close()


def with_report(**change: Any) -> Callable[[Any], Any]:
    return lambda reply: {"reports": [{**reply["reports"][0], **change}]}


COMMITS: dict[str, Callable[[Any], Any]] = {
    "null": lambda reply: "null",  # a string: the fake sends what is None as 404
    "no reports": lambda reply: {"message": "committed"},
    "reports: null": lambda reply: {"reports": None},
    "reports: nothing": lambda reply: {"reports": []},
    "reports: two of one worker": lambda reply: {"reports": reply["reports"] * 2},
    "reports: [null]": lambda reply: {"reports": [None]},
    "reports: an object": lambda reply: {"reports": reply["reports"][0]},
    "not found": lambda reply: None,
    "a list": lambda reply: [],
    "version null": with_report(weight_version=None),
    "version as text": with_report(weight_version="1"),
    "checksum null": with_report(checksum=None),
}


@pytest.mark.parametrize("lie", COMMITS)
def test_a_push_with_a_wrong_report_fails(lie: str, seen: Callable[[object], None]) -> None:
    with pushing(FakeWeights(), {COMMIT: COMMITS[lie]}) as (sync, _), pytest.raises(RolloutError) as refused:
        sync.push(1)
    assert "127.0.0.1" in str(refused.value) and len(str(refused.value)) < 1500
    seen(refused.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.language.layer.q_proj.weight", (4, 5)),
        ("model.language.layer.norm.weight", (7,)),
        ("model.language.embed.weight", (9, 3)),
        ("visual.qkv.bias", (5,)),
        ("model.language.layer.another.weight", (3,)),
    ],
    ids=["wider", "a longer norm", "more tokens than rows", "a shorter bias", "one weight more"],
)
def test_weights_of_another_model_are_refused_by_name(
    name: str, shape: tuple[int, ...], seen: Callable[[object], None]
) -> None:
    source = FakeWeights()
    source.values[name] = torch.zeros(shape)
    with pushing(source, {}) as (sync, server), pytest.raises(CoordExpError) as refused:
        sync.push(1)
    said = str(refused.value)
    assert "127.0.0.1" in said and name in said, said
    assert "differ in kind or size" in said or "must be the same architecture" in said, said
    assert server.receiver.report()["weight_version"] != 1
    seen(said)
