"""The declared objective: an ordered list of modules, each written out in full (no key of a module has a default)."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, Union

from pydantic import Field, field_validator

from coordexp.config.base import ListOf, NonNegative, Positive, StrictModel

Channel = Literal["A", "B"]
Sigma = Annotated[float, Field(ge=1e-6, le=1e6)]  # bins; its square must stay far from 0


class TokenCEConfig(StrictModel):
    """Keys of ``token_ce``: cross-entropy on text tokens."""

    struct_ce_weight: NonNegative
    """weight of structure tokens: braces, quotes, keys, commas, EOS"""
    desc_ce_weight: NonNegative
    """weight of description tokens in answers written from ground truth, and of matched objects in rewritten answers"""
    rollout_fn_desc_weight: NonNegative
    """weight of description tokens of missed objects in targets of rollouts; 0 masks them"""


class CoordRegConfig(StrictModel):
    """Keys of ``coord_reg``: losses on the distribution over coordinate bins."""

    coord_ce_weight: NonNegative
    """weight of hard cross-entropy over the 1000 bins"""
    soft_ce_weight: NonNegative
    """weight of soft cross-entropy against the Gaussian target"""
    w1_weight: NonNegative
    """weight of the Wasserstein-1 distance to the target"""
    coord_gate_weight: NonNegative
    """weight of the penalty on mass outside the coordinate tokens at coordinate positions"""
    text_gate_weight: NonNegative
    """weight of the penalty on coordinate-token mass at supervised text positions"""
    temperature: Positive
    """softmax temperature of the coordinate distribution"""
    target_sigma: Sigma
    """width of the Gaussian target, in bins"""
    target_truncate: Positive | None
    """radius in bins beyond which the target is zero; null keeps the whole Gaussian"""


class BBoxGeoConfig(StrictModel):
    """Keys of ``bbox_geo``: losses on decoded boxes."""

    smoothl1_weight: NonNegative
    """weight of SmoothL1 on decoded box coordinates"""
    ciou_weight: NonNegative
    """weight of the CIoU loss on decoded boxes"""


class CoordDiagConfig(StrictModel):
    """``coord_diag`` takes no keys."""


class ModuleSpec(StrictModel):
    """One entry of the pipeline."""

    name: str
    """module"""
    enabled: bool
    """run this module"""
    weight: NonNegative
    """factor on the module's whole loss"""
    channels: Annotated[ListOf[Channel], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
    """training channels the module acts in: a list of 'A' and 'B'"""
    config: StrictModel
    """the module's own keys"""

    @field_validator("channels")
    @classmethod
    def _once_each(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if len(set(channels)) != len(channels):
            raise ValueError(f"names a channel twice: {list(channels)}")
        return channels


class TokenCESpec(ModuleSpec):
    """One entry of the pipeline: ``token_ce``."""

    name: Literal["token_ce"]
    config: TokenCEConfig


class CoordRegSpec(ModuleSpec):
    """One entry of the pipeline: ``coord_reg``."""

    name: Literal["coord_reg"]
    config: CoordRegConfig


class BBoxGeoSpec(ModuleSpec):
    """One entry of the pipeline: ``bbox_geo``."""

    name: Literal["bbox_geo"]
    config: BBoxGeoConfig


class CoordDiagSpec(ModuleSpec):
    """One entry of the diagnostics: ``coord_diag``."""

    name: Literal["coord_diag"]
    config: CoordDiagConfig


ObjectiveSpec = Annotated[Union[TokenCESpec, CoordRegSpec, BBoxGeoSpec], Field(discriminator="name")]  # noqa: UP007


class PipelineConfig(StrictModel):
    """The whole objective: the total loss is the sum of weight x loss over ``objective``, in this order."""

    objective: Annotated[ListOf[ObjectiveSpec], Field(min_length=1)]
    """modules whose losses are summed, in order; each at most once per channel"""
    diagnostics: ListOf[CoordDiagSpec]
    """modules that only measure; [] for none"""

    @field_validator("objective", "diagnostics")
    @classmethod
    def _once_a_channel(cls, specs: tuple[Any, ...]) -> tuple[Any, ...]:
        counts = Counter((spec.name, channel) for spec in specs for channel in spec.channels)
        twice = [f"{name} more than once for channel {channel}" for (name, channel), n in counts.items() if n > 1]
        if twice:
            raise ValueError(f"lists {', '.join(twice)}; merge the entries, or give each its own channels")
        return specs

    def trains(self, channel: str) -> bool:
        """Whether a channel has a loss: an enabled module with a weight above 0, its own and one in its config."""
        active = (spec for spec in self.objective if spec.enabled and spec.weight > 0 and channel in spec.channels)
        return any(value > 0 for spec in active for key, value in spec.config if key.endswith("_weight"))
