"""What a metric is: a name, a unit, a meaning, and how its values are combined."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """How values are combined: over the micro-steps of a step, over the steps of a log line, over ranks."""

    COUNT = ("sum", "sum", "sum")
    SHARE = ("sum", "mean", "sum")  # of a mean over the whole step: micro-steps and ranks each hold a part of it
    SHARE_OF_A = ("sum", "mean of A's", "sum")  # the same of Channel-A's or Channel-B's steps alone
    SHARE_OF_B = ("sum", "mean of B's", "sum")
    SECONDS = ("sum", "mean", "max")
    SCHEDULE = SECONDS  # the same on every rank; the share of a line's steps
    PEAK = ("max", "max", "max")  # percentiles and 0/1 flags
    STATE = ("last", "last", "sum")
    LEVEL = ("last", "last", "max")
    RATE = ("ratio", "ratio", "ratio")
    TRAINER = ("last", "last", "same")  # transformers logs these itself
    WHOLE_RUN = ("once", "whole run", "same")
    EVALUATION = ("once", "once", "global")  # one value per evaluation, made global by coordexp.evaluation

    @property
    def over_micro_steps(self) -> str:
        """How the values of a step's micro-steps become the step's."""
        return self.value[0]

    @property
    def over_steps(self) -> str:
        """How the values of a log line's steps become the line's."""
        return self.value[1]

    @property
    def over_ranks(self) -> str:
        """How the values of all ranks become one."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. ``ratio`` names the counters that a rate divides; a rate is 0 where the second is 0."""

    name: str
    unit: str
    rule: Rule
    meaning: str
    ratio: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.ratio is not None) != (self.rule is Rule.RATE):
            raise ValueError(f"metric {self.name}: a rate, and only a rate, names two counters")


def rate(name: str, unit: str, numerator: str, denominator: str, note: str = "") -> Metric:
    """A rate of two counters of its own family."""
    family = name.rsplit("/", 1)[0]
    meaning = f"`{numerator}` / `{denominator}`" + (f". {note}" if note else "")
    return Metric(name, unit, Rule.RATE, meaning, (f"{family}/{numerator}", f"{family}/{denominator}"))
