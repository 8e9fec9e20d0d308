"""Metrics: counters of a rollout window, one aggregation rule per family, the payload and the table of names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from coordexp import distributed
from coordexp.coords import TURN_END
from coordexp.metrics import MetricsPayload, MetricSums, reduce_metrics, rollout_counters
from coordexp.metrics.reduce import SCHEMA_VERSION
from coordexp.metrics.table import Metric, Rule, all_metrics, find_metric, rule_of
from coordexp.records import GTObject
from support.answers import CAT, DOG, LEAF, NEAR_CAT, answer, entry, outcome_of
from support.qwen_tokenizer import qwen_vocab
from support.torchrun import torchrun

# --- counters of a rollout window ---

FAR = GTObject("cat", "bbox_2d", (190, 200, 420, 400))  # touches CAT and LEAF, finds neither


@pytest.mark.parametrize(
    ("response", "counts"),
    [
        (answer(entry(1, NEAR_CAT)), {"valid_pred_objects": 1, "matched": 1, "fn_appended": 2}),
        (answer(entry(1, NEAR_CAT), entry(2, FAR)),
         {"valid_pred_objects": 2, "matched": 1, "fn_appended": 2, "fp": 1, "gating_rejections": 2}),
        (answer('"object_1": {"desc": ""}'), {"fn_appended": 3, "dropped/missing_desc": 1}),
        (answer('"object_1": 5', '"x": {}'), {"fn_appended": 3, "dropped/not_an_object": 1, "dropped/key_invalid": 1}),
        (f"{{{entry(1, NEAR_CAT)}, {entry(2)[:-20]}",
         {"valid_pred_objects": 1, "matched": 1, "fn_appended": 2, "parse_truncated": 1, "dropped/truncated": 1}),
        ("", {"fn_appended": 3, "parse_truncated": 1}),
        (TURN_END, {"fn_appended": 3}),
    ],
)  # fmt: skip
def test_one_sample(response, counts):
    vocab = qwen_vocab()
    got = rollout_counters([outcome_of(response, [CAT, LEAF, DOG], vocab)])
    want = {f"rollout/{name}" + ("" if "/" in name else "_total"): n for name, n in counts.items()}
    want |= {"rollout/samples_total": 1, "rollout/gt_objects_total": 3}
    want["rollout/gen_new_tokens_total"] = len(vocab.encode(response))
    want["rollout/parse_dropped_invalid"] = sum(n for name, n in counts.items() if name.startswith("dropped/"))
    want["rollout/prefix_coord_targets_total"] = 4 * counts.get("matched", 0)
    assert {name: n for name, n in got.items() if n} == {name: n for name, n in want.items() if n}


def test_pairs_of_a_box_and_a_polygon_are_counted():
    cat_as_polygon = GTObject("cat", "poly", (10, 20, 200, 20, 200, 220, 10, 220))
    response = answer(entry(1, NEAR_CAT))
    mixed, same = (outcome_of(response, [truth], qwen_vocab()) for truth in (cat_as_polygon, CAT))
    assert rollout_counters([mixed, same, mixed])["match/mixed_kind_total"] == 2


def test_samples_add_up():
    vocab = qwen_vocab()
    one, two = (outcome_of(text, [CAT], vocab) for text in (answer(entry(1, NEAR_CAT)), answer(entry(1, FAR))))
    together = rollout_counters([one, two])
    assert together["rollout/matched_total"] == together["rollout/fp_total"] == 1
    first, second = rollout_counters([one]), rollout_counters([two])
    assert together == {name: first[name] + second[name] for name in {*first, *second}}
    assert rollout_counters([]) == {}


def test_answer_ended_by_the_repeat_guard_is_counted():
    sound = outcome_of(answer(entry(1, NEAR_CAT)), [CAT], qwen_vocab())
    ended = replace(sound, rollout=replace(sound.rollout, repeat_terminated=True))
    assert rollout_counters([sound, ended])["rollout/repeat_terminate_triggered_sequences"] == 1


# --- over ranks and steps ---


def over_ranks(monkeypatch, *ranks):
    """``reduce_metrics`` on one of several ranks with the sums ``ranks``."""
    monkeypatch.setattr(distributed, "gather_json", lambda mine: list(ranks))
    return reduce_metrics(ranks[0])


@pytest.mark.parametrize(
    ("name", "first", "second", "together"),
    [
        ("rollout/samples_total", 3, 4, 7),
        ("rollout/dropped/wrong_arity", 1, 2, 3),
        ("loss/token_ce/struct_ce", 0.25, 0.5, 0.75),  # shares of one global mean
        ("coord_diag/p_target", 0.1, 0.2, 0.3),
        ("time/forward_s", 5.0, 3.0, 5.0),
        ("rollout/gen_new_tokens_p99", 12.0, 20.0, 20.0),
        ("rollout/repeat_terminate_active", 1, 1, 1),  # a flag, not a count
        ("rollout/decode_greedy", 1, 1, 1),
        ("rollout/decode_beam", 1, 1, 1),
        ("rollout/decode_sample", 1, 1, 1),
        ("packing/buffer_segments", 3, 4, 7),  # a state of each rank's own buffer
        ("stage2/channel_b", 1.0, 1.0, 1.0),  # the schedule is the same on every rank
        ("stage2/b_ratio_realised", 0.5, 0.5, 0.5),
    ],
)
def test_metric_is_combined_over_ranks_by_its_rule(monkeypatch, name, first, second, together):
    assert over_ranks(monkeypatch, {name: first}, {name: second})[name] == pytest.approx(together)


@pytest.mark.parametrize(
    ("rate", "first", "second", "value"),
    [
        ("rollout/parse_truncated_rate", {"rollout/parse_truncated_total": 1, "rollout/samples_total": 3},
         {"rollout/parse_truncated_total": 4, "rollout/samples_total": 7}, 0.5),
        ("rollout/match_rate", {"rollout/matched_total": 1, "rollout/gt_objects_total": 1},
         {"rollout/matched_total": 0, "rollout/gt_objects_total": 9}, 0.1),
        ("rollout/precision", {"rollout/matched_total": 3, "rollout/valid_pred_objects_total": 4},
         {"rollout/matched_total": 0, "rollout/valid_pred_objects_total": 0}, 0.75),
        ("rollout/gen_new_tokens_mean", {"rollout/gen_new_tokens_total": 32, "rollout/samples_total": 4},
         {"rollout/gen_new_tokens_total": 32, "rollout/samples_total": 4}, 8.0),
        ("rollout/match_rate", {"rollout/gt_objects_total": 0}, {}, 0.0),
        ("packing/post_rollout_fill", {"packing/selected_tokens_total": 90, "packing/capacity_tokens_total": 100},
         {"packing/selected_tokens_total": 30, "packing/capacity_tokens_total": 300}, 0.3),
    ],
)  # fmt: skip
def test_rate_is_a_ratio_of_sums(monkeypatch, rate, first, second, value):
    assert over_ranks(monkeypatch, first, second)[rate] == pytest.approx(value)


def test_rate_without_its_denominator_is_not_reported(monkeypatch):
    got = over_ranks(monkeypatch, {"rollout/matched_total": 1}, {"rollout/fp_total": 2})
    assert got == {"rollout/matched_total": 1.0, "rollout/fp_total": 2.0}


def test_keys_are_sorted_on_a_single_rank():
    got = reduce_metrics({"time/pack_s": 2, "loss": 1, "rollout/samples_total": 4, "rollout/parse_truncated_total": 1})
    assert list(got) == sorted(got)
    assert got["rollout/parse_truncated_rate"] == 0.25


@pytest.mark.parametrize("name", ["time/forward", "rollout/new_total", "a", "", "rollout/dropped/a/b"])
def test_unregistered_name_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        MetricSums().add({name: 1})


@pytest.mark.parametrize(
    ("name", "values", "one_step", "two_steps"),
    [
        # values of three micro-steps; the line of one step, and of two such steps
        ("rollout/samples_total", (2, 3, 4), 9, 18),
        ("loss/token_ce/struct_ce", (0.1, 0.2, 0.3), 0.6, 0.6),
        ("time/forward_s", (1, 5, 2), 8, 8),
        ("rollout/gen_new_tokens_p99", (7, 9, 8), 9, 9),
        ("packing/buffer_segments", (5, 4, 3), 3, 3),
    ],
)
def test_metric_is_combined_over_micro_steps_and_steps(name, values, one_step, two_steps):
    for steps, expected in ((1, one_step), (2, two_steps)):
        sums = MetricSums()
        for _ in range(steps):
            sums.steps += 1
            for value in values:
                sums.add({name: value})
        assert sums.take()[name] == pytest.approx(expected)
        assert (sums.steps, sums.take()) == (0, {}), "a new line starts"


RANKS = """
import torch.distributed as dist
from coordexp import distributed
from coordexp.metrics import reduce_metrics

