"""A packed row's supervision as tensors, and the language head at its supervised positions: the numbers that losses
need, one chunk of the vocabulary at a time. A GPU never holds all logits; a CPU keeps some for the backward pass.

N supervised positions of a row's L tokens, U of them scored against the whole vocabulary, K coordinate slots, M boxes,
G text positions of the text gate; V vocabulary, C columns of a chunk, B = 1000 bins, H hidden, T temperatures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from coordexp.modeling.cpu_products import multiplies_bfloat16_faster
from coordexp.objective.coord_math import LOGIT_LIMIT, CoordColumns, limit_logits
from coordexp.records import PackedRow
from coordexp.targets.weights import TERMS

# Logits in memory at a time: a CPU should keep them in its cache, a GPU needs large matrix products.
CHUNK_LOGITS_CPU = 2**20
CHUNK_LOGITS_GPU = 2**25
# Logits that wait for the backward pass on a CPU, where memory is cheaper than a product: 1 GiB of float32.
KEPT_LOGITS_CPU = 2**28
_ALIGNED = 256  # width of a chunk, in rows of the vocabulary
_VECTOR = 8  # bfloat16 numbers in the 16 bytes that matrix kernels load at once


@dataclass(frozen=True, slots=True, eq=False)
class SupervisionTensors:
    """Positions of a row with a non-zero weight in some term.

    ``position_N``: their tokens' row positions (the hidden states that predict them are at ``position_N - 1``);
    ``label_N``: token ids; ``weights``: (N,) float32 per term that the row has; ``coord_in_N_K``: indices into N of the
    coordinate slots, ``coord_bin_K``: their target bins, which may be fractional; ``box_in_K_M4``: indices into K of
    each box's slots, ``box_bin_M4``: its true bins.
    """

    position_N: torch.Tensor
    label_N: torch.Tensor
    weights: Mapping[str, torch.Tensor]
    coord_in_N_K: torch.Tensor
    coord_bin_K: torch.Tensor
    box_in_K_M4: torch.Tensor
    box_bin_M4: torch.Tensor

    @classmethod
    def from_row(cls, row: PackedRow) -> SupervisionTensors:
        """Shift the targets of a row that :func:`coordexp.packing.build_row` checked to row positions."""
        weights_L: dict[str, np.ndarray] = {}
        coord_pos, coord_bin, box_pos, box_bin = [], [], [], []
        for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
            target, first = segment.target, start + len(segment.prompt_token_ids)
            for term, weight_T in target.weights.items():
                weight_L = weights_L.setdefault(term, np.zeros(row.length, dtype=np.float32))
                weight_L[first:end] = weight_T
            coord_pos.append(target.coord_pos_K + first)
            coord_bin.append(target.coord_bin_K)
            box_pos.append(target.box_pos_M4 + first)
            box_bin.append(target.box_bin_M4)
        supervised_L = np.zeros(row.length, dtype=bool)
        for weight_L in weights_L.values():
            supervised_L |= weight_L != 0
        position_N = np.flatnonzero(supervised_L)
        coord_pos_K = np.concatenate(coord_pos)
        return cls(
            position_N=torch.from_numpy(position_N),
            label_N=torch.from_numpy(row.token_ids_L[position_N].astype(np.int64)),
            weights={term: torch.from_numpy(weight_L[position_N]) for term, weight_L in weights_L.items()},
            coord_in_N_K=torch.from_numpy(np.searchsorted(position_N, coord_pos_K)),
            coord_bin_K=torch.from_numpy(np.concatenate(coord_bin).astype(np.float64)),
            box_in_K_M4=torch.from_numpy(np.searchsorted(coord_pos_K, np.concatenate(box_pos))),
            box_bin_M4=torch.from_numpy(np.concatenate(box_bin).astype(np.float64)),
        )

    def weight_N(self, term: str) -> torch.Tensor:
        """Weights of ``term``, zeros if the row has none of it: (N,)."""
        # A misspelt term would be a loss of 0.
        assert term in self.weights or term in TERMS, f"{term!r} is none of TERMS of coordexp.targets.weights: {TERMS}"
        weight_N = self.weights.get(term)
        return torch.zeros_like(self.position_N, dtype=torch.float32) if weight_N is None else weight_N

    def mask_N(self, terms: Iterable[str]) -> torch.Tensor:
        """Positions that have a weight in any of ``terms``: bool (N,)."""
        mask_N = torch.zeros_like(self.position_N, dtype=torch.bool)
        for term in terms:
            mask_N |= self.weight_N(term) != 0
        return mask_N


@dataclass(frozen=True, slots=True, eq=False)
class HeadQuery:
    """The scores that the modules need for one row, as indices into its N supervised positions.

    ``vocab_in_N_U``: scored against the vocabulary; ``trained_in_N``: those of them with a gradient;
    ``coord_mass_in_N_G``: scored against the coordinate columns; ``slot_in_N_K``: slots whose coordinate logits are
    needed, None if no module needs them; ``num_scored``: positions where anything is computed.
    """

    vocab_in_N_U: torch.Tensor
    trained_in_N: torch.Tensor
    coord_mass_in_N_G: torch.Tensor
    slot_in_N_K: torch.Tensor | None
    num_scored: int
    temperatures: tuple[float, ...]


class HeadScores(NamedTuple):
    """The head's answers, finite, float32 or wider. A tuple of tensors, because DDP and FSDP look into what a forward
    returns.

    ``vocab_lse_N``: by temperature, logsumexp(z/τ) over the vocabulary; ``label_logit_N``; ``coord_lse_N``: by
    temperature, logsumexp(z/τ) over the coordinate columns; ``coord_logit_KB``: None if not requested. Positions that
    no module requested hold 0, in ``coord_lse_N`` -inf (no mass). ``nonfinite_N``: positions with a NaN or infinite
    logit; ``clamped_N``: positions with a finite logit beyond the limit.
    """

    vocab_lse_N: dict[float, torch.Tensor]
    label_logit_N: torch.Tensor
    coord_lse_N: dict[float, torch.Tensor]
    coord_logit_KB: torch.Tensor | None
    nonfinite_N: torch.Tensor
    clamped_N: torch.Tensor

    def cross_entropy_N(self) -> torch.Tensor:
        """Cross-entropy of the label over the vocabulary: (N,)."""
        return self.vocab_lse_N[1.0] - self.label_logit_N


def score_head(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    query: HeadQuery,
    label_N: torch.Tensor,
    coord_ids: Sequence[int],
    offset_BH: torch.Tensor | None = None,
    chunk_logits: int | None = None,
) -> HeadScores:
    """Apply the head to the hidden states that predict N tokens, where ``query`` needs it.

    ``z = h · W``, plus ``h · offset`` on the coordinate columns, limited by :func:`coord_math.limit_logits`.
    Differentiable in ``hidden_NH``, ``weight_VH`` and ``offset_BH``; a frozen weight costs no gradient. Call it inside
    the wrapped model's forward, where DDP prepares for gradients and FSDP gathers weights.

    Args: hidden_NH (N, H); weight_VH (V, H); label_N the N tokens; coord_ids the 1000 tokens by bin; offset_BH (B, H)
        or None; chunk_logits: logits in memory at a time.
    """
    device = hidden_NH.device
    dtype = factor_dtype(hidden_NH, weight_VH)
    chunk_logits = chunk_logits or (CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_GPU)
    coords = CoordColumns.on(tuple(coord_ids), device)
    keep = 0
    if device.type == "cpu" and torch.is_grad_enabled() and len(query.trained_in_N):
        keep = min(KEPT_LOGITS_CPU, len(query.vocab_in_N_U) * len(weight_VH))
    with torch.autocast(device.type, enabled=False):
        lse_TN, label_logit_N, coord_lse_TN, coord_logit_KB, nonfinite_N, clamped_N = ChunkedHead.apply(
            hidden_NH, weight_VH, offset_BH, label_N, query, coords, dtype, chunk_logits, keep
        )  # pyright: ignore[reportGeneralTypeIssues]
    return HeadScores(
        dict(zip(query.temperatures, lse_TN, strict=True)),
        label_logit_N,
        dict(zip(query.temperatures, coord_lse_TN, strict=True)),
        coord_logit_KB,
        nonfinite_N,
        clamped_N,
    )


class ChunkedHead(torch.autograd.Function):
    """Scores of hidden states without all their logits. The largest buffers hold one chunk, whatever the vocabulary.

    Forward
      1. Per chunk of the vocabulary: logits at the U positions; add their part to the logsumexps, pick the label's
         logit, note the largest and smallest logit.
      2. The 1000 coordinate logits at the K slots, and their logsumexp at the G text positions.
      3. If any logit is NaN, infinite or beyond the limit: 1 again, with limited logits. Rows without one, nearly all,
         skip the limit's passes over all logits.
    Backward
      4. Gradients through the coordinate logits of 2: to hidden states and to the 1000 coordinate rows.
      5. Per chunk: the logits, kept or computed again; their gradient ``Σ_τ g_τ/τ · softmax(z/τ) + g_label ·
         onehot(label)``; to hidden states and to the chunk's rows of the weight. Chunks of the *vocabulary* finish each
         of these rows in one product, summed in float32 and rounded once.
      6. The coordinate rows of the weight, and the offset, get the sum of 4 and 5, also rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        offset_BH: torch.Tensor | None,
        label_N: torch.Tensor,
        query: HeadQuery,
        coords: CoordColumns,
        dtype: torch.dtype,
        chunk_logits: int,
        keep: int,
    ) -> Any:
        head = _HeadProducts(weight_VH, offset_BH, coords, dtype, chunk_logits)
        num, in_N = len(hidden_NH), query.vocab_in_N_U
        rows_UH, label_U = hidden_NH[in_N].to(dtype), label_N[in_N]
        kept = torch.empty(keep, dtype=head.wide)  # one block, which goes back to the system when it is freed
        lse_TU, label_logit_U, high_U, low_U = _score_vocabulary(head, rows_UH, label_U, query.temperatures, kept)
        mass_GB = head.coord_logits(hidden_NH[query.coord_mass_in_N_G].to(dtype))
        slot_KB = None if query.slot_in_N_K is None else head.coord_logits(hidden_NH[query.slot_in_N_K].to(dtype))

        high_N, low_N = high_U.new_zeros(2, num)
        high_N[in_N], low_N[in_N] = high_U, low_U
        for at, z_B in ((query.coord_mass_in_N_G, mass_GB), (query.slot_in_N_K, slot_KB)):
            if at is not None and z_B is not None and z_B.numel():
                high_N[at] = torch.maximum(high_N[at], z_B.amax(dim=1))
                low_N[at] = torch.minimum(low_N[at], z_B.amin(dim=1))
        nonfinite_N = ~(torch.isfinite(high_N) & torch.isfinite(low_N))
        clamped_N = ~nonfinite_N & ((high_N > LOGIT_LIMIT) | (low_N < -LOGIT_LIMIT))
        head.limited = read_any(nonfinite_N | clamped_N)
        if head.limited:
            lse_TU, label_logit_U, _, _ = _score_vocabulary(head, rows_UH, label_U, query.temperatures, kept)

        lse_TN = lse_TU.new_zeros(len(query.temperatures), num)
        lse_TN[:, in_N] = lse_TU
        label_logit_N = label_logit_U.new_zeros(num)
        label_logit_N[in_N] = label_logit_U
        coord_lse_TN = torch.full_like(lse_TN, -torch.inf)
        for t, tau in enumerate(query.temperatures):
            coord_lse_TN[t, query.coord_mass_in_N_G] = torch.logsumexp(head.limit(mass_GB) / tau, dim=1)
        coord_logit_KB = None if slot_KB is None else head.limit(slot_KB)
        ctx.save_for_backward(hidden_NH, weight_VH, offset_BH, label_N, lse_TN, coord_lse_TN, kept)
        ctx.query, ctx.coords, ctx.dtype, ctx.chunk_logits = query, coords, dtype, chunk_logits
        ctx.limited = head.limited
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(nonfinite_N, clamped_N)
        return lse_TN, label_logit_N, coord_lse_TN, coord_logit_KB, nonfinite_N, clamped_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_lse_TN: Any, g_label_N: Any, g_mass_TN: Any, g_slot_KB: Any, *_: Any) -> Any:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return ChunkedHead._gradients(ctx, g_lse_TN, g_label_N, g_mass_TN, g_slot_KB)

    @staticmethod
    def _gradients(ctx: Any, g_lse_TN: Any, g_label_N: Any, g_mass_TN: Any, g_slot_KB: Any) -> Any:
        hidden_NH, weight_VH, offset_BH, label_N, lse_TN, coord_lse_TN, kept = ctx.saved_tensors
        query: HeadQuery = ctx.query
        needs_hidden, needs_weight, needs_offset = ctx.needs_input_grad[:3]
        head = _HeadProducts(weight_VH, offset_BH, ctx.coords, ctx.dtype, ctx.chunk_logits, limited=ctx.limited)
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=lse_TN.dtype)
        d_coord_BH = d_hidden_NH.new_zeros(len(head.coord_BH), hidden_NH.shape[1])
        d_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None

        # 4. Through the coordinate logits.
        def through_coord_columns(in_N: torch.Tensor, rows_H: torch.Tensor, dz_B: torch.Tensor) -> None:
            d_hidden_NH[in_N] += head.through_coord_columns(dz_B)
            if needs_weight or needs_offset:
                d_coord_BH.add_(product(dz_B.t(), head.finite(rows_H), head.dtype))

        if g_slot_KB is not None and query.slot_in_N_K is not None and g_slot_KB.numel():
            rows_KH = hidden_NH[query.slot_in_N_K].to(head.dtype)
            if head.limited:
                g_slot_KB = g_slot_KB * within_logit_limit(head.coord_logits(rows_KH))
            through_coord_columns(query.slot_in_N_K, rows_KH, g_slot_KB)
        at_G = query.coord_mass_in_N_G
        if g_mass_TN is not None and len(at_G):
            rows_GH = hidden_NH[at_G].to(head.dtype)
            z_GB = head.coord_logits(rows_GH)
            dz_GB = softmax_gradient(head.limit(z_GB), query.temperatures, coord_lse_TN[:, at_G], g_mass_TN[:, at_G])
            through_coord_columns(at_G, rows_GH, dz_GB * within_logit_limit(z_GB) if head.limited else dz_GB)

        # 5. Through the vocabulary.
        in_N = query.trained_in_N
        if len(in_N) and (g_lse_TN is not None or g_label_N is not None):
            rows_UH, label_U, lse_TU = hidden_NH[in_N].to(head.dtype), label_N[in_N], lse_TN[:, in_N]
            g_lse_TU = torch.zeros_like(lse_TU) if g_lse_TN is None else g_lse_TN[:, in_N]
            finite_UH, d_rows_UH = head.finite(rows_UH), torch.zeros_like(rows_UH, dtype=lse_TN.dtype)
            in_U = torch.searchsorted(query.vocab_in_N_U, in_N)
            for chunk in head.chunks(len(query.vocab_in_N_U)):
                kept_UC = chunk.part_of(kept, len(query.vocab_in_N_U))
                z_UC = head.logits(chunk, rows_UH) if kept_UC is None else kept_UC[in_U]
                dz_UC = softmax_gradient(head.limit(z_UC), query.temperatures, lse_TU, g_lse_TU)
                if g_label_N is not None:
                    mine_U, column_U1 = _labels_in(chunk, label_U)
                    share_U1 = torch.where(mine_U, g_label_N[in_N], 0.0)[:, None]
                    # One label per position, so this write has one possible result, also on a GPU.
                    dz_UC.scatter_(1, column_U1, dz_UC.gather(1, column_U1) + share_U1)
                if head.limited:
                    dz_UC *= within_logit_limit(z_UC)
                factor_UC = dz_UC.to(head.dtype)  # once for all products
                d_rows_UH += head.through_chunk(chunk, dz_UC, factor_UC, hidden_NH.dtype)
                if d_weight_VH is not None:
                    d_weight_VH[chunk.start : chunk.stop] = product(
                        factor_UC.t(), finite_UH, head.dtype, d_weight_VH.dtype
                    )
                if (needs_weight or needs_offset) and len(chunk.bins):
                    d_coord_BH[chunk.bins] += product(factor_UC[:, chunk.columns].t(), finite_UH, head.dtype)
            d_hidden_NH[in_N] += d_rows_UH

        # 6. The coordinate rows.
        if d_weight_VH is not None:
            d_weight_VH[ctx.coords.ids_B] = d_coord_BH.to(d_weight_VH.dtype)
        return (
            d_hidden_NH.to(hidden_NH.dtype) if needs_hidden else None,
            d_weight_VH,
            d_coord_BH.to(offset_BH.dtype) if needs_offset else None,
            *[None] * 6,
        )


