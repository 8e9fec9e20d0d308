"""The language head at supervised positions, in chunks of the vocabulary: what a loss needs, never all the logits.

Forward keeps per position the logsumexp over the vocabulary and the label's logit, and the 1000 coordinate logits where
a coordinate is supervised. Backward computes each chunk's logits again. So the largest buffer is one chunk, whatever
the vocabulary, and chunks of the *vocabulary* mean that each row of the head's gradient is finished in one product,
summed in float32 and rounded once.

N supervised positions of a row, U of them scored against the whole vocabulary, K coordinate slots, G text positions of
the text gate; V vocabulary, B = 1000 bins, H hidden, T temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from coordexp.objective.coord_math import LOGIT_LIMIT, fence

# Logits alive at a time: on a CPU they should stay in its cache, on a GPU the matrix products should be large.
CHUNK_LOGITS_CPU = 2**21
CHUNK_LOGITS_GPU = 2**26


@dataclass(frozen=True, slots=True, eq=False)
class HeadQuery:
    """Which numbers of the head the modules want of one row. Whatever nobody wants is not computed.

    ``vocab_in_N_U``: positions scored against the whole vocabulary, those with a gradient (``num_taught``) first;
    ``slot_in_U_K``: the coordinate slots among them, all or none; ``leak_in_U_G``: text positions among them whose mass
    on coordinate tokens is wanted; ``slot_in_N_K``: the slots whose 1000 coordinate logits are wanted, all or none;
    ``num_scored``: positions of which anything is computed.
    """

    vocab_in_N_U: torch.Tensor
    slot_in_U_K: torch.Tensor
    leak_in_U_G: torch.Tensor
    slot_in_N_K: torch.Tensor
    num_taught: int
    num_scored: int
    temperatures: tuple[float, ...]

    def to(self, device: torch.device) -> HeadQuery:
        return move(self, device)


def move(record: Any, device: torch.device) -> Any:
    """A copy of a dataclass with its tensors on ``device``; what is no tensor stays."""
    moved = {
        name: value.to(device, non_blocking=device.type == "cuda")
        for name in record.__slots__
        if isinstance(value := getattr(record, name), torch.Tensor)
    }
    return replace(record, **moved)


class HeadScores(NamedTuple):
    """The head's answers, float32 or wider, finite. A tuple of tensors: DDP and FSDP look into what a forward returns.

    ``vocab_lse_TU`` logsumexp(z/τ) over the vocabulary; ``label_logit_U``; ``coord_lse_TG`` logsumexp(z/τ) over the
    coordinate columns; ``coord_logit_KB``. ``nonfinite_N`` positions with a NaN or infinite logit, ``clamped_N`` those
    whose finite logits passed the limit: the fence has acted there.
    """

    vocab_lse_TU: torch.Tensor
    label_logit_U: torch.Tensor
    coord_lse_TG: torch.Tensor
    coord_logit_KB: torch.Tensor
    nonfinite_N: torch.Tensor
    clamped_N: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What forward and backward share. ``coord_rows`` is the slice of the coordinate ids, or their tensor."""

    query: HeadQuery
    label_U: torch.Tensor
    coord_ids_B: torch.Tensor
    coord_rows: slice | torch.Tensor
    dtype: torch.dtype
    chunk_logits: int


def score_head(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    query: HeadQuery,
    label_N: torch.Tensor,
    coord_ids: Sequence[int],
    offset_BH: torch.Tensor | None = None,
    chunk_logits: int | None = None,
) -> HeadScores:
    """Apply the head to the hidden states that predict N tokens, where ``query`` asks for it.

    ``z = h · W``, plus ``h · offset`` on the coordinate columns, fenced as everywhere. Differentiable in ``hidden_NH``,
    ``weight_VH`` and ``offset_BH``; a frozen weight costs no gradient. Call it inside the wrapped model's forward: DDP
    and FSDP only prepare for gradients of parameters that are used there.

    Args: hidden_NH (N, H); weight_VH (V, H); label_N the N tokens; coord_ids the 1000 tokens; offset_BH (B, H) or None;
        chunk_logits: logits alive at a time.
    """
    device = hidden_NH.device
    ids = torch.tensor(coord_ids, device=device)
    first = coord_ids[0]
    contiguous = tuple(coord_ids) == tuple(range(first, first + len(coord_ids)))
    dtype = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    plan = _Plan(
        query=query,
        label_U=label_N[query.vocab_in_N_U],
        coord_ids_B=ids,
        coord_rows=slice(first, first + len(coord_ids)) if contiguous else ids,
        dtype=dtype,
        chunk_logits=chunk_logits or (CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_GPU),
    )
    with torch.autocast(device.type, enabled=False):
        return HeadScores(*_ScoreHead.apply(hidden_NH, weight_VH, offset_BH, plan))  # pyright: ignore[reportGeneralTypeIssues]


