"""One aggregation rule per family, over ranks."""

import re

import pytest

from coordexp import distributed
from coordexp.metrics import MetricSums, reduce_metrics
from support.torchrun import torchrun


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
        ("rollout/decode_greedy", 1, 1, 1),
        ("rollout/decode_beam", 1, 1, 1),
        ("rollout/decode_sample", 1, 1, 1),
        ("packing/buffer_segments", 3, 4, 7),  # a state of each rank's own buffer
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


def test_schedule_metrics_are_the_same_on_every_rank(monkeypatch):
    said = {"stage2/channel_b": 1.0, "stage2/b_ratio_realised": 0.5}
    assert over_ranks(monkeypatch, said, said) == said
