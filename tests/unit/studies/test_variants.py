"""The study's variants of rollout matching change what they say, and nothing after them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig
from coordexp.metrics import SampleOutcome
from coordexp.records import GTObject, RolloutRequest, TokenRole
from coordexp.rollouts.hf import HFBackend
from coordexp.targets import TargetPolicy, TransportConfig
from coordexp.training.sources import RolloutSource
from support.answers import CAT, DOG, LEAF, answer, entry, record, request, taught_text, tiny_vocab
from support.tiny_run import InMemoryBackend

STUDY = Path(__file__).parents[3] / "studies" / "when_stage2_helps"
OWL = GTObject("owl", "bbox_2d", (800, 10, 900, 90))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(STUDY))
    import variants

    yield variants
    sys.modules.pop("variants", None)


class Scripted(InMemoryBackend):
    """Answers by the seed of its call: the k-th text for the k-th seed that it has not seen before."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(tiny_vocab(), self._text)
        self._texts = list(texts)

    def _text(self, request: RolloutRequest) -> str:
        seeds = [one.training_seed for one in self.seeds]
        return self._texts[list(dict.fromkeys(seeds)).index(seeds[-1]) % len(self._texts)]


def outcome_of_window(
    texts: Sequence[str], truth: Sequence[GTObject] = (CAT, LEAF), sure: tuple[float, ...] | None = None
) -> SampleOutcome:
    policy = TargetPolicy(answer="rewritten", unmatched="soft", soft_threshold=1.0)
    source = RolloutSource(
        Scripted(texts), tiny_vocab(), MatchingConfig(), TransportConfig(), "desc_first", 3, "rollout/decode_greedy",
        policy=TargetPolicy(answer="rewritten") if sure is None else policy,
        confidences_of=None if sure is None else lambda *_: sure,
    )  # fmt: skip
    one = record(truth)
    return source.segments([[Sample(one, request(one))]], 0, {})[1][0]


def weights_of(outcome: SampleOutcome) -> dict[str, float]:
    """Text of the tokens that do not weigh 1."""
    weight_T = outcome.target.text_weight_T
    if weight_T is None:
        return {}
    vocab = tiny_vocab()
    return {
        vocab.piece(i): float(weight)
        for i, weight in zip(outcome.target.token_ids, weight_T, strict=True)
        if weight != 1
    }


SEEN = answer(entry(1), entry(2, DOG), entry(3, LEAF))


def test_takeover_writes_annotations_from_the_first_unmatched_object_on(variants: ModuleType) -> None:
    with variants.variant("takeover"):
        assert taught_text(outcome_of_window([SEEN]), tiny_vocab()) == "{" + f"{entry(1)}, {entry(2, LEAF)}" + "}"
    assert "dog" in taught_text(outcome_of_window([SEEN]), tiny_vocab()), "and is gone afterwards"


def test_matched_objects_are_written_as_they_are_annotated_where_the_model_wrote_them(variants: ModuleType) -> None:
    near, vocab = replace(CAT, bins=tuple(b + 7 for b in CAT.bins)), tiny_vocab()
    seen = answer(entry(1, OWL), entry(2, replace(near, desc="dog")))
    with variants.variant("annotated_coordinates"):
        outcome = outcome_of_window([seen])
    assert outcome.match.fp_pred_idx == (0,) and outcome.target.matched_gt_idx == (0,)
    target = outcome.target
    written = "{" + f"{entry(1, OWL)}, {entry(2)}, {entry(3, LEAF)}" + "}"
    assert vocab.decode(target.token_ids).removesuffix("<|im_end|>") == written
    places = [t for t in target.coord_pos_K if target.roles_T[t] == TokenRole.TAIL_COORD]
    assert [vocab.bins[target.token_ids[t]] for t in places] == list(target.coord_bin_K)
    assert target.coord_bin_K[:4].tolist() == list(CAT.bins)
    own = outcome_of_window([seen]).target
    assert [vocab.bins[own.token_ids[t]] for t in own.coord_pos_K[:4]] == list(near.bins), "and is gone afterwards"


def test_what_the_learner_is_not_sure_of_is_left_out(variants: ModuleType) -> None:
    def written(dog: float, cat: float = 0.9) -> SampleOutcome:
        outcome = outcome_of_window([answer(entry(1, DOG), entry(2), entry(3, OWL))], sure=(dog, cat, 0.9))
        assert [one.desc for one in outcome.parsed.objects] == [DOG.desc, CAT.desc, OWL.desc], "as it was"
        assert outcome.match.fp_pred_idx == (0, 2) and outcome.target.matched_pred_idx == (1,)
        return outcome

    with variants.variant("less_sure_than_0.3"):
        unsure, sure, unsure_of_matched = written(0.29), written(0.3), written(0.9, cat=0.1)
    without_the_dog = "{" + f"{entry(1)}, {entry(2, OWL)}, {entry(3, LEAF)}"
    assert tiny_vocab().decode(unsure.target.token_ids).startswith(without_the_dog)
    assert unsure.target.left_out_pred_idx == (0,) and sure.target.left_out_pred_idx == ()
    everything = "{" + f"{entry(1, DOG)}, {entry(2)}, {entry(3, OWL)}, {entry(4, LEAF)}"
    for outcome in (sure, unsure_of_matched, written(0.1)):
        assert tiny_vocab().decode(outcome.target.token_ids).startswith(everything)