dist.init_process_group("gloo")
me = distributed.rank()
assert distributed.world_size() == 2 and distributed.is_main() == (me == 0)
assert distributed.all_reduce([1.0, 2.0 + me], "sum") == [2.0, 5.0]
assert distributed.all_reduce([0.5, -float(me)], "max") == [0.5, 0.0]
big = 2.0**53 - 1
assert distributed.all_reduce([big * (me == 0)], "sum") == [big]
texts = ["a", "ein längerer Text " * 50]
assert distributed.gather_json({"text": texts[me], "n": [me, None]}) == [
    {"text": text, "n": [rank, None]} for rank, text in enumerate(texts)
]
local = {"rollout/samples_total": 3 + me, "time/pack_s": 5.0 - me}
if me == 1:
    local |= {"rollout/parse_truncated_total": 2, "rollout/fp_total": 1}
assert reduce_metrics(local) == {
    "rollout/fp_total": 1.0,
    "rollout/gen_new_tokens_mean": 0.0,
    "rollout/parse_truncated_rate": 2 / 7,
    "rollout/taken_as_complete_rate": 0.0,
    "rollout/parse_truncated_total": 2.0,
    "rollout/samples_total": 7.0,
    "time/pack_s": 5.0,
}
distributed.barrier()
dist.destroy_process_group()
print("agreed")
"""


def test_two_processes_agree(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    done = torchrun(script)
    assert done.returncode == 0, done.output
    assert done.output.count("agreed") == 2


def test_losses_of_a_channel_are_means_over_its_own_steps():
    sums = MetricSums()
    for channel, loss in (("A", 1.0), ("B", 10.0), ("A", 3.0)):
        sums.count_step(channel)
        sums.add({f"loss/{channel}/token_ce/struct_ce": loss, f"stage2/channel_{channel.lower()}": 1, "loss": loss})
    line = sums.take()
    assert line["loss/A/token_ce/struct_ce"] == pytest.approx(2.0)
    assert line["loss/B/token_ce/struct_ce"] == pytest.approx(10.0)
    assert line["stage2/channel_a"] == pytest.approx(2 / 3) and line["stage2/channel_b"] == pytest.approx(1 / 3)
    assert line["loss"] == pytest.approx(2 / 3 * 2.0 + 1 / 3 * 10.0)
    sums.count_step("B")
    sums.add({"loss/B/token_ce/struct_ce": 4.0})
    assert sums.take() == {"loss/B/token_ce/struct_ce": 4.0}


@pytest.mark.parametrize("channel", [None, "A", "B"])
def test_coordinate_diagnostics_are_means_over_steps_with_coordinates(channel):
    """A step of images without objects has an error of no bins, not one of 0 bins; its loss is a loss."""
    name, sums = f"coord_diag/{channel}/expected_bin_mae" if channel else "coord_diag/expected_bin_mae", MetricSums()
    for error, loss in ((6.0, 3.0), (None, 1.0), (4.0, 2.0)):
        sums.count_step(channel, has_slots=error is not None)
        sums.add({"loss": loss} | ({} if error is None else {name: error}))
    saved = json.loads(json.dumps(sums.state_dict()))
    assert sums.take() == {"loss": 2.0, name: 5.0}
    resumed = MetricSums()
    resumed.load_state_dict(saved)
    assert resumed.take() == {"loss": 2.0, name: 5.0}


# --- the payload that all loggers share ---


@pytest.mark.parametrize("value", [0, -1, 0.5, math.inf, np.float64(2.0)])
def test_payload_keeps_its_numbers_and_version(value):
    payload = MetricsPayload("train", 3, {"rollout/samples_total": value})
    assert (payload.schema_version, payload.mode, payload.global_step) == (SCHEMA_VERSION, "train", 3)
    assert payload.metrics == {"rollout/samples_total": value}


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"metrics": {"a": True}}, "True"),
        ({"metrics": {"a": np.bool_(True)}}, "metric a"),
        ({"metrics": {"a": "1"}}, "'1'"),
        ({"metrics": {"a": None}}, "metric a is None"),
        ({"metrics": {"": 1}}, "''"),
        ({"metrics": {3: 1}}, "3"),
        ({"schema_version": 2}, "schema 2"),
        ({"schema_version": "1"}, "schema '1'"),
        ({"schema_version": True}, "schema True"),
        ({"schema_version": 1.0}, r"schema 1\.0"),
        ({"mode": "test"}, "test"),
        ({"global_step": True}, "step True"),
        ({"global_step": -1}, "step -1"),
        ({"global_step": 2.0}, r"step 2\.0"),
    ],
)
def test_other_values_are_refused(changes, value):
    fields = {"mode": "train", "global_step": 1, "metrics": {}} | changes
    with pytest.raises(ValueError, match=value):
        MetricsPayload(**fields)


# --- the table: each line says how it is combined, and a name falls under one line ---


def test_every_metric_is_complete_and_found_by_its_name() -> None:
    wrong = {metric.name: list(complaints(metric)) for metric in all_metrics()}
    assert {name: found for name, found in wrong.items() if found} == {}


def complaints(metric: Metric) -> Iterator[str]:
    if not metric.meaning:
        yield "has no meaning"
    if find_metric(metric.name.replace("<", "").replace(">", "")) is not metric:
        yield "is not found by its name"
    if metric.ratio is not None and {rule_of(counter) for counter in metric.ratio} != {Rule.COUNT}:
        yield "is a rate that does not divide two global sums"
    if metric.name.startswith("time/") and not (
        metric.rule is Rule.SECONDS and metric.name.endswith("_s") and metric.unit == "seconds"
    ):
        yield "is a time, and not in seconds"
    if metric.name.endswith("_total") and metric.rule is not Rule.COUNT:
        yield "is a total, and no count"
    if metric.name.endswith(("_p90", "_p99")) and metric.rule is not Rule.PEAK:
        yield "is a percentile, and no peak"
    if "iou" in metric.name and not metric.name.startswith(("eval_", "loss/")):
        yield "is an IoU figure outside of evaluation"


@pytest.mark.parametrize("ratio", [None, ("rollout/a_total", "rollout/b_total")])
def test_only_a_rate_names_its_counters(ratio: tuple[str, str] | None) -> None:
    rule = Rule.COUNT if ratio else Rule.RATE
    with pytest.raises(ValueError, match="rollout/x"):
        Metric("rollout/x", "0..1", rule, "x", ratio)
