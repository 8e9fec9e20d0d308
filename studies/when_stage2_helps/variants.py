"""Variants of rollout matching that the package does not have: each is tried here, and moves there if it pays.

An arm names one by ``variant``. All of them change what happens between a rollout and its target, or whose weights
write the rollouts; every one is deterministic, as the run it changes is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

FIRST_WRONG_WEIGHT = 5.0
EMA_DECAY = 0.9  # a horizon of ten steps, of 120
SAMPLES = 4


@contextmanager
def changed(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Within it, ``new(old, *arguments)`` is called in place of ``owner.name(*arguments)``."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: new(old, *arguments, **named))
    try:
        yield
    finally:
        setattr(owner, name, old)


def takeover(targeted: Callable[..., Any], source: Any, sample: Any, rollout: Any, parsed: Any, match: Any):
    """From the first object on that nothing matches, annotations are written in place of the model's answer."""
    kept = min(match.fp_pred_idx, default=len(parsed.objects))
    pairs = tuple(pair for pair in match.pairs if pair.pred_idx < kept)
    matched = {pair.gt_idx for pair in pairs}
    missed = tuple(j for j in range(len(sample.record.objects)) if j not in matched)
    begun = replace(parsed, objects=parsed.objects[:kept])
    return targeted(source, sample, rollout, begun, replace(match, pairs=pairs, fp_pred_idx=(), fn_gt_idx=missed))


def annotated_coordinates(entries_of: Callable[..., Any], parsed: Any, match: Any, ground_truth: Any, *rest: Any):
    """A matched object's entry is the annotation's, coordinates and all, where the model's own stood."""
    return [
        replace(entry, obj=ground_truth[entry.gt_idx], bins=ground_truth[entry.gt_idx].bins, pred_idx=None)
        if entry.gt_idx is not None and entry.pred_idx is not None
        else entry
        for entry in entries_of(parsed, match, ground_truth, *rest)
    ]


def stop_where_complete(targeted: Callable[..., Any], *arguments: Any):
    """The end is taught only where every object of the answer is annotated: elsewhere annotators left something out."""
    outcome = targeted(*arguments)
    if not outcome.match.fp_pred_idx:
        return outcome
    return with_struct_weights(outcome, {-2: 0.0, -1: 0.0})


