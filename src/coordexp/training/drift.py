"""A watch over rollouts that get worse while the loss gets better.

What stage 2 teaches is built from the model's own answers: unmatched guesses stay in the prefix, missed objects are
appended. A model that is a little unsure may therefore learn to write ever longer answers, which match less, which
appends more. The loss does not show it; truncation, duplicates and length do.

The latest window of answers is compared with the run's first, written by the model as it came from stage 1. Everything
is computed from logged lines, which are global and stand in every checkpoint: all ranks agree, and so does a resumed
run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from coordexp import distributed

logger = logging.getLogger("coordexp")

WINDOW_SAMPLES = 128  # answers; a rate of 5 % is then known to ± 2 %
RATE_RISE = 0.10  # of truncated answers, or of duplicates among the predictions, above the first window's
LENGTH_FACTOR = 1.5  # mean length in tokens, more or less than the first window's
_RECOVERED = 0.5  # a warning is over when half of what it took is left, so that noise does not repeat it


@dataclass(frozen=True, slots=True)
class RolloutStatistics:
    """Counts of a stretch of training."""

    samples: float = 0.0
    truncated: float = 0.0
    predicted: float = 0.0
    duplicates: float = 0.0
    tokens: float = 0.0

    @classmethod
    def from_line(cls, line: Mapping[str, float]) -> RolloutStatistics:
        """The counters of a logged line; nothing where no rollout was made."""
        return cls(
            line.get("rollout/samples_total", 0.0),
            line.get("rollout/parse_truncated_total", 0.0),
            line.get("rollout/valid_pred_objects_total", 0.0),
            line.get("rollout/duplicates_total", 0.0),
            line.get("rollout/gen_new_tokens_total", 0.0),
        )

    @classmethod
    def total(cls, parts: Iterable[RolloutStatistics]) -> RolloutStatistics:
        """The sums over several stretches."""
        parts = list(parts)
        return cls(*(sum(getattr(part, one.name) for part in parts) for one in fields(cls)))

    @property
    def truncated_rate(self) -> float:
        """Share of answers that were cut off; 0 without answers."""
        return self.truncated / self.samples if self.samples else 0.0

    @property
    def duplicate_rate(self) -> float:
        """Share of objects that repeat an earlier one; 0 without objects."""
        return self.duplicates / self.predicted if self.predicted else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens of an answer, on average; 0 without answers."""
        return self.tokens / self.samples if self.samples else 0.0


class DriftWatch:
    """Sees every logged line of a run, in order."""

    def __init__(self) -> None:
        self._first: RolloutStatistics = RolloutStatistics()
        self._latest: deque[RolloutStatistics] = deque()
        self._drifting: dict[str, bool] = {"truncated": False, "duplicate": False, "length": False}

    def replay(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Take in the lines that a resumed run logged before; nothing is warned of again."""
        for line in lines:
            self._take(line)

    def observe(self, line: Mapping[str, float], step: int) -> dict[str, float]:
        """Metrics of family ``safeguard/`` for this line; warns once when one begins to drift."""
        before = dict(self._drifting)
        latest = self._take(line)
        if latest is None:
            return {}
        if distributed.is_main():
            for name, drifting in self._drifting.items():
                if drifting != before[name]:
                    self._say(name, drifting, latest, step)
        return {
            "safeguard/truncated_rate": latest.truncated_rate,
            "safeguard/duplicate_rate": latest.duplicate_rate,
            "safeguard/answer_length": latest.mean_length,
            "safeguard/truncated_drift": float(self._drifting["truncated"]),
            "safeguard/duplicate_drift": float(self._drifting["duplicate"]),
            "safeguard/length_drift": float(self._drifting["length"]),
        }

    def _take(self, line: Mapping[str, float]) -> RolloutStatistics | None:
        """The latest window with ``line`` in it; None where the line has no rollouts."""
        new = RolloutStatistics.from_line(line)
        if not new.samples:
            return None
        self._latest.append(new)
        while sum(part.samples for part in self._latest) - self._latest[0].samples >= WINDOW_SAMPLES:
            self._latest.popleft()
        latest = RolloutStatistics.total(self._latest)
        if self._first.samples < WINDOW_SAMPLES:
            self._first = RolloutStatistics.total((self._first, new))
            return latest
        rises = {
            "truncated": (latest.truncated_rate - self._first.truncated_rate) / RATE_RISE,
            "duplicate": (latest.duplicate_rate - self._first.duplicate_rate) / RATE_RISE,
            "length": _length_change(self._first.mean_length, latest.mean_length) / (LENGTH_FACTOR - 1),
        }
        for name, rise in rises.items():
            self._drifting[name] = rise >= (_RECOVERED if self._drifting[name] else 1.0)
        return latest

    def _say(self, name: str, drifting: bool, latest: RolloutStatistics, step: int) -> None:
        first, samples = self._first, round(latest.samples)
        what = {
            "truncated": f"{latest.truncated_rate:.0%} of the last {samples} answers are truncated "
            f"(in the run's first window {first.truncated_rate:.0%})",
            "duplicate": f"{latest.duplicate_rate:.0%} of the objects in the last {samples} answers repeat an earlier "
            f"one (in the run's first window {first.duplicate_rate:.0%})",
            "length": f"the last {samples} answers have {latest.mean_length:.0f} tokens on average (in the run's first "
            f"window {first.mean_length:.0f})",
        }[name]
        if not drifting:
            logger.info("step %d: %s: back towards where the run began", step, what)
            return
        logger.warning(
            "step %d: %s. Rollouts drift: look at eval_rollout/f1, lower training.learning_rate or the "
            "share of rollout steps (stage2_ab.schedule.b_ratio), or go back to the best checkpoint "
            "(training.metric_for_best_model: rollout/f1); metric safeguard/%s_drift is 1 until it recovers",
            step,
            what,
            name,
        )


def _length_change(first: float, latest: float) -> float:
    """0 for equal lengths, 1 for double or half."""
    if first <= 0 or latest <= 0:
        return 0.0
    return max(latest / first, first / latest) - 1