class _ScoreHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, offset_BH: Any, plan: _Plan) -> Any:
        head = _Head(weight_VH, offset_BH, plan)
        query = plan.query
        rows_UH = hidden_NH[query.vocab_in_N_U].to(plan.dtype)
        scores = _vocab_scores(head, rows_UH, plan, fenced=False)
        raw_KB = head.coord_logits(hidden_NH[query.slot_in_N_K].to(plan.dtype))
        raw_GB = head.coord_logits(rows_UH[query.leak_in_U_G])
        high_N, low_N = raw_KB.new_zeros(2, len(hidden_NH))
        high_N[query.vocab_in_N_U], low_N[query.vocab_in_N_U] = scores.high_U, scores.low_U
        if raw_KB.numel():
            slots_K = query.slot_in_N_K  # often scored against the whole vocabulary too: keep the larger extremes
            high_N[slots_K] = torch.maximum(high_N[slots_K], raw_KB.amax(dim=1))
            low_N[slots_K] = torch.minimum(low_N[slots_K], raw_KB.amin(dim=1))
        nonfinite_N = ~(torch.isfinite(high_N) & torch.isfinite(low_N))
        clamped_N = ~nonfinite_N & ((high_N > LOGIT_LIMIT) | (low_N < -LOGIT_LIMIT))
        # The one look from the host: rows without a broken logit, which is nearly all of them, skip the fence's passes.
        fenced = bool((nonfinite_N | clamped_N).any())
        if fenced:
            scores = _vocab_scores(head, rows_UH, plan, fenced=True)
        coord_lse_TG = torch.stack(
            [torch.logsumexp(fence(raw_GB) / tau, dim=1) for tau in query.temperatures or (1.0,)]
        )
        ctx.save_for_backward(hidden_NH, weight_VH, offset_BH, scores.lse_TU, coord_lse_TG)
        ctx.plan, ctx.fenced = plan, fenced
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(nonfinite_N, clamped_N)
        coord_logit_KB = fence(raw_KB) if fenced else raw_KB
        return scores.lse_TU, scores.label_logit_U, coord_lse_TG, coord_logit_KB, nonfinite_N, clamped_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_lse_TU: Any, g_label_U: Any, g_leak_TG: Any, g_coord_KB: Any, *_: Any) -> Any:
        hidden_NH, weight_VH, offset_BH, lse_TU, leak_TG = ctx.saved_tensors
        plan: _Plan = ctx.plan
        query = plan.query
        needs_hidden, needs_weight, needs_offset, _ = ctx.needs_input_grad
        head = _Head(weight_VH, offset_BH, plan, fenced=ctx.fenced)
        wide = lse_TU.dtype
        d_hidden_NH = hidden_NH.new_zeros(hidden_NH.shape, dtype=wide)
        d_coord_BH = hidden_NH.new_zeros(len(plan.coord_ids_B), hidden_NH.shape[1], dtype=wide)

        def through_coord_columns(in_N: torch.Tensor, rows_H: torch.Tensor, dz_B: torch.Tensor) -> None:
            d_hidden_NH[in_N] += head.coord_backward(dz_B)
            if needs_weight or needs_offset:
                d_coord_BH.add_(_product(dz_B.t(), head.finite(rows_H), plan.dtype))

        if g_coord_KB is not None and g_coord_KB.numel():
            rows_KH = hidden_NH[query.slot_in_N_K].to(plan.dtype)
            if ctx.fenced:
                g_coord_KB = g_coord_KB * _inside(head.coord_logits(rows_KH))
            through_coord_columns(query.slot_in_N_K, rows_KH, g_coord_KB)
        if g_leak_TG is not None and g_leak_TG.numel():
            in_N_G = query.vocab_in_N_U[query.leak_in_U_G]
            rows_GH = hidden_NH[in_N_G].to(plan.dtype)
            dz_GB = _softmax_gradient(head.coord_logits(rows_GH), query.temperatures, leak_TG, g_leak_TG, ctx.fenced)
            through_coord_columns(in_N_G, rows_GH, dz_GB)

        d_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        taught = slice(query.num_taught)
        if query.num_taught and (g_lse_TU is not None or g_label_U is not None):
            in_N = query.vocab_in_N_U[taught]
            grads = _VocabGrads(
                None if g_lse_TU is None else g_lse_TU[:, taught],
                None if g_label_U is None else g_label_U[taught],
                lse_TU[:, taught],
                plan.label_U[taught],
            )
            rows_H = hidden_NH[in_N].to(plan.dtype)
            d_hidden_NH[in_N] += _vocab_backward(
                head, rows_H, plan, grads, d_coord_BH if needs_weight or needs_offset else None, d_weight_VH
            )
        elif d_weight_VH is not None:
            d_weight_VH.zero_()
        if d_weight_VH is not None:
            # Whole sums, rounded once: the chunks above left their part of these rows in d_coord_BH.
            d_weight_VH[plan.coord_rows] = d_coord_BH.to(d_weight_VH.dtype)
        return (
            d_hidden_NH.to(hidden_NH.dtype) if needs_hidden else None,
            d_weight_VH,
            d_coord_BH.to(offset_BH.dtype) if needs_offset else None,
            None,
        )


