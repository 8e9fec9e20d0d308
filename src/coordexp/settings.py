"""Settings of matching and targets, as their functions take them. The YAML contract has its defaults from here, so that
who only reads answers needs no configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from coordexp.errors import ConfigError

FIELD_ORDER: Literal["desc_first", "geometry_first"] = "desc_first"
"""``custom.object_field_order`` where nobody says it."""


@dataclass(frozen=True, slots=True)
class MatchingConfig:
    """How predictions find their GT objects (keys ``rollout_matching.*`` of the same names).

    Attributes:
        candidate_top_k: GT candidates per prediction that get a mask IoU.
        maskiou_gate: pairs under this mask IoU can never match; a pair exactly at it can.
        maskiou_resolution: side of the virtual canvas in pixels.
        fp_cost, fn_cost: cost of leaving a prediction, or a GT object, alone; a pair costs 1 - IoU. With the defaults
            matching a feasible pair is always cheaper than leaving both alone; below a sum of 1 a pair can be too dear.
    """

    candidate_top_k: int = 10
    maskiou_gate: float = 0.3
    maskiou_resolution: int = 256
    fp_cost: float = 1.0
    fn_cost: float = 1.0

    def __post_init__(self) -> None:
        if self.candidate_top_k < 1:
            raise ConfigError(f"candidate_top_k must be at least 1, got {self.candidate_top_k}")
        if not 0.0 <= self.maskiou_gate <= 1.0:
            raise ConfigError(f"maskiou_gate must lie in 0..1, got {self.maskiou_gate}")
        if self.maskiou_resolution < 2:
            raise ConfigError(f"maskiou_resolution must be at least 2, got {self.maskiou_resolution}")
        for name, cost in (("fp_cost", self.fp_cost), ("fn_cost", self.fn_cost)):
            if not (math.isfinite(cost) and cost >= 0):
                raise ConfigError(f"{name} must be a finite number >= 0, got {cost}")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How a matched pair with a polygon is aligned (keys ``rollout_matching.ot_*``)."""

    cost: Literal["l1", "l2"] = "l2"
    epsilon: float = 10.0
    iters: int = 30


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """What becomes of the model's answer (keys ``rollout_matching.target.*``). All but ``answer`` concern a rewritten
    one alone. ``duplicates``: unmatched objects that repeat an earlier one. ``soft_threshold``: least confidence, in
    (0, 1], of an unmatched object that becomes soft, with ``unmatched: soft``. ``complete_above``: least share, in
    (0, 1], of the objects in a step's answers that annotations match, from which on the step's policy is
    :meth:`for_complete`; None: never.
    """

    answer: Literal["as_written", "rewritten"] = "as_written"
    unmatched: Literal["mask", "drop", "soft"] = "mask"
    duplicates: Literal["keep", "drop", "replace"] = "keep"
    missed: Literal["append", "in_order"] = "append"
    soft_threshold: float = 0.5
    complete_above: float | None = None

    def for_complete(self) -> TargetPolicy:
        """The policy of a step whose annotations are taken as complete: nothing else is there, and what was missed is
        written where annotations have it. Appended, it would teach to pass over what is hard and to come back to it.
        """
        return replace(self, unmatched="drop", duplicates="drop", missed="in_order", complete_above=None)
