"""Counters of a rollout window: every entry, object and token ends up in one of them."""

from dataclasses import replace

import pytest

from coordexp.coords import TURN_END
from coordexp.metrics import rollout_counters
from coordexp.records import GTObject
from support.answers import CAT, DOG, LEAF, answer, entry, outcome_of
from support.qwen_tokenizer import qwen_vocab

NEAR_CAT = GTObject("cat", "bbox_2d", (12, 25, 195, 230))
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
