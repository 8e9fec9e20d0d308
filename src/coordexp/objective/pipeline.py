"""The loss of a packed row: modules declared in YAML, each term normalised over the whole optimizer step.

``loss = Σ_modules weight · Σ_losses (sum over this row's positions) / (positions of the whole optimizer step)``

A module multiplies values per position by the target's weights (:mod:`coordexp.targets.weights`) and sums them over the
row. The pipeline divides by the step's totals (:func:`coordexp.targets.count_terms`), which are known before the first
backward pass and equal on every rank. Summed over rows and ranks the loss is therefore the step's exact mean per term,
however its segments were packed or distributed.

N supervised positions of a row, K coordinate slots, M boxes, B = 1000 bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from coordexp.config.objective import Channel, ModuleSpec, PipelineConfig
from coordexp.config.schema import CoordSoftCEW1Config
from coordexp.modeling.inputs import for_device
from coordexp.modeling.self_context import SelfContext, self_context_states
from coordexp.modeling.trainer_weights import output_head
from coordexp.objective import coord_math
from coordexp.objective.coord_math import CoordColumns
from coordexp.objective.head import HeadQuery, HeadScores, SupervisionTensors, factor_dtype, score_head
from coordexp.records import NUM_BINS, PackedRow
from coordexp.targets.weights import is_active

Sums = dict[str, torch.Tensor]
MeansOver = Mapping[str, tuple[str, ...]]  # by name of a loss: the terms whose positions it is a mean over


@dataclass(frozen=True, slots=True)
class LogitRequest:
    """The scores of the language head that a module needs. Nothing else is computed.

    ``vocab``: terms at whose positions it needs logsumexp over the vocabulary and the label's logit; ``coord_mass``:
    terms at whose positions it needs logsumexp over the coordinate columns; ``coord_logits``: whether it needs the 1000
    logits at every coordinate slot; ``temperatures`` of the logsumexps.
    """

    vocab: frozenset[str] = frozenset()
    coord_mass: frozenset[str] = frozenset()
    coord_logits: bool = False
    temperatures: frozenset[float] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenCE:
    """``Σ w·CE / N`` over text tokens, in stage 1 without a coordinate loss over coordinate tokens too.

    The three losses share N, so they add up to one mean over all tokens that have a weight.
    """

    means_over: ClassVar[MeansOver] = dict.fromkeys(
        ("struct_ce", "desc_ce", "coord_ce"), ("struct_ce", "desc_ce", "coord_token_ce")
    )

    def required_logits(self) -> LogitRequest:
        return LogitRequest(vocab=frozenset(("struct_ce", "desc_ce", "coord_token_ce")), temperatures=frozenset((1.0,)))

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        ce_N = scores.cross_entropy_N()
        sums = {term: (supervision.weight_N(term) * ce_N).sum() for term in ("struct_ce", "desc_ce")}
        if "coord_token_ce" in supervision.weights:
            sums["coord_ce"] = (supervision.weight_N("coord_token_ce") * ce_N).sum()
        return sums


@dataclass(frozen=True, slots=True)
class CoordReg:
    """Hard CE, soft CE, W1 and the coordinate gate per coordinate slot; the text gate per text slot."""

    coord_ce_weight: float
    soft_ce_weight: float
    w1_weight: float
    coord_gate_weight: float
    text_gate_weight: float
    temperature: float
    target_sigma: float
    target_truncate: float | None

    means_over: ClassVar[MeansOver] = {
        **dict.fromkeys(("coord_ce", "soft_ce", "w1", "coord_gate"), ("coord",)),
        "text_gate": ("text_gate",),
    }

    def required_logits(self) -> LogitRequest:
        gates = self.coord_gate_weight > 0, self.text_gate_weight > 0
        gated = frozenset(term for term, gate in zip(("coord", "text_gate"), gates, strict=True) if gate)
        on_bins = self.coord_ce_weight, self.soft_ce_weight, self.w1_weight, self.coord_gate_weight
        return LogitRequest(
            vocab=gated,
            coord_mass=gated - {"coord"},
            coord_logits=any(weight > 0 for weight in on_bins),
            temperatures=frozenset((self.temperature,)) if any(gates) else frozenset(),
        )

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        sums: Sums = {}
        if scores.coord_logit_KB is not None and len(supervision.coord_in_N_K):
            sums.update(self._coord_sums(supervision, scores, scores.coord_logit_KB))
        if self.text_gate_weight > 0:
            vocab_lse_N, coord_lse_N = scores.vocab_lse_N[self.temperature], scores.coord_lse_N[self.temperature]
            gate_N = coord_math.text_gate_of_lse(vocab_lse_N, coord_lse_N)
            sums["text_gate"] = self.text_gate_weight * (supervision.weight_N("text_gate") * gate_N).sum()
        return sums

    def _coord_sums(self, supervision: SupervisionTensors, scores: HeadScores, logit_KB: torch.Tensor) -> Sums:
        weight_K = supervision.weight_N("coord")[supervision.coord_in_N_K]
        z_KB = logit_KB / self.temperature
        coord_lse_K = torch.logsumexp(z_KB, dim=-1)
        log_p_KB = z_KB - coord_lse_K[:, None]
        center_K = supervision.coord_bin_K.to(log_p_KB.dtype)
        sums: Sums = {}
        if self.soft_ce_weight > 0 or self.w1_weight > 0:
            q_KB = coord_math.gaussian_targets(center_K, NUM_BINS, self.target_sigma, self.target_truncate)
            if self.soft_ce_weight > 0:
                soft_K = coord_math.soft_cross_entropy(log_p_KB, q_KB)
                sums["soft_ce"] = self.soft_ce_weight * (weight_K * soft_K).sum()
            if self.w1_weight > 0:
                w1_K = coord_math.wasserstein1(log_p_KB.exp(), q_KB)
                sums["w1"] = self.w1_weight * (weight_K * w1_K).sum()
        if self.coord_ce_weight > 0:
            hard_K1 = center_K.round().long()[:, None]
            sums["coord_ce"] = -self.coord_ce_weight * (weight_K * log_p_KB.gather(1, hard_K1)[:, 0]).sum()
        if self.coord_gate_weight > 0:
            vocab_lse_K = scores.vocab_lse_N[self.temperature][supervision.coord_in_N_K]
            gate_K = coord_math.coord_gate_of_lse(vocab_lse_K, coord_lse_K)
            sums["coord_gate"] = self.coord_gate_weight * (weight_K * gate_K).sum()
        return sums


@dataclass(frozen=True, slots=True)
class BBoxGeo:
    """SmoothL1 (β = 1, mean over the four sides) and CIoU on decoded boxes, means over the step's boxes.

    A coordinate is decoded by its expectation. Predicted and true boxes are canonicalised the same way for both losses:
    an inverted box is not free for one.
    """

    smoothl1_weight: float
    ciou_weight: float

    means_over: ClassVar[MeansOver] = {"smoothl1": ("box",), "ciou": ("box",)}

    def required_logits(self) -> LogitRequest:
        return LogitRequest(coord_logits=self.smoothl1_weight > 0 or self.ciou_weight > 0)

    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        if scores.coord_logit_KB is None or not len(supervision.box_in_K_M4):
            return {}
        weight_M = supervision.weight_N("box")[supervision.coord_in_N_K[supervision.box_in_K_M4[:, 0]]]
        z_SB = scores.coord_logit_KB[supervision.box_in_K_M4.reshape(-1)]  # the four sides of all boxes
        decoded_M4 = coord_math.expected_position(z_SB.softmax(dim=-1)).reshape(-1, 4)
        predicted_M4 = coord_math.canonical_boxes(decoded_M4)
        true_M4 = coord_math.canonical_boxes(supervision.box_bin_M4.to(decoded_M4.dtype) / (NUM_BINS - 1))
        sums: Sums = {}
        if self.smoothl1_weight > 0:
            per_side_M4 = F.smooth_l1_loss(predicted_M4, true_M4, beta=1.0, reduction="none")
            sums["smoothl1"] = self.smoothl1_weight * (weight_M * per_side_M4.mean(dim=1)).sum()
        if self.ciou_weight > 0:
            sums["ciou"] = self.ciou_weight * (weight_M * coord_math.ciou_loss(predicted_M4, true_M4)).sum()
        return sums


@dataclass(frozen=True, slots=True)
class CoordDiag:
    """Means over the step's coordinate slots, without gradient. No loss reads them.

    ``acc_top5``: target bin among the five likeliest. ``p_target``: mass on the target bin. ``expected_bin_mae``:
    distance of the expectation decode to the target, in bins. ``coord_mass``: probability of any coordinate token.
    """

    means_over: ClassVar[MeansOver] = dict.fromkeys(
        ("acc_top5", "p_target", "expected_bin_mae", "coord_mass"), ("coord",)
    )

    def required_logits(self) -> LogitRequest:
        return LogitRequest(vocab=frozenset(("coord",)), coord_logits=True, temperatures=frozenset((1.0,)))

    @torch.no_grad()
    def sums(self, supervision: SupervisionTensors, scores: HeadScores) -> Sums:
        if scores.coord_logit_KB is None or not len(supervision.coord_in_N_K):
            return {}
        z_KB = scores.coord_logit_KB
        p_KB = z_KB.softmax(dim=-1)
        target_K1 = supervision.coord_bin_K.round().long()[:, None]
        expected_K = coord_math.expected_position(p_KB) * (NUM_BINS - 1)
        vocab_lse_K = scores.vocab_lse_N[1.0][supervision.coord_in_N_K]
        return {
            "acc_top5": (p_KB.topk(5, dim=-1).indices == target_K1).any(dim=-1).sum(),
            "p_target": p_KB.gather(1, target_K1).sum(),
            "expected_bin_mae": (expected_K - supervision.coord_bin_K.to(expected_K.dtype)).abs().sum(),
            "coord_mass": torch.exp(-coord_math.coord_gate_of_lse(vocab_lse_K, z_KB.logsumexp(dim=-1))).sum(),
        }


MODULES: dict[str, type] = {"token_ce": TokenCE, "coord_reg": CoordReg, "bbox_geo": BBoxGeo, "coord_diag": CoordDiag}


class Module(Protocol):
    """A group of losses."""

    means_over: ClassVar[MeansOver]

    def required_logits(self) -> LogitRequest:
        """The scores that the head must compute."""
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

    def named(self, channel: Channel | None) -> dict[str, torch.Tensor]:
        """Loss and terms by their names in logs: in two-channel training ``loss/token_ce/struct_ce`` of Channel-A is
        ``loss/A/token_ce/struct_ce``."""
        if channel is None:
            return {"loss": self.loss, **self.terms}
        families = [(*name.split("/", 1), share) for name, share in self.terms.items()]
        return {"loss": self.loss, **{f"{family}/{channel}/{rest}": share for family, rest, share in families}}


@dataclass(frozen=True, slots=True)
class ObjectivePipeline:
    """An ordered list of modules; order never changes a value."""

    objective: tuple[WeightedModule, ...]
    diagnostics: tuple[WeightedModule, ...] = ()

    def query(self, supervision: SupervisionTensors) -> HeadQuery:
        """The scores that these modules need for one row. Call it before the row moves to a GPU, where
        reading masks would wait for the device."""
        trained = [entry.module.required_logits() for entry in self.objective]
        requests = [*trained, *(entry.module.required_logits() for entry in self.diagnostics)]
        vocab_N = supervision.mask_N(term for one in requests for term in one.vocab)
        trained_N = supervision.mask_N(term for one in trained for term in one.vocab)
        mass_N = supervision.mask_N(term for one in requests for term in one.coord_mass)
        scored_N, needs_slots = vocab_N | mass_N, any(one.coord_logits for one in requests)
        if needs_slots:
            scored_N[supervision.coord_in_N_K] = True
        return HeadQuery(
            vocab_in_N_U=vocab_N.nonzero()[:, 0],
            trained_in_N=trained_N.nonzero()[:, 0],
            coord_mass_in_N_G=mass_N.nonzero()[:, 0],
            slot_in_N_K=supervision.coord_in_N_K if needs_slots else None,
            num_scored=int(scored_N.sum()),
            temperatures=tuple(sorted({tau for one in requests for tau in one.temperatures})),
        )

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


def build_pipeline(config: PipelineConfig, channel: Channel = "B") -> ObjectivePipeline:
    """The pipeline that ``config`` declares, for one training channel; inactive modules are left out and cost nothing.

    Its targets take their weights from :meth:`coordexp.targets.SupervisionWeights.from_pipeline` of the same ``config``
    and channel.
    """

    def build(spec: ModuleSpec, weight: float) -> WeightedModule:
        module = MODULES[spec.name]
        # A module takes the keys of its formula. Keys that weigh tokens (token_ce's) are in the targets already.
        keys = {field.name: getattr(spec.config, field.name) for field in fields(module)}
        return WeightedModule(spec.name, weight, module(**keys))

    return ObjectivePipeline(
        tuple(build(spec, spec.weight) for spec in config.objective if is_active(spec, channel)),
        # A weight turns a diagnostic on or off; its figure is never scaled.
        tuple(build(spec, 1.0) for spec in config.diagnostics if is_active(spec, channel)),
    )


def sft_pipeline(coord_loss: CoordSoftCEW1Config | None) -> ObjectivePipeline:
    """Stage 1: cross-entropy, with ``custom.coord_soft_ce_w1`` on text alone and its losses on coordinates.

    Its targets take their weights from :meth:`coordexp.targets.SupervisionWeights.for_sft`.
    """
    objective = [WeightedModule("token_ce", 1.0, TokenCE())]
    if coord_loss is not None and coord_loss.enabled:
        same = coord_loss.model_dump(exclude={"enabled", "ce_weight", "gate_weight"})
        coords = CoordReg(coord_ce_weight=coord_loss.ce_weight, coord_gate_weight=coord_loss.gate_weight, **same)
        objective.append(WeightedModule("coord_reg", 1.0, coords))
    return ObjectivePipeline(tuple(objective), (WeightedModule("coord_diag", 1.0, CoordDiag()),))


def tree_map(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to every tensor in dataclasses, mappings and tuples; copy the rest."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: tree_map(fn, item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(tree_map(fn, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: tree_map(fn, getattr(value, field.name)) for field in fields(value)})
    return value


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """``inputs``: arguments of the model's forward. ``queries``: one per scored forward."""

    row: PackedRow
    inputs: Mapping[str, Any]
    supervision: SupervisionTensors
    queries: tuple[HeadQuery, ...]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> RowTensors:
        """A copy with ``move`` applied to every tensor that the device needs."""
        supervision, queries = tree_map(move, (self.supervision, self.queries))
        return RowTensors(self.row, for_device(self.inputs, move), supervision, queries)

    def to(self, device: torch.device) -> RowTensors:
        """A copy on ``device``; asynchronous if the memory is page-locked."""
        return self.moved(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


@dataclass(frozen=True, slots=True)
class RowObjective:
    """The objective of a task on a row: the forward passes over it, and the loss on their scores.

    There is one forward, which all modules score. With ``self_context`` (Channel-A) there are several: cross-entropy
    scores the first, which reads the ground truth; everything about coordinates, the text gate included, scores the
    last, which reads the model's own coordinates. ``coord_ids``: the 1000 coordinate tokens, by bin.
    """

    pipeline: ObjectivePipeline
    coord_ids: tuple[int, ...]
    self_context: SelfContext | None = None

    def queries(self, supervision: SupervisionTensors) -> tuple[HeadQuery, ...]:
        """The scores that each forward must compute."""
        return tuple(part.query(supervision) for part in self._scored_by())

    def scores(self, model: Any, row: RowTensors) -> tuple[HeadScores, ...]:
        """Run the forwards of the bare model. Call it inside the wrapped model's own:
        ``wrapped(forward_fn=partial(objective.scores, row=row))``."""
        supervision, position_N = row.supervision, row.supervision.position_N
        if self.self_context is None:
            # With a cache, transformers no longer sees the packed segments apart, and attention leaks between them.
            states = [model.model(**row.inputs, use_cache=False)[0][0]]
        else:
            coord_ids_B = CoordColumns.on(self.coord_ids, position_N.device).ids_B
            coord_rows: list[torch.Tensor] = []

            def coord_logits(hidden_KH: torch.Tensor) -> torch.Tensor:
                head = output_head(model)
                if not coord_rows:  # after the first forward, with which FSDP gathers the table; once a row, because
                    coord_rows.append(head.weight_VH[coord_ids_B])  # a selection's gradient is as large as the table
                return coordinate_logits(hidden_KH, coord_rows[0], head.offset_BH)

            coord_pos_K = position_N[supervision.coord_in_N_K]
            states = self_context_states(model, row.inputs, coord_pos_K, coord_logits, coord_ids_B, self.self_context)
        head, before_N = output_head(model), position_N - 1  # the token at p is predicted from position p − 1
        return tuple(
            score_head(states_LH[before_N], head.weight_VH, query, supervision.label_N, self.coord_ids, head.offset_BH)
            for states_LH, query in zip(states, row.queries, strict=True)
        )

    def result(
        self, supervision: SupervisionTensors, scores: Sequence[HeadScores], totals: Mapping[str, int]
    ) -> ObjectiveResult:
        """The row's share of the step's loss. ``totals``: positions of each term in the whole step, over all ranks."""
        parts = [part(supervision, one, totals) for part, one in zip(self._scored_by(), scores, strict=True)]
        loss = parts[0].loss
        for further in parts[1:]:
            loss = loss + further.loss
        return ObjectiveResult(loss, {name: term for one in parts for name, term in one.terms.items()})

    def _scored_by(self) -> tuple[ObjectivePipeline, ...]:
        # The modules that score each forward.
        if self.self_context is None:
            return (self.pipeline,)
        on_text, others = (
            tuple(entry for entry in self.pipeline.objective if (entry.name == "token_ce") is is_text)
            for is_text in (True, False)
        )
        return ObjectivePipeline(on_text), ObjectivePipeline(others, self.pipeline.diagnostics)


def coordinate_logits(
    hidden_KH: torch.Tensor, rows_BH: torch.Tensor, offset_BH: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits that :func:`score_head` gives the coordinate tokens, from their rows of the head: (K, B), float32 or
    wider also under autocast, so that the likeliest bin is the same. Unlimited; differentiable in all arguments."""
    dtype = factor_dtype(hidden_KH, rows_BH)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(hidden_KH.device.type, enabled=False):
        factor_KH = hidden_KH.to(dtype)
        z_KB = factor_KH.to(wide) @ rows_BH.to(dtype).to(wide).T
        return z_KB if offset_BH is None else z_KB + factor_KH.to(offset_BH.dtype) @ offset_BH.T
