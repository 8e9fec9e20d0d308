"""Products with the language head, one chunk of the vocabulary at a time, forward and backward.

Shapes as in :mod:`coordexp.objective.head`; C columns of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from coordexp.objective.context import HeadQuery
from coordexp.objective.coord_math import LOGIT_LIMIT, limit_logits


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What forward and backward share. ``coord_rows`` is the slice of the coordinate ids, or their tensor;
    ``host_ids_B`` the ids once more, where the host may look at them."""

    query: HeadQuery
    label_U: torch.Tensor
    coord_ids_B: torch.Tensor
    host_ids_B: torch.Tensor
    coord_rows: slice | torch.Tensor
    dtype: torch.dtype
    chunk_logits: int


class HeadProducts:
    """Products with the head's rows, in the plan's dtype, summed in float32 or wider."""

    def __init__(
        self, weight_VH: torch.Tensor, offset_BH: torch.Tensor | None, plan: Plan, *, limited: bool = False
    ) -> None:
        self.weight_VH = weight_VH
        self.offset_BH = offset_BH
        self.plan = plan
        self.limited = limited
        self._coord_BH = weight_VH[plan.coord_rows].to(plan.dtype)

    def coord_logits(self, rows_H: torch.Tensor) -> torch.Tensor:
        """Unfenced logits of the coordinate columns, (…, B)."""
        z_B = product(rows_H, self._coord_BH.t(), self.plan.dtype)
        return z_B if self.offset_BH is None else z_B.add_(self.offset_logits(rows_H))

    def offset_logits(self, rows_H: torch.Tensor) -> torch.Tensor:
        """What the trained offset adds to the coordinate logits of hidden states (…, H): (…, 1000)."""
        assert self.offset_BH is not None
        return rows_H.to(self.offset_BH.dtype) @ self.offset_BH.t()

    def coord_backward(self, dz_B: torch.Tensor) -> torch.Tensor:
        """Gradient of the coordinate logits → of the hidden states."""
        d_H = product(dz_B, self.finite(self._coord_BH), self.plan.dtype)
        return d_H if self.offset_BH is None else d_H.add_(self.offset_backward(dz_B, slice(None)))

    def offset_backward(self, dz_B: torch.Tensor, bins: Any) -> torch.Tensor:
        """Gradients of coordinate logits on ``bins`` → of the hidden states, through the offset alone: (…, H)."""
        assert self.offset_BH is not None
        return dz_B.to(self.offset_BH.dtype) @ self.finite(self.offset_BH[bins])

    def finite(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor of a gradient's product. What broke a logit stands in it, and 0 · NaN would spread over the sum."""
        return torch.where(torch.isfinite(factor), factor, 0.0) if self.limited else factor

    def chunks(self, positions: int) -> Iterator[_Chunk]:
        """The vocabulary in parts of equal size, such that a part's logits fit the budget."""
        size = max(256, self.plan.chunk_logits // max(1, positions))
        for start in range(0, len(self.weight_VH), size):
            stop = min(start + size, len(self.weight_VH))
            yield _Chunk(start, stop, self.weight_VH[start:stop].to(self.plan.dtype), *self._coords_in(start, stop))

    def _coords_in(self, start: int, stop: int) -> tuple[Any, Any]:
        """Coordinate columns of a chunk: where in the chunk, and which bins; None without one."""
        rows = self.plan.coord_rows
        if isinstance(rows, slice):
            low, high = max(start, rows.start), min(stop, rows.stop)
            return (
                (slice(low - start, high - start), slice(low - rows.start, high - rows.start))
                if low < high
                else (None, None)
            )
        ids = self.plan.host_ids_B
        bins = torch.nonzero((ids >= start) & (ids < stop))[:, 0]
        columns = ids[bins] - start
        return columns.to(rows.device, non_blocking=True), bins.to(rows.device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Rows ``start`` to ``stop`` of the head; ``coords`` are its coordinate columns and ``bins`` theirs."""

    start: int
    stop: int
    rows_CH: torch.Tensor
    coords: Any
    bins: Any


class _Scratch:
    """One buffer for every chunk's logits: fresh memory for each would cost more page faults than arithmetic."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def logits(
        self, head: HeadProducts, chunk: _Chunk, rows_UH: torch.Tensor, extra_UB: torch.Tensor | None
    ) -> torch.Tensor:
        """Unfenced logits (U, C) of a chunk, valid until the next call."""
        shape = (len(rows_UH), chunk.stop - chunk.start)
        if _sums_narrow(rows_UH):
            z_UC = product(rows_UH, chunk.rows_CH.t(), head.plan.dtype)
        else:
            count = shape[0] * shape[1]
            if self._flat is None or self._flat.numel() < count:
                self._flat = rows_UH.new_empty(count)
            z_UC = torch.mm(rows_UH, chunk.rows_CH.t(), out=self._flat[:count].view(shape))
        if extra_UB is not None and chunk.coords is not None:
            z_UC[:, chunk.coords] += extra_UB[:, chunk.bins]
        return z_UC


class VocabScores(NamedTuple):
    """Of U positions: the logarithm of the normaliser at each of T temperatures, the label's logit, and the largest and
    the smallest logit as they were before any limit."""

    lse_TU: torch.Tensor
    label_logit_U: torch.Tensor
    high_U: torch.Tensor
    low_U: torch.Tensor


def vocab_scores(head: HeadProducts, rows_UH: torch.Tensor, plan: Plan, *, limited: bool) -> VocabScores:
    """Logsumexp per temperature, label logit and the unfenced extremes of U positions over the vocabulary."""
    wide = torch.promote_types(plan.dtype, torch.float32)
    num = len(rows_UH)
    temperatures = plan.query.temperatures
    lse_TU = rows_UH.new_full((max(1, len(temperatures)), num), -torch.inf, dtype=wide)
    label_logit_U, high_U, low_U = rows_UH.new_zeros(3, num, dtype=wide)
    if not num:
        return VocabScores(lse_TU, label_logit_U, high_U, low_U)
    extra_UB = None if head.offset_BH is None else head.offset_logits(rows_UH).to(wide)
    high_U, low_U = high_U.fill_(-torch.inf), low_U.fill_(torch.inf)
    scratch = _Scratch()
    for chunk in head.chunks(num):
        z_UC = scratch.logits(head, chunk, rows_UH, extra_UB)
        top_U = z_UC.amax(dim=1)
        high_U, low_U = torch.maximum(high_U, top_U), torch.minimum(low_U, z_UC.amin(dim=1))
        if limited:
            top_U = limit_logits(z_UC, out=z_UC).amax(dim=1)
        mine_U, column_U1 = _labels_in(chunk, plan.label_U)
        label_logit_U = torch.where(mine_U, z_UC.gather(1, column_U1)[:, 0], label_logit_U)
        z_UC.sub_(top_U[:, None])
        for index, tau in enumerate(temperatures):
            last = index == len(temperatures) - 1
            exponent = z_UC if tau == 1.0 else z_UC.div_(tau) if last else z_UC / tau
            mass_U = (exponent.exp_() if last else exponent.exp()).sum(dim=1)
            lse_TU[index] = torch.logaddexp(lse_TU[index], mass_U.log_().add_(top_U / tau))
    return VocabScores(lse_TU, label_logit_U, high_U, low_U)


class VocabGrads(NamedTuple):
    """What the backward pass needs at U positions: gradients of the scores (None where nobody asked), the normalisers
    and the labels."""

    g_lse_TU: torch.Tensor | None
    g_label_U: torch.Tensor | None
    lse_TU: torch.Tensor
    label_U: torch.Tensor


def vocab_backward(
    head: HeadProducts,
    rows_UH: torch.Tensor,
    plan: Plan,
    grads: VocabGrads,
    d_coord_BH: torch.Tensor | None,
    d_weight_VH: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the U hidden states; fills ``d_weight_VH`` and adds to ``d_coord_BH`` where they are wanted."""
    d_rows_UH = rows_UH.new_zeros(rows_UH.shape, dtype=grads.lse_TU.dtype)
    extra_UB = None if head.offset_BH is None else head.offset_logits(rows_UH).to(d_rows_UH.dtype)
    finite_UH = head.finite(rows_UH)
    scratch = _Scratch()
    for chunk in head.chunks(len(rows_UH)):
        z_UC = scratch.logits(head, chunk, rows_UH, extra_UB)
        inside_UC = within_logit_limit(z_UC) if head.limited else None
        dz_UC = softmax_gradient(z_UC, plan.query.temperatures, grads.lse_TU, grads.g_lse_TU, head.limited)
        if grads.g_label_U is not None:
            mine_U, column_U1 = _labels_in(chunk, grads.label_U)
            share_U = torch.where(mine_U, grads.g_label_U, 0.0)
            # One label a position: the columns are distinct per row, so this write has one possible result.
            dz_UC.scatter_(1, column_U1, dz_UC.gather(1, column_U1) + share_U[:, None])
        if inside_UC is not None:
            dz_UC *= inside_UC
        d_rows_UH += product(dz_UC, head.finite(chunk.rows_CH), plan.dtype)
        if extra_UB is not None and chunk.coords is not None:
            d_rows_UH += head.offset_backward(dz_UC[:, chunk.coords], chunk.bins)
        if d_weight_VH is not None:
            d_weight_VH[chunk.start : chunk.stop] = product(dz_UC.t(), finite_UH, plan.dtype)
        if d_coord_BH is not None and chunk.coords is not None:
            d_coord_BH[chunk.bins] += product(dz_UC[:, chunk.coords].t(), finite_UH, plan.dtype)
    return d_rows_UH


def softmax_gradient(
    z: torch.Tensor, temperatures: Sequence[float], lse_T: torch.Tensor, g_T: torch.Tensor | None, limited: bool
) -> torch.Tensor:
    """``Σ_τ g_τ/τ · softmax(z/τ)`` over the columns of ``z``, which is overwritten; zero where the limit replaced."""
    if g_T is None:
        return z.zero_()
    inside = within_logit_limit(z) if limited else None
    if limited:
        limit_logits(z, out=z)
    total: torch.Tensor | None = None
    for index, tau in enumerate(temperatures):
        last = index == len(temperatures) - 1
        exponent = z / tau if not last else z if tau == 1.0 else z.div_(tau)
        part = exponent.sub_(lse_T[index][:, None]).exp_().mul_((g_T[index] / tau)[:, None])
        total = part if total is None else part.add_(total)
    assert total is not None, "a gradient of a logsumexp that nobody asked for"
    return total if inside is None else total.mul_(inside)


def _labels_in(chunk: _Chunk, label_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions have their label in the chunk, and its column (any column elsewhere). No look from the host."""
    column_U = label_U - chunk.start
    mine_U = (column_U >= 0) & (column_U < chunk.stop - chunk.start)
    return mine_U, column_U.clamp(0, chunk.stop - chunk.start - 1)[:, None]


def within_logit_limit(z: torch.Tensor) -> torch.Tensor:
    """Where the limit lets a logit through, and so its gradient: (…) bool. NaN compares false."""
    return (z >= -LOGIT_LIMIT) & (z <= LOGIT_LIMIT)


def _sums_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` with factors in ``dtype``, sums and result in float32 or wider."""
    a, b = a.to(dtype), b.to(dtype)
    if not _sums_narrow(a):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())  # a CPU's half-precision product would round the sums