def _score_vocabulary(
    head: _HeadProducts, rows_UH: torch.Tensor, label_U: torch.Tensor, temperatures: Sequence[float], kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logsumexp per temperature (T, U), label logit (U,), and the largest and smallest logit before any limit (U,).
    Logits of the chunks that fit in ``kept`` are written to it."""
    lse_TU = rows_UH.new_full((len(temperatures), len(rows_UH)), -torch.inf, dtype=head.wide)
    label_logit_U = rows_UH.new_zeros(len(rows_UH), dtype=head.wide)
    high_U, low_U = torch.full_like(label_logit_U, -torch.inf), torch.full_like(label_logit_U, torch.inf)
    for chunk in head.chunks(len(rows_UH)) if len(rows_UH) else ():
        z_UC = head.logits(chunk, rows_UH)
        if (kept_UC := chunk.part_of(kept, len(rows_UH))) is not None:
            kept_UC.copy_(z_UC)
        most_U = z_UC.amax(dim=1)
        high_U, low_U = torch.maximum(high_U, most_U), torch.minimum(low_U, z_UC.amin(dim=1))
        z_UC = head.limit(z_UC)
        mine_U, column_U1 = _labels_in(chunk, label_U)
        label_logit_U = torch.where(mine_U, z_UC.gather(1, column_U1)[:, 0], label_logit_U)
        for t, tau in enumerate(temperatures):
            if tau == 1.0 and not head.limited:  # as torch.logsumexp, without reading all logits for the largest again
                lse_U = (z_UC - most_U[:, None]).exp_().sum(dim=1).log_().add_(most_U)
            else:
                lse_U = torch.logsumexp(z_UC / tau, dim=1)
            lse_TU[t] = torch.logaddexp(lse_TU[t], lse_U)
    return lse_TU, label_logit_U, high_U, low_U


def softmax_gradient(
    z: torch.Tensor, temperatures: Sequence[float], lse_T: torch.Tensor, g_T: torch.Tensor
) -> torch.Tensor:
    """``Σ_τ g_τ/τ · softmax(z/τ)`` over the columns of ``z``, given logsumexps ``lse_T``."""
    total: torch.Tensor | None = None
    for tau, lse, g in zip(temperatures, lse_T, g_T, strict=True):
        part = torch.sub(z if tau == 1.0 else z / tau, lse[:, None]).exp_().mul_((g / tau)[:, None])
        total = part if total is None else total.add_(part)
    return torch.zeros_like(z) if total is None else total


def read_any(mask_N: torch.Tensor) -> bool:
    """Whether any is true. The objective's only wait for the device, once per row."""
    return bool(mask_N.any())


class _Chunk(NamedTuple):
    """Rows ``start`` to ``stop`` of the head; ``columns`` of them are the coordinate ``bins``."""

    start: int
    stop: int
    rows_CH: torch.Tensor
    columns: torch.Tensor
    bins: torch.Tensor

    def part_of(self, kept: torch.Tensor, positions: int) -> torch.Tensor | None:
        """Its logits among those kept, (positions, C); None beyond them."""
        first, end = positions * self.start, positions * self.stop
        return None if end > len(kept) else kept[first:end].view(positions, -1)


def _labels_in(chunk: _Chunk, label_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions have their label in the chunk, and its column (any column elsewhere). Without a host read."""
    column_U = label_U - chunk.start
    mine_U = (column_U >= 0) & (column_U < chunk.stop - chunk.start)
    return mine_U, column_U.clamp(0, chunk.stop - chunk.start - 1)[:, None]


@dataclass(slots=True, eq=False)
class _HeadProducts:
    """Products with the head's rows: factors in ``dtype``, sums and results in float32 or wider.

    ``limited``: some logit of the row is broken or beyond the limit.
    """

    weight_VH: torch.Tensor
    offset_BH: torch.Tensor | None
    coords: CoordColumns
    dtype: torch.dtype
    chunk_logits: int
    limited: bool = False
    coord_BH: torch.Tensor = field(init=False)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def __post_init__(self) -> None:
        self.coord_BH = self.weight_VH[self.coords.ids_B].to(self.dtype)

    def chunks(self, positions: int) -> Iterator[_Chunk]:
        """The vocabulary in parts, small enough that a part's logits fit the budget, and of widths that a GPU's vectors
        divide: for others cuBLAS takes kernels of an older generation. A rest of a few rows is a part by itself."""
        size = max(_ALIGNED, self.chunk_logits // max(1, positions) // _ALIGNED * _ALIGNED)
        num = len(self.weight_VH)
        aligned = num - num % _VECTOR
        bounds = [*range(0, aligned, size), *{aligned, num}]
        for start, stop in itertools.pairwise(sorted(bounds)):
            rows_CH = self.weight_VH[start:stop].to(self.dtype)
            yield _Chunk(start, stop, rows_CH, *self.coords.within(start, stop))

    def logits(self, chunk: _Chunk, rows_UH: torch.Tensor) -> torch.Tensor:
        """Unlimited: (U, C)."""
        z_UC = product(rows_UH, chunk.rows_CH.t(), self.dtype)
        if self.offset_BH is not None and len(chunk.bins):
            z_UC[:, chunk.columns] += self._offset_logits(rows_UH, chunk.bins)
        return z_UC

    def coord_logits(self, rows_H: torch.Tensor) -> torch.Tensor:
        """Unlimited logits of the coordinate columns: (…, B)."""
        z_B = product(rows_H, self.coord_BH.t(), self.dtype)
        return z_B if self.offset_BH is None else z_B + self._offset_logits(rows_H, slice(None))

    def through_chunk(
        self, chunk: _Chunk, dz_UC: torch.Tensor, factor_UC: torch.Tensor, stored: torch.dtype
    ) -> torch.Tensor:
        """Gradient of a chunk's logits, also as a ``factor`` of products → of the hidden states, which are ``stored``
        in this type."""
        d_UH = product(factor_UC, self.finite(chunk.rows_CH), self.dtype, stored)
        if self.offset_BH is not None and len(chunk.bins):
            d_UH += self._through_offset(dz_UC[:, chunk.columns], chunk.bins)
        return d_UH

    def through_coord_columns(self, dz_B: torch.Tensor) -> torch.Tensor:
        """Gradient of the coordinate logits → of the hidden states."""
        d_H = product(dz_B, self.finite(self.coord_BH), self.dtype)
        return d_H if self.offset_BH is None else d_H + self._through_offset(dz_B, slice(None))

    def limit(self, z: torch.Tensor) -> torch.Tensor:
        return limit_logits(z) if self.limited else z

    def finite(self, factor: torch.Tensor) -> torch.Tensor:
        """Zero non-finite entries before they enter a gradient's product: 0 · NaN is NaN."""
        return torch.where(torch.isfinite(factor), factor, 0.0) if self.limited else factor

    def _offset_logits(self, rows_H: torch.Tensor, bins: Any) -> torch.Tensor:
        assert self.offset_BH is not None
        return rows_H.to(self.offset_BH.dtype) @ self.offset_BH[bins].t()

    def _through_offset(self, dz_B: torch.Tensor, bins: Any) -> torch.Tensor:
        assert self.offset_BH is not None
        return dz_B.to(self.offset_BH.dtype) @ self.finite(self.offset_BH[bins])


def factor_dtype(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.dtype:
    """The type of the factors of the head's products: autocast's, else the wider one."""
    device_type = hidden_NH.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden_NH.dtype, weight_VH.dtype)


def within_logit_limit(z: torch.Tensor) -> torch.Tensor:
    """Where the limit lets a logit through, and so its gradient: (…) bool. NaN compares false."""
    return (z >= -LOGIT_LIMIT) & (z <= LOGIT_LIMIT)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, stored: torch.dtype = torch.float32) -> torch.Tensor:
    """``a @ b`` with factors in ``dtype``, sums and result in float32 or wider; if the result will be ``stored`` in
    ``dtype``, possibly rounded to it."""
    a, b = a.to(dtype), b.to(dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    if dtype == torch.bfloat16 and multiplies_bfloat16_faster():
        rounded = torch.mm(a, b)  # sums in float32 and rounds once, in a quarter of float32's time
        if stored == dtype:
            return rounded
        # The same product again, minus the rounded one: the sum of both is accurate to 17 bits. Infinity has no rest.
        rest = torch.addmm(rounded, a, b, beta=-1).nan_to_num_(0.0, 0.0, 0.0)
        return rounded.float().add_(rest)
    return torch.mm(a.float(), b.float())
