"""Rollouts one step ahead: while a step learns, servers answer the next step's prompts.

At step s (counted from 0) the window is taken that was asked for at step s - 1, of the weights of that step; then the
weights of step s are pushed, and window s + 1 is asked for. Every answer is one step old, whoever is faster. Only the
first window of a run, and one that a resumed run does not find in its checkpoint, is asked for and awaited in its own
step.

Threads ask and listen; whatever ranks do together (pushes, errors, saves) is done by the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from coordexp.background import in_background
from coordexp.data.dataset import Sample
from coordexp.errors import CheckpointError
from coordexp.metrics import SampleOutcome
from coordexp.records import Segment
from coordexp.training.sources import RolloutSource, RolloutWindow
from coordexp.training.waiting_files import WaitingRollouts

MicroBatches = Sequence[Sequence[Sample]]


@dataclass(frozen=True, slots=True, eq=False)
class AskedWindow:
    """A window that is under way, or answered, or failed."""

    step: int
    version: int
    answered: Future[RolloutWindow]


class RolloutsAhead:
    """A source of segments whose windows are asked for one step before they are taken. ``window``: the one that is
    to be taken next; set it where a step begins again, or a run resumes."""

    def __init__(self, source: RolloutSource, has_rollouts: Callable[[int], bool]) -> None:
        """``has_rollouts(step)``: whether the step after ``step`` finished ones learns from rollouts."""
        self._source = source
        self._has_rollouts = has_rollouts
        self.window: AskedWindow | WaitingRollouts | None = None
        self._has_weights_of: int | None = None  # servers have them since this step asked for its own window

    # -- the step ------------------------------------------------------------------------------------------------------

    def segments(
        self, micro_batches: MicroBatches, global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        """The window that was asked for; an error of its answers is raised here, in its own step."""
        window, self.window = self.window, None
        if window is None:
            self._has_weights_of = global_step
            return self._source.segments(micro_batches, global_step, metrics)
        with self._source.failing_together(global_step):
            assert (window.step, window.version) == (global_step, global_step - 1), "a window of another step"
            started = time.perf_counter()
            if isinstance(window, WaitingRollouts):
                answered = self._rebuilt(window, micro_batches)
            else:
                answered = window.answered.result()
            metrics["time/rollout_wait_s"] = time.perf_counter() - started
        return self._source.learn_from(answered, micro_batches, global_step, metrics)

    def asks_at(self, global_step: int) -> bool:
        """Whether the step after ``global_step`` finished ones asks for a window: the next step's."""
        return self._has_rollouts(global_step + 1)

    def ask(self, micro_batches: MicroBatches, global_step: int) -> dict[str, float]:
        """Push the weights that the step after ``global_step`` finished ones begins with, and ask for the window of the
        step behind it. A collective call. Returns: its metrics.

        Raises:
            RolloutError: the weights did not arrive.
        """
        assert self.window is None, "a window that nobody took"
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        if self._has_weights_of != global_step:
            self._source.backend.sync_weights(global_step)
            metrics["time/weight_sync_s"] = time.perf_counter() - started
        answered = in_background(lambda: self._answer(micro_batches, global_step + 1), name="rollouts-ahead")
        self.window = AskedWindow(global_step + 1, global_step, answered)
        return metrics

    def _answer(self, micro_batches: MicroBatches, step: int) -> RolloutWindow:
        return self._source.reported(self._source.answer(micro_batches, step))

    def _rebuilt(self, answers: WaitingRollouts, micro_batches: MicroBatches) -> RolloutWindow:
        read = [[sample.record.sample_id for sample in batch] for batch in micro_batches]
        if answers.sample_ids != read:
            raise CheckpointError(
                f"the checkpoint holds answers to samples {str(answers.sample_ids)[:200]}, and its next step reads "
                f"{str(read)[:200]}; resume with the same data, batch size and seed, or start anew"
            )
        started = time.perf_counter()
        outcomes = [
            [self._source.outcome(sample, rollout) for sample, rollout in zip(batch, one, strict=True)]
            for batch, one in zip(micro_batches, answers.rounds, strict=True)
        ]
        built_s = time.perf_counter() - started
        return RolloutWindow(outcomes, answers.rollout_s, built_s, answers.report, answers.counted)

    # -- between steps -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until no request is under way: before weights are pushed, or a checkpoint is written. Each request has
        its own deadline. What failed is raised by :meth:`segments`, not here."""
        if isinstance(self.window, AskedWindow):
            wait([self.window.answered])

    def waiting(self) -> WaitingRollouts | None:
        """What a checkpoint keeps, after :meth:`finish`; None where nothing waits, or what waits has failed."""
        window = self.window
        if not isinstance(window, AskedWindow):
            return window
        if window.answered.exception() is not None:
            return None
        answered = window.answered.result()
        rounds = tuple(tuple(outcome.rollout for outcome in one) for one in answered.by_round)
        return WaitingRollouts(
            window.step, window.version, rounds, answered.rollout_s, answered.report, answered.counted
        )
