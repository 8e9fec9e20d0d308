"""A record is exact, strict, and enough to compute the target again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordexp.errors import DataError
from coordexp.matching import MatchingConfig
from coordexp.recording.rollout_record import (
    RolloutRecord,
    Settings,
    WhereInTraining,
    make_record,
    read_records,
    replay,
)
from coordexp.records import DropReason, GTObject, TokenRole, from_json, to_json
from coordexp.targets import TransportConfig
from support.answers import CAT, DOG, LEAF, answer, entry, outcome_of, record, tiny_vocab, vocabs

NEAR_LEAF = GTObject("leaf", "poly", (310, 25, 470, 22, 485, 195))
NEAR_CAT = GTObject("chat “noir” 龘", "bbox_2d", (12, 22, 202, 222))
TRUTH = [CAT, LEAF, DOG]
ANSWERS = {
    "found and missed": answer(entry(4, NEAR_CAT), entry(1, NEAR_LEAF), '"object_9": {"desc": ""}'),
    "truncated": "{" + entry(1, NEAR_CAT) + ', "object_2": {"desc',
    "nothing": "",
    "no JSON": "I see a cat.",
}


def made(vocab: Any, response: str = ANSWERS["found and missed"], settings: Settings | None = None) -> RolloutRecord:
    settings = settings or Settings(MatchingConfig(), TransportConfig(), "desc_first")
    got = outcome_of(
        response, TRUTH, vocab, settings.matching, field_order=settings.field_order, transport=settings.transport
    )
    return make_record(record(TRUTH), got, WhereInTraining(7, 1, 0, 3, 8), settings)


def at(step: int, sample_idx: int = 0, text: str = "") -> bytes:
    base = made(tiny_vocab(), "")
    return to_json(replace(base, where=WhereInTraining(step, 0, 0, sample_idx, 8), text=text)) + b"\n"


def read_back(record: RolloutRecord) -> RolloutRecord:
    line = to_json(record)
    assert b"\n" not in line
    return from_json(RolloutRecord, line, "a record")


@vocabs
@pytest.mark.parametrize("response", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_line_round_trips_and_replays(make_vocab, response: str) -> None:
    vocab = make_vocab()
    line = made(vocab, response)
    again = read_back(line)
    assert again == line
    assert replay(again, vocab) == ()


def test_a_record_describes_the_rollout() -> None:
    vocab = tiny_vocab()
    line = made(vocab)
    target = outcome_of(ANSWERS["found and missed"], TRUTH, vocab).target
    assert [(obj.index, obj.desc, obj.kind) for obj in line.parse.objects] == [
        (4, NEAR_CAT.desc, "bbox_2d"), (1, "leaf", "poly"),
    ]  # fmt: skip
    assert line.parse.dropped == {DropReason.MISSING_DESC: 1}
    assert (line.parse.max_object_index, line.target.appended_object_index) == (9, (10,))
    assert [(p.pred_idx, p.gt_idx) for p in line.match.pairs] == [(0, 0), (1, 1)]
    assert line.ground_truth == tuple(TRUTH)
    roles = [TokenRole[name] for name, count in line.target.roles for _ in range(count)]
    assert roles == target.roles_T.tolist()
    assert len(line.target.roles) < len(roles)
    assert list(line.target.coord_bin) == target.coord_bin_K.tolist()  # fractions of bins, exact to the bit
    assert not np.array_equal(target.coord_bin_K, np.round(target.coord_bin_K))
    assert (line.prompt.num_tokens, line.prompt.sha256) == (0, hashlib.sha256(b"").hexdigest())
    assert line.loss_by_role is None


def test_settings_take_part_in_the_replay() -> None:
    odd = Settings(MatchingConfig(maskiou_gate=0.95, fp_cost=0.5), TransportConfig("l1", 3.0, 7), "geometry_first")
    line = read_back(made(tiny_vocab(), settings=odd))
    assert replay(line, tiny_vocab()) == ()
    defaults = replace(line, settings=Settings(MatchingConfig(), TransportConfig(), "desc_first"))
    assert any(text.startswith("match.pairs: recorded") for text in replay(defaults, tiny_vocab()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: {"response_token_ids": r.response_token_ids[:-20]}, "parse.objects"),
        (lambda r: {"truncated": True, "response_token_ids": r.response_token_ids[:-1]}, "parse.truncated"),
        (lambda r: {"match": replace(r.match, num_gate_rejections=5)}, "match.num_gate_rejections"),
        (lambda r: {"ground_truth": r.ground_truth[:2]}, "target.token_ids"),
        (lambda r: {"target": replace(r.target, roles=(("EOS", 3),))}, "target.roles"),
    ],
)
def test_replay_names_differences(change, named: str) -> None:
    line = made(tiny_vocab())
    assert named in [text.split(":")[0] for text in replay(replace(line, **change(line)), tiny_vocab())]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d | {"schema_version": 2}, "not a rollout record of schema version 3: another version of CoordExp"),
        (lambda d: d | {"schema_version": "3"}, "schema_version"),
        (lambda d: d | {"width": "128"}, "width"),
        (lambda d: {k: v for k, v in d.items() if k != "parse"}, "parse"),
        (lambda d: d | {"parse": d["parse"] | {"dropped": {"no_such_reason": 1}}}, "dropped"),
        (lambda d: d | {"settings": d["settings"] | {"matching": d["settings"]["matching"] | {"maskiou_gate": 3.0}}},
         "maskiou_gate"),
        (lambda d: d | {"where": {"step": 1}}, "global_step"),
    ],
)  # fmt: skip
def test_reading_is_strict(tmp_path: Path, change, complaint: str) -> None:
    path = tmp_path / "rollouts_rank0.jsonl"
    path.write_bytes(at(0) + json.dumps(change(json.loads(at(1)))).encode() + b"\n")
    with pytest.raises(DataError, match=rf"rollouts_rank0\.jsonl:2: .*{complaint}"):
        read_records(path)


def places(path: Path) -> list[tuple[int, int, str]]:
    return [(r.where.global_step, r.where.sample_idx, r.text) for r in read_records(path)]


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        pytest.param([at(0), at(0, 1), at(5)], [(0, 0, ""), (0, 1, ""), (5, 0, "")], id="one run"),
        pytest.param(
            [at(0), at(5), at(10), at(5, text="again")], [(0, 0, ""), (5, 0, "again")],
            id="resumed before step 5: later lines are dropped",
        ),
        pytest.param(
            [at(0, 0), at(0, 1), at(0, 0, "again")], [(0, 1, ""), (0, 0, "again")], id="resumed within the same step",
        ),
        pytest.param(
            [at(2, k) for k in range(3)] + [at(2, k, "again") for k in range(3)], [(2, k, "again") for k in range(3)],
            id="a whole step again",
        ),
        pytest.param([at(0), at(5), b'{"schema_ver'], [(0, 0, ""), (5, 0, "")], id="an incomplete line"),
        pytest.param([], [], id="nothing yet"),
    ],
)  # fmt: skip
def test_later_lines_win(tmp_path: Path, lines: list[bytes], kept: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "rollouts_rank0.jsonl"
    path.write_bytes(b"".join(lines))
    assert places(path) == kept


def test_a_folder_is_read_rank_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        (tmp_path / f"rollouts_rank{rank}.jsonl").write_bytes(at(rank))
    assert [step for step, _, _ in places(tmp_path)] == [0, 2, 10]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="rollouts_rank"):
        read_records(tmp_path / "empty")
    with pytest.raises(DataError, match="not readable: No such file"):
        read_records(tmp_path / "missing.jsonl")
