"""The declared objective: an ordered list of modules, each written out in full (no key of a module has a default)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Field, field_validator

from coordexp.config.strict import ListOf, StrictModel

Channel = Literal["A", "B"]


class TokenCEConfig(StrictModel):
    """Keys of ``token_ce``: cross-entropy on text tokens."""

    struct_ce_weight: float = Field(ge=0, description="weight of structure tokens: braces, quotes, keys, commas, EOS")
    desc_ce_weight: float = Field(ge=0, description="weight of description tokens in answers written from ground truth")
    rollout_fn_desc_weight: float = Field(
        ge=0, description="weight of description tokens of missed objects appended to a rollout; 0 masks them"
    )


class CoordRegConfig(StrictModel):
    """Keys of ``coord_reg``: losses on the distribution over coordinate bins."""

    coord_ce_weight: float = Field(ge=0, description="weight of hard cross-entropy over the 1000 bins")
    soft_ce_weight: float = Field(ge=0, description="weight of soft cross-entropy against the Gaussian target")
    w1_weight: float = Field(ge=0, description="weight of the Wasserstein-1 distance to the target")
    coord_gate_weight: float = Field(
        ge=0, description="weight of the penalty on mass outside the coordinate tokens at coordinate positions"
    )
    text_gate_weight: float = Field(
        ge=0, description="weight of the penalty on coordinate-token mass at supervised text positions"
    )
    temperature: float = Field(gt=0, description="softmax temperature of the coordinate distribution")
    target_sigma: float = Field(gt=0, description="width of the Gaussian target, in bins")
    target_truncate: float | None = Field(
        gt=0, description="radius in bins beyond which the target is zero; null keeps the whole Gaussian"
    )


class BBoxGeoConfig(StrictModel):
    """Keys of ``bbox_geo``: losses on decoded boxes."""

    smoothl1_weight: float = Field(ge=0, description="weight of SmoothL1 on decoded box coordinates")
    ciou_weight: float = Field(ge=0, description="weight of the CIoU loss on decoded boxes")


class CoordDiagConfig(StrictModel):
    """``coord_diag`` takes no keys."""


class _Spec(StrictModel):
    name: str = Field(description="module")  # each kind of entry names itself
    enabled: bool = Field(description="run this module")
    weight: float = Field(ge=0, description="factor on the module's whole loss")
    channels: ListOf[Channel] = Field(
        min_length=1, description="training channels the module acts in: a list of 'A' and 'B'"
    )

    @field_validator("channels")
    @classmethod
    def _once_each(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if len(set(channels)) != len(channels):
            raise ValueError(f"names a channel twice: {list(channels)}")
        return channels


class TokenCESpec(_Spec):
    """One entry of the pipeline: ``token_ce``."""

    name: Literal["token_ce"] = Field(description="module")
    config: TokenCEConfig = Field(description="the module's own keys")


class CoordRegSpec(_Spec):
    """One entry of the pipeline: ``coord_reg``."""

    name: Literal["coord_reg"] = Field(description="module")
    config: CoordRegConfig = Field(description="the module's own keys")


class BBoxGeoSpec(_Spec):
    """One entry of the pipeline: ``bbox_geo``."""

    name: Literal["bbox_geo"] = Field(description="module")
    config: BBoxGeoConfig = Field(description="the module's own keys")


class CoordDiagSpec(_Spec):
    """One entry of the diagnostics: ``coord_diag``."""

    name: Literal["coord_diag"] = Field(description="module")
    config: CoordDiagConfig = Field(description="the module's own keys")


ObjectiveSpec = Annotated[Union[TokenCESpec, CoordRegSpec, BBoxGeoSpec], Field(discriminator="name")]  # noqa: UP007
# A union of one, until there is a second diagnostic: the tag still names the wrong module in errors.
DiagnosticSpec = CoordDiagSpec
ModuleSpec = TokenCESpec | CoordRegSpec | BBoxGeoSpec | CoordDiagSpec


class PipelineConfig(StrictModel):
    """The whole objective: the total loss is the sum of weight x loss over ``objective``, in this order."""

    objective: ListOf[ObjectiveSpec] = Field(min_length=1, description="modules whose losses are summed, in order")
    diagnostics: ListOf[DiagnosticSpec] = Field(description="modules that only measure; [] for none")

    @field_validator("objective", "diagnostics")
    @classmethod
    def _once_each(cls, specs: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [spec.name for spec in specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"lists {', '.join(twice)} more than once; merge the entries")
        return specs