class _Head:
    """Products with the head's rows, in the plan's dtype, summed in float32 or wider."""

    def __init__(
        self, weight_VH: torch.Tensor, offset_BH: torch.Tensor | None, plan: _Plan, *, fenced: bool = False
    ) -> None:
        self.weight_VH = weight_VH
        self.offset_BH = offset_BH
        self.plan = plan
        self.fenced = fenced
        self._coord_BH = weight_VH[plan.coord_rows].to(plan.dtype)

    def coord_logits(self, rows_H: torch.Tensor) -> torch.Tensor:
        """Unfenced logits of the coordinate columns, (…, B)."""
        z_B = _product(rows_H, self._coord_BH.t(), self.plan.dtype)
        return z_B if self.offset_BH is None else z_B.add_(self.offset_logits(rows_H))

    def offset_logits(self, rows_H: torch.Tensor) -> torch.Tensor:
        assert self.offset_BH is not None
        return rows_H.to(self.offset_BH.dtype) @ self.offset_BH.t()

    def coord_backward(self, dz_B: torch.Tensor) -> torch.Tensor:
        """Gradient of the coordinate logits → of the hidden states."""
        d_H = _product(dz_B, self.finite(self._coord_BH), self.plan.dtype)
        return d_H if self.offset_BH is None else d_H.add_(self.offset_backward(dz_B, slice(None)))

    def offset_backward(self, dz_B: torch.Tensor, bins: Any) -> torch.Tensor:
        assert self.offset_BH is not None
        return dz_B.to(self.offset_BH.dtype) @ self.finite(self.offset_BH[bins])

    def finite(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor of a gradient's product. What broke a logit stands in it, and 0 · NaN would spread over the sum."""
        return torch.where(torch.isfinite(factor), factor, 0.0) if self.fenced else factor

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
        bins = torch.nonzero((rows >= start) & (rows < stop))[:, 0]
        return rows[bins] - start, bins


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

    def logits(self, head: _Head, chunk: _Chunk, rows_UH: torch.Tensor, extra_UB: torch.Tensor | None) -> torch.Tensor:
        """Unfenced logits (U, C) of a chunk, valid until the next call."""
        shape = (len(rows_UH), chunk.stop - chunk.start)
        if _sums_narrow(rows_UH):
            z_UC = _product(rows_UH, chunk.rows_CH.t(), head.plan.dtype)
        else:
            count = shape[0] * shape[1]
            if self._flat is None or self._flat.numel() < count:
                self._flat = rows_UH.new_empty(count)
            z_UC = torch.mm(rows_UH, chunk.rows_CH.t(), out=self._flat[:count].view(shape))
        if extra_UB is not None and chunk.coords is not None:
            z_UC[:, chunk.coords] += extra_UB[:, chunk.bins]
        return z_UC


class _VocabScores(NamedTuple):
    lse_TU: torch.Tensor
    label_logit_U: torch.Tensor
    high_U: torch.Tensor
    low_U: torch.Tensor


def _vocab_scores(head: _Head, rows_UH: torch.Tensor, plan: _Plan, *, fenced: bool) -> _VocabScores:
    """Logsumexp per temperature, label logit and the unfenced extremes of U positions over the vocabulary."""
    wide = torch.promote_types(plan.dtype, torch.float32)
    num = len(rows_UH)
    temperatures = plan.query.temperatures
    lse_TU = rows_UH.new_full((max(1, len(temperatures)), num), -torch.inf, dtype=wide)
    label_logit_U, high_U, low_U = rows_UH.new_zeros(3, num, dtype=wide)
    if not num:
        return _VocabScores(lse_TU, label_logit_U, high_U, low_U)
    extra_UB = None if head.offset_BH is None else head.offset_logits(rows_UH).to(wide)
    high_U, low_U = high_U.fill_(-torch.inf), low_U.fill_(torch.inf)
    scratch = _Scratch()
    for chunk in head.chunks(num):
        z_UC = scratch.logits(head, chunk, rows_UH, extra_UB)
        top_U = z_UC.amax(dim=1)
        high_U, low_U = torch.maximum(high_U, top_U), torch.minimum(low_U, z_UC.amin(dim=1))
        if fenced:
            top_U = fence(z_UC, out=z_UC).amax(dim=1)
        mine_U, column_U1 = _labels_in(chunk, plan.label_U)
        label_logit_U = torch.where(mine_U, z_UC.gather(1, column_U1)[:, 0], label_logit_U)
        z_UC.sub_(top_U[:, None])
        for index, tau in enumerate(temperatures):
            last = index == len(temperatures) - 1
            exponent = z_UC if tau == 1.0 else z_UC.div_(tau) if last else z_UC / tau
            mass_U = (exponent.exp_() if last else exponent.exp()).sum(dim=1)
            lse_TU[index] = torch.logaddexp(lse_TU[index], mass_U.log_().add_(top_U / tau))
    return _VocabScores(lse_TU, label_logit_U, high_U, low_U)


class _VocabGrads(NamedTuple):
    g_lse_TU: torch.Tensor | None
    g_label_U: torch.Tensor | None
    lse_TU: torch.Tensor
    label_U: torch.Tensor


def _vocab_backward(
    head: _Head,
    rows_UH: torch.Tensor,
    plan: _Plan,
    grads: _VocabGrads,
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
        inside_UC = _inside(z_UC) if head.fenced else None
        dz_UC = _softmax_gradient(z_UC, plan.query.temperatures, grads.lse_TU, grads.g_lse_TU, head.fenced)
        if grads.g_label_U is not None:
            mine_U, column_U1 = _labels_in(chunk, grads.label_U)
            share_U = torch.where(mine_U, grads.g_label_U, 0.0)
            # One label a position: the columns are distinct per row, so this write has one possible result.
            dz_UC.scatter_(1, column_U1, dz_UC.gather(1, column_U1) + share_U[:, None])
        if inside_UC is not None:
            dz_UC *= inside_UC
        d_rows_UH += _product(dz_UC, head.finite(chunk.rows_CH), plan.dtype)
        if extra_UB is not None and chunk.coords is not None:
            d_rows_UH += head.offset_backward(dz_UC[:, chunk.coords], chunk.bins)
        if d_weight_VH is not None:
            d_weight_VH[chunk.start : chunk.stop] = _product(dz_UC.t(), finite_UH, plan.dtype)
        if d_coord_BH is not None and chunk.coords is not None:
            d_coord_BH[chunk.bins] += _product(dz_UC[:, chunk.coords].t(), finite_UH, plan.dtype)
    return d_rows_UH


def _softmax_gradient(
    z: torch.Tensor, temperatures: Sequence[float], lse_T: torch.Tensor, g_T: torch.Tensor | None, fenced: bool
) -> torch.Tensor:
    """``Σ_τ g_τ/τ · softmax(z/τ)`` over the columns of ``z``, which is overwritten; zero where the fence replaced."""
    if g_T is None:
        return z.zero_()
    inside = _inside(z) if fenced else None
    if fenced:
        fence(z, out=z)
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


def _inside(z: torch.Tensor) -> torch.Tensor:
    """Where the fence lets a logit through, and so its gradient: (…) bool. NaN compares false."""
    return (z >= -LOGIT_LIMIT) & (z <= LOGIT_LIMIT)


def _sums_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` with factors in ``dtype``, sums and result in float32 or wider."""
    a, b = a.to(dtype), b.to(dtype)
    if not _sums_narrow(a):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())  # a CPU's half-precision product would round the sums