def first_wrong(targeted: Callable[..., Any], *arguments: Any):
    """The first token that the target writes otherwise than the model did weighs more."""
    outcome = targeted(*arguments)
    theirs, ours = outcome.rollout.response_token_ids, outcome.target.token_ids
    place = next((t for t, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
    return outcome if place is None else with_struct_weights(outcome, {place: FIRST_WRONG_WEIGHT})


def unlikely_repeats(targeted: Callable[..., Any], source: Any, *arguments: Any):
    """The first coordinate of a repeat that nothing matches is pushed down; the rest of it stays masked.

    What stands before it is the same for any object of its kind. A negative weight asks for unlikelihood, see
    :func:`pushed_down`; the token counts among those that the step's text loss is divided by.
    """
    from coordexp.matching import duplicate_indices
    from coordexp.parsing import parse_rollout
    from coordexp.records import TokenRole

    outcome = targeted(source, *arguments)
    parsed, target = outcome.parsed, outcome.target
    repeats = {*duplicate_indices(parsed.objects)} & {*outcome.match.fp_pred_idx} - {*target.left_out_pred_idx}
    if not repeats:
        return outcome
    pushed: dict[int, float] = {}
    wanted = [parsed.objects[i].bins for i in sorted(repeats)]
    for written in parse_rollout(target.token_ids, source.vocab, ended=True).objects:
        place = written.coord_token_idx[0]
        if wanted and written.bins == wanted[0] and target.roles_T[place] == TokenRole.PREFIX_MASKED:
            wanted.pop(0)
            pushed[place] = -1.0
    assert not wanted, f"{target.sample_id}: repeats {wanted} do not stand in the target"
    return with_struct_weights(outcome, pushed)


def pushed_down(sums_of: Callable[..., Any], module: Any, supervision: Any, scores: Any) -> Any:
    """Cross-entropy −log p; where the weight is negative +log(1 − p), which that weight turns into unlikelihood."""
    import torch

    ce_N, weight_N = scores.cross_entropy_N(), supervision.weight_N("struct_ce")
    others_N = -torch.expm1(-ce_N.clamp(min=1e-4))  # 1 − p, and a finite slope where p is 1
    struct_ce = (weight_N * torch.where(weight_N < 0, others_N.log(), ce_N)).sum()
    return sums_of(module, supervision, scores) | {"struct_ce": struct_ce}


def with_struct_weights(outcome: Any, weights: dict[int, float]) -> Any:
    """``outcome`` with other weights of the structure's cross-entropy at some target positions."""
    target = outcome.target
    weight_T = target.weights["struct_ce"].copy()
    for place, weight in weights.items():
        weight_T[place] = weight
    return replace(outcome, target=replace(target, weights={**target.weights, "struct_ce": weight_T}))


def best_of(answer: Callable[..., Any], source: Any, micro_batches: Any, global_step: int) -> Any:
    """Of several sampled answers the one with the highest matched F1; the first of equal ones."""

    def f1(outcome: Any) -> float:
        missed, wrong, right = len(outcome.match.fn_gt_idx), len(outcome.match.fp_pred_idx), len(outcome.match.pairs)
        return 2 * right / max(2 * right + missed + wrong, 1)

    tried = [
        answer(replace(source, training_seed=source.training_seed + 7919 * k), micro_batches, global_step)
        for k in range(SAMPLES)
    ]
    by_round = [
        [max(each, key=f1) for each in zip(*one, strict=True)]
        for one in zip(*(window.by_round for window in tried), strict=True)
    ]
    return replace(tried[0], by_round=by_round, rollout_s=sum(window.rollout_s for window in tried))


class AveragedWeights:
    """An exponential moving average of the learner's weights, which writes the rollouts."""

    def __init__(self) -> None:
        self.average: list[Any] | None = None

    def sync(self, sync_weights: Callable[..., None], backend: Any, version: int) -> None:
        """Take in the weights of this step, and lend the average to the model that answers."""
        import torch

        sync_weights(backend, version)
        with torch.no_grad():
            now = [one.detach().clone() for one in backend._model.parameters()]
            if self.average is None:
                self.average = [one.clone() for one in now]
            for mean, one, lent in zip(self.average, now, backend._model.parameters(), strict=True):
                mean.lerp_(one, 1 - EMA_DECAY)
                lent.copy_(mean)
        self.own = now

    def release(self, release: Callable[..., None], backend: Any) -> None:
        """Give the learner its own weights back."""
        import torch

        with torch.no_grad():
            for parameter, own in zip(backend._model.parameters(), self.own, strict=True):
                parameter.copy_(own)
        release(backend)


@contextmanager
def variant(name: str | None) -> Iterator[None]:
    """Within it, training is changed as ``name`` says; None changes nothing."""
    from coordexp.objective.modules import TokenCE
    from coordexp.rollouts.hf import HFBackend
    from coordexp.targets import rewrite
    from coordexp.training.sources import RolloutSource

    if name is None:
        yield
    elif name == "unlikely_repeats":
        with (
            changed(RolloutSource, "_targeted", unlikely_repeats),
            changed(TokenCE, "sums", pushed_down),
        ):
            yield
    elif name == "annotated_coordinates":
        with changed(rewrite, "_entries", annotated_coordinates):
            yield
    elif name == "averaged_weights":
        averaged = AveragedWeights()
        with changed(HFBackend, "sync_weights", averaged.sync), changed(HFBackend, "release", averaged.release):
            yield
    elif name == "best_of":
        with changed(RolloutSource, "answer", best_of):
            yield
    else:
        change = {"takeover": takeover, "stop_where_complete": stop_where_complete, "first_wrong": first_wrong}[name]
        with changed(RolloutSource, "_targeted", change):
            yield
