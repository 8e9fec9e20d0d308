"""Seeds of a call to ``swift rollout``; each of its workers counts its requests from 0."""

from __future__ import annotations

import pytest

pytest.importorskip("swift", reason="the plugin runs inside ms-swift")

from swift.infer_engine.protocol import RequestConfig

from coordexp.engine.engine_process import seeded_by_place


def test_seeds_do_not_depend_on_the_worker() -> None:
    config = RequestConfig(max_tokens=9, temperature=0.7, seed=100)
    sizes = [3, 2, 2]
    of_workers = seeded_by_place(config, sizes)
    firsts = [one.seed for one in of_workers if one is not None and one.seed is not None]
    drawn = [first + own for first, size in zip(firsts, sizes, strict=True) for own in range(size)]
    assert drawn == list(range(100, 107))
    assert {(one.max_tokens, one.temperature) for one in of_workers if one} == {(9, 0.7)} and config.seed == 100


def test_without_a_seed_none_is_set() -> None:
    assert seeded_by_place(None, [1, 1]) == [None, None]
    assert [one.seed for one in seeded_by_place(RequestConfig(), [2, 1]) if one] == [None, None]
