"""Declared modules → one loss.

``loss = Σ_modules weight · Σ_terms (sum over this row's positions) / (positions of the whole optimizer step)``

Denominators are global, known before the first backward, and the same on every rank. Summed over micro-steps and ranks
the loss is therefore the step's exact mean per term, however its segments were packed or spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from coordexp.config.objective import Channel, ModuleSpec, PipelineConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.objective.context import (
    HeadQuery,
    ObjectiveContext,
    SupervisionCounts,
    SupervisionTensors,
    Wants,
    head_query,
)
from coordexp.objective.coord_math import DecodeMode
from coordexp.objective.modules import DECODE, BBoxGeo, CoordDiag, CoordReg, TokenCE

MODULES: dict[str, type] = {"token_ce": TokenCE, "coord_reg": CoordReg, "bbox_geo": BBoxGeo, "coord_diag": CoordDiag}


class Module(Protocol):
    """A term group: what it wants of the head, sums over the row's supervised positions, and each term's denominator
    from the step's counts."""

    def denominators(self, counts: SupervisionCounts) -> dict[str, int]:
        """By what each term's sum is divided, from the counts of the whole step; 0 where it has nothing to score."""
        ...

    def wants(self, supervision: SupervisionTensors) -> Wants:
        """What the head must compute for this row."""
        ...

    def sums(self, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
        """Sums over the row's positions, by term, with gradient; a term of which it holds nothing may be missing."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedModule:
    """A module of the pipeline, the name under which it is declared, and the factor on its terms."""

    name: str
    weight: float
    module: Module


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveResult:
    """``loss`` carries gradient; ``terms`` maps ``loss/<module>/<term>`` to this row's share of it, and
    ``coord_diag/<name>`` to its share of the step's mean. Shares add over micro-steps and ranks."""

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ObjectivePipeline:
    """An ordered list of modules; order never changes a value."""

    objective: tuple[WeightedModule, ...]
    diagnostics: tuple[WeightedModule, ...] = ()

    def query(self, supervision: SupervisionTensors) -> HeadQuery:
        """What these modules want of the language head for one row. Cheapest on the CPU, before the row moves."""
        return head_query(
            supervision,
            [entry.module.wants(supervision) for entry in self.objective],
            [entry.module.wants(supervision) for entry in self.diagnostics],
        )

    def split(self, *names: str) -> tuple[ObjectivePipeline, ObjectivePipeline]:
        """The modules called ``names``, and the others: for two forwards of one row, each with its own query."""
        parts = []
        for inside in (True, False):
            picked = (
                tuple(entry for entry in entries if (entry.name in names) is inside)
                for entries in (self.objective, self.diagnostics)
            )
            parts.append(ObjectivePipeline(*picked))
        return parts[0], parts[1]

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        # A row without one supervised slot of some term still needs a loss with a graph: DDP waits for every gradient.
        loss = ctx.scores.vocab_lse_TU[:, :0].sum()
        terms: dict[str, torch.Tensor] = {}
        for entry in self.objective:
            for term, share in _shares(entry, ctx).items():
                loss = loss + share
                terms[f"loss/{entry.name}/{term}"] = share.detach()
        for entry in self.diagnostics:
            for term, share in _shares(entry, ctx).items():
                terms[f"{entry.name}/{term}"] = share.detach()
        return ObjectiveResult(loss, terms)


def build_pipeline(
    config: PipelineConfig,
    channel: Channel = "B",
    *,
    decode: DecodeMode = DECODE,
    with_matched_prefix: bool = False,
) -> ObjectivePipeline:
    """The pipeline that ``config`` declares, for one training channel; other modules are left out and cost nothing.

    ``decode``: how ``bbox_geo`` decodes a coordinate. ``with_matched_prefix``: see :class:`TokenCE`.
    """

    def is_active(spec: ModuleSpec) -> bool:
        return spec.enabled and channel in spec.channels and spec.weight > 0

    token_ce = next((spec.config for spec in config.objective if spec.name == "token_ce" and is_active(spec)), None)
    beside_its_keys = {
        "token_ce": {"with_matched_prefix": with_matched_prefix},
        "coord_reg": {
            "desc_in_gt": token_ce is not None and token_ce.desc_ce_weight > 0,
            "desc_in_rollout": token_ce is not None and token_ce.rollout_fn_desc_weight > 0,
        },
        "bbox_geo": {"decode": decode},
    }

    def build(spec: ModuleSpec, weight: float) -> WeightedModule:
        options = spec.config.model_dump() | beside_its_keys.get(spec.name, {})
        return WeightedModule(spec.name, weight, MODULES[spec.name](**options))

    return ObjectivePipeline(
        tuple(build(spec, spec.weight) for spec in config.objective if is_active(spec)),
        # A weight turns a diagnostic on or off; what it measures is never scaled.
        tuple(build(spec, 1.0) for spec in config.diagnostics if is_active(spec)),
    )


def sft_pipeline(coord_loss: CoordSoftCEW1Config | None) -> ObjectivePipeline:
    """Stage 1: with ``custom.coord_soft_ce_w1``, cross-entropy on text and those terms on coordinates; without it,
    plain cross-entropy over the full vocabulary, one mean over all tokens of the answer."""
    diagnostics = (WeightedModule("coord_diag", 1.0, CoordDiag()),)
    if coord_loss is None or not coord_loss.enabled:
        plain = TokenCE(1.0, 1.0, 1.0, with_coords=True)
        return ObjectivePipeline((WeightedModule("token_ce", 1.0, plain),), diagnostics)
    coords = CoordReg(
        coord_ce_weight=coord_loss.ce_weight,
        soft_ce_weight=coord_loss.soft_ce_weight,
        w1_weight=coord_loss.w1_weight,
        coord_gate_weight=coord_loss.gate_weight,
        text_gate_weight=coord_loss.text_gate_weight,
        temperature=coord_loss.temperature,
        target_sigma=coord_loss.target_sigma,
        target_truncate=coord_loss.target_truncate,
        desc_in_gt=True,
    )
    text = WeightedModule("token_ce", 1.0, TokenCE(1.0, 1.0, 1.0))
    return ObjectivePipeline((text, WeightedModule("coord_reg", 1.0, coords)), diagnostics)


def _shares(entry: WeightedModule, ctx: ObjectiveContext) -> dict[str, torch.Tensor]:
    denominators = entry.module.denominators(ctx.counts)
    return {
        term: entry.weight * total / denominators[term]
        for term, total in entry.module.sums(ctx).items()
        if denominators[term] > 0
    }
