"""Declared modules → one loss.

``loss = Σ_modules weight · Σ_losses (sum over this row's positions) / (positions of the whole optimizer step)``

Denominators are sums of the step's totals (:func:`coordexp.targets.count_terms`), known before the first backward and
equal on every rank. Summed over micro-steps and ranks the loss is therefore the step's exact mean per term, however its
segments were packed or spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import torch

from coordexp.config.objective import Channel, ModuleSpec, PipelineConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.objective.coord_math import DecodeMode
from coordexp.objective.head import HeadQuery, HeadScores, LogitRequest
from coordexp.objective.modules import DECODE, BBoxGeo, CoordDiag, CoordReg, MeansOver, TokenCE
from coordexp.objective.supervision import SupervisionTensors
from coordexp.targets.weights import is_active

MODULES: dict[str, type] = {"token_ce": TokenCE, "coord_reg": CoordReg, "bbox_geo": BBoxGeo, "coord_diag": CoordDiag}


class Module(Protocol):
    """A group of losses."""

    means_over: ClassVar[MeansOver]

    def required_logits(self) -> LogitRequest:
        """What the head must compute."""
        ...

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> dict[str, torch.Tensor]:
        """Weighted sums over the row's positions, by loss, with gradient. A loss without a position may be missing."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedModule:
    """A module of the pipeline, the name under which it is declared, and the factor on its losses."""

    name: str
    weight: float
    module: Module

    def shares(
        self, supervision: SupervisionTensors, scores: HeadScores, totals: Mapping[str, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The row's share of the step's mean of each loss; none of a loss without a position in the step."""
        for loss, total in self.module.sums(supervision, scores).items():
            denominator = sum(totals[term] for term in self.module.means_over[loss])
            if denominator > 0:
                yield loss, self.weight * total / denominator


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveResult:
    """``loss`` carries gradient; ``terms`` maps ``loss/<module>/<loss>`` to this row's share of it, and
    ``coord_diag/<name>`` to its share of the step's mean. Shares add over micro-steps and ranks."""

    loss: torch.Tensor
    terms: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ObjectivePipeline:
    """An ordered list of modules; order never changes a value."""

    objective: tuple[WeightedModule, ...]
    diagnostics: tuple[WeightedModule, ...] = ()

    def query(self, supervision: SupervisionTensors) -> HeadQuery:
        """What these modules need of the language head for one row. Call it before the row moves to a GPU."""
        return HeadQuery.for_row(
            supervision,
            trained=LogitRequest.union(entry.module.required_logits() for entry in self.objective),
            measured=LogitRequest.union(entry.module.required_logits() for entry in self.diagnostics),
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

    def __call__(
        self, supervision: SupervisionTensors, scores: HeadScores, totals: Mapping[str, int]
    ) -> ObjectiveResult:
        """One row's share of the step's loss. ``totals``: positions of each term in the whole step, over all ranks."""
        assert scores.label_logit_N.dtype.itemsize >= 4, "a wrapper rounded the head's scores; see its output_dtype"
        # A row without a supervised position still needs a loss with a graph: DDP waits for every gradient.
        loss = scores.label_logit_N[:0].sum()
        terms: dict[str, torch.Tensor] = {}
        for entry in self.objective:
            for name, share in entry.shares(supervision, scores, totals):
                loss = loss + share
                terms[f"loss/{entry.name}/{name}"] = share.detach()
        for entry in self.diagnostics:
            for name, share in entry.shares(supervision, scores, totals):
                terms[f"{entry.name}/{name}"] = share.detach()
        return ObjectiveResult(loss, terms)


def build_pipeline(config: PipelineConfig, channel: Channel = "B", *, decode: DecodeMode = DECODE) -> ObjectivePipeline:
    """The pipeline that ``config`` declares, for one training channel; inactive modules are left out and cost nothing.

    Its targets take their weights from :meth:`coordexp.targets.SupervisionWeights.from_pipeline` of the same ``config``
    and channel. ``decode``: how ``bbox_geo`` decodes a coordinate.
    """

    def build(spec: ModuleSpec, weight: float) -> WeightedModule:
        module = MODULES[spec.name]
        # A module takes the keys of its formula. Keys that weigh tokens (token_ce's) are in the targets already.
        keys = {"decode": decode, **spec.config.model_dump()}
        return WeightedModule(spec.name, weight, module(**{field.name: keys[field.name] for field in fields(module)}))

    return ObjectivePipeline(
        tuple(build(spec, spec.weight) for spec in config.objective if is_active(spec, channel)),
        # A weight turns a diagnostic on or off; what it measures is never scaled.
        tuple(build(spec, 1.0) for spec in config.diagnostics if is_active(spec, channel)),
    )


def sft_pipeline(coord_loss: CoordSoftCEW1Config | None) -> ObjectivePipeline:
    """Stage 1: cross-entropy, with ``custom.coord_soft_ce_w1`` on text alone and its losses on coordinates.

    Its targets take their weights from :meth:`coordexp.targets.SupervisionWeights.for_sft`.
    """
    objective = [WeightedModule("token_ce", 1.0, TokenCE())]
    if coord_loss is not None and coord_loss.enabled:
        coords = CoordReg(
            coord_ce_weight=coord_loss.ce_weight,
            soft_ce_weight=coord_loss.soft_ce_weight,
            w1_weight=coord_loss.w1_weight,
            coord_gate_weight=coord_loss.gate_weight,
            text_gate_weight=coord_loss.text_gate_weight,
            temperature=coord_loss.temperature,
            target_sigma=coord_loss.target_sigma,
            target_truncate=coord_loss.target_truncate,
        )
        objective.append(WeightedModule("coord_reg", 1.0, coords))
    return ObjectivePipeline(tuple(objective), (WeightedModule("coord_diag", 1.0, CoordDiag()),))
