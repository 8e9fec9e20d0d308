"""A warning when rollouts drift: more truncated answers or repeated objects than at first."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from coordexp import distributed

logger = logging.getLogger("coordexp")

WINDOW_SAMPLES = 128  # answers; a rate of 5 % is then known to ± 2 %
RISE = 0.10
_SAMPLES = "rollout/samples_total"
_RATES = {
    "truncated": ("rollout/parse_truncated_total", _SAMPLES, "answers are truncated"),
    "duplicate": ("rollout/duplicates_total", "rollout/valid_pred_objects_total", "objects repeat an earlier one"),
}


class DriftWatch:
    """Warns when the rates of truncated answers or of repeated objects rise. Call :meth:`observe` with each log
    line."""

    def __init__(self) -> None:
        self._first: Counter[str] = Counter()
        self._latest: deque[Counter[str]] = deque()
        self._warned: set[str] = set()

    def replay(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Read the lines that a resumed run logged before it stopped, without warning again."""
        for line in lines:
            self.observe(line, None)

    def observe(self, line: Mapping[str, float], step: int | None) -> dict[str, float]:
        """Return ``safeguard/*`` for a line with rollouts, {} otherwise. Warn once when a rate has risen by 0.10."""
        if not line.get(_SAMPLES):
            return {}
        self._latest.append(Counter({name: int(line.get(name, 0)) for rate in _RATES.values() for name in rate[:2]}))
        while sum(part[_SAMPLES] for part in self._latest) - self._latest[0][_SAMPLES] >= WINDOW_SAMPLES:
            self._latest.popleft()
        if self._first[_SAMPLES] < WINDOW_SAMPLES:
            self._first += self._latest[-1]
        latest, metrics = sum(self._latest, Counter()), {}
        for name, (part, whole, what) in _RATES.items():
            now, before = (counts[part] / max(1, counts[whole]) for counts in (latest, self._first))
            metrics[f"safeguard/{name}_rate"] = now
            if now - before >= RISE and name not in self._warned:
                self._warned.add(name)
                if step is not None and distributed.is_main():
                    logger.warning("step %d: Rollouts drift: %.0f%% of the latest %s, %.0f%% at first. Look at "
                                   "eval_rollout/f1; lower training.learning_rate or stage2_ab.schedule.b_ratio",
                                   step, 100 * now, what, 100 * before)  # fmt: skip
        return metrics
