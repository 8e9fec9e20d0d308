"""Which channel an optimizer step uses: a pure function of the step's number and ``stage2_ab.schedule.b_ratio``.

Step s (0-based) is Channel-B iff ⌊(s+1)·b⌋ > ⌊s·b⌋. The floors telescope, so the first S steps hold exactly ⌊S·b⌋
Channel-B steps, spread as evenly as whole steps allow. Nothing is drawn or remembered: every rank computes the same
channel without talking, and a resumed run goes on where the step's number says.
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
        """The ratio as it was written in YAML.

        The shortest decimal that reads back as the same float is the one that was typed (up to 15 digits), and it is
        what counts. The float itself would not do: 0.29 is stored a little below, ``100 * 0.29`` gives
        28.999999999999996, and a step that was due is lost; which products round up and which down is an accident.
        A ratio that no decimal writes is the decimal that was typed: 0.333 is 333 steps of 1000.

        Raises:
            ValueError: not in [0, 1].
        """
        ratio = Fraction(repr(float(b_ratio)))
        if not 0 <= ratio <= 1:
            raise ValueError(f"b_ratio {b_ratio} is no share of steps; it lies between 0 (Channel-A only) and 1")
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
