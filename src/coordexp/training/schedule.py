"""Two channels in one run: which optimizer steps are Channel-A and which are Channel-B.

* **Channel-A** reads the ground truth and needs no rollout. Its segments may wait in a carry buffer, also through
  Channel-B steps: they are written from ground truth, so waiting does not age them.
* **Channel-B** takes every sample of its step through rollout, match and target, and trains on all of them in that
  step, in as many packed rows as they need. Nothing is carried: the next Channel-B step has other weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from coordexp.config.objective import Channel


@dataclass(frozen=True, slots=True)
class ChannelSchedule:
    """The two-channel schedule of a run; ``b_ratio`` is exact."""

    b_ratio: Fraction

    @classmethod
    def from_ratio(cls, b_ratio: float) -> ChannelSchedule:
        """The ratio as it was typed in YAML: the shortest decimal that reads back as the same float.

        The float itself would lose steps: ``100 * 0.29`` is 28.999999999999996. A ratio without a finite decimal is
        the decimal that was typed: 0.333 is 333 steps of 1000.

        Raises:
            ValueError: not in [0, 1].
        """
        ratio = Fraction(repr(float(b_ratio)))
        if not 0 <= ratio <= 1:
            raise ValueError(f"b_ratio {b_ratio} is not a share of steps; it lies between 0 (Channel-A only) and 1")
        return cls(ratio)

    def channel(self, step: int) -> Channel:
        """The channel of the optimizer step that is taken after ``step`` steps."""
        return "B" if self.b_steps_before(step + 1) > self.b_steps_before(step) else "A"

    def b_steps_before(self, step: int) -> int:
        """How many of the steps 0 … step − 1 are Channel-B: ⌊step · b⌋, in whole numbers."""
        return step * self.b_ratio.numerator // self.b_ratio.denominator

    def realised(self, step: int) -> float:
        """The share of Channel-B among the steps 0 … step."""
        return self.b_steps_before(step + 1) / (step + 1)