def test_what_the_learner_is_less_sure_of_than_of_what_matches_is_left_out(variants: ModuleType) -> None:
    def left_out(dog: float) -> tuple[int, ...]:
        seen = answer(entry(1), entry(2, DOG), entry(3, LEAF))
        return outcome_of_window([seen], sure=(0.6, dog, 0.8)).target.left_out_pred_idx

    with variants.variant("less_sure_than_matched_0.1"):
        early = [left_out(0.1) for _ in range(variants.MATCHED_SEEN // 16)]  # two matched ones in each
        assert early == [()] * len(early), "what the learner is usually sure of is not known yet"
        assert (left_out(0.61), left_out(0.59)) == ((), (1,))


def test_the_end_is_not_taught_behind_what_annotators_may_have_left_out(variants: ModuleType) -> None:
    with variants.variant("stop_where_complete"):
        hesitant, sure = outcome_of_window([SEEN]), outcome_of_window([answer(entry(1))])
    assert list(weights_of(hesitant).values()) == [0.0, 0.0]
    assert hesitant.target.text_weight_T is not None and hesitant.target.text_weight_T[-2:].tolist() == [0, 0]
    assert weights_of(sure) == {}


def test_the_first_wrong_token_weighs_more(variants: ModuleType) -> None:
    with variants.variant("first_wrong"):
        early_end, named_wrong, right = (
            outcome_of_window([text])
            for text in (
                answer(entry(1)),
                answer(entry(1, replace(CAT, desc="dog")), entry(2, LEAF)),
                answer(entry(1), entry(2, LEAF)),
            )
        )
    assert len(weights_of(early_end)) == len(weights_of(named_wrong)) == 1 and weights_of(right) == {}
    for outcome in (early_end, named_wrong):
        weight_T = outcome.target.text_weight_T
        assert weight_T is not None
        place = int(weight_T.argmax())
        ours, theirs = outcome.target.token_ids, outcome.rollout.response_token_ids
        assert weight_T[place] == variants.FIRST_WRONG_WEIGHT
        assert ours[:place] == theirs[:place] and ours[place : place + 1] != theirs[place : place + 1]


def test_the_first_coordinate_of_a_repeat_is_pushed_down(variants: ModuleType) -> None:
    vocab = tiny_vocab()
    near = replace(CAT, bins=(12, 20, 200, 220))
    with variants.variant("unlikely_repeats"):
        repeated = outcome_of_window([answer(entry(1), entry(2, near), entry(3, OWL), entry(4, LEAF), entry(5, near))])
        once = outcome_of_window([SEEN])
    target = repeated.target
    assert repeated.match.fp_pred_idx == (1, 2, 4)
    pushed = np.flatnonzero(target.text_weight_T == -1)
    assert [vocab.bins[target.token_ids[t]] for t in pushed] == [12, 12] and weights_of(once) == {}
    assert set(target.roles_T[pushed].tolist()) == {TokenRole.REWRITTEN_STRUCT}
    (second, last) = (target.roles_T[t : t + 4].tolist() for t in pushed)
    masked = int(TokenRole.PREFIX_MASKED)
    assert second[1:] == last[1:] == [masked] * 3, "the rest of it is left alone"


def test_pushing_down_is_unlikelihood_and_leaves_the_others_as_they_were(variants: ModuleType) -> None:
    p_U = torch.tensor([0.25, 0.25, 1.0, 0.0])
    ce_U = (-p_U.log()).requires_grad_()
    weight_N = torch.tensor([1.0, -1.0, -1.0, -1.0])
    ctx: Any = SimpleNamespace(
        supervision=SimpleNamespace(text_weight_N=weight_N), query=SimpleNamespace(vocab_in_N_U=torch.arange(4))
    )
    loss_U = weight_N * variants.pushed_down(lambda _: ce_U, ctx)
    assert loss_U.tolist()[:2] == pytest.approx([math.log(4), math.log(4 / 3)])
    assert loss_U[3] == 0 and torch.isfinite(loss_U).all()
    loss_U[:3].sum().backward()
    assert ce_U.grad is not None and torch.isfinite(ce_U.grad[:3]).all()
    assert ce_U.grad[0] > 0 > ce_U.grad[1], "its cross-entropy is to rise"


def test_the_best_of_several_answers_is_learnt_from(variants: ModuleType) -> None:
    texts = [answer(entry(1, OWL)), SEEN, answer(entry(1), entry(2, LEAF)), answer(entry(1))]
    with variants.variant("best_of"):
        assert outcome_of_window(texts).rollout.text == texts[2].removesuffix("<|im_end|>")


def test_averaged_weights_answer_and_the_learners_own_come_back(variants: ModuleType) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    options: Any = None
    backend = HFBackend(model, tiny_vocab(), options, 1, 0)

    def asked_with(own: float) -> float:
        with torch.no_grad():
            model.weight.fill_(own)
        backend.sync_weights(0)
        lent = float(model.weight.detach())
        backend.release()
        assert float(model.weight.detach()) == own
        return lent

    with variants.variant("averaged_weights"):
        assert asked_with(1.0) == 1.0
        assert asked_with(2.0) == pytest.approx(1.1)
        assert asked_with(2.0) == pytest.approx(1.19)
    assert asked_with(3.0) == 3.0
