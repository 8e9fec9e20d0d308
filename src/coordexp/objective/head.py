"""The language head at supervised positions, in chunks of the vocabulary: what a loss needs, never all the logits.

Forward keeps per position the logsumexp over the vocabulary and the label's logit, and the 1000 coordinate logits where
a coordinate is supervised. Backward computes each chunk's logits again. So the largest buffer is one chunk, whatever
the vocabulary, and chunks of the *vocabulary* mean that each row of the head's gradient is finished in one product,
summed in float32 and rounded once.

N supervised positions of a row, U of them scored against the whole vocabulary, K coordinate slots, G text positions of
the text gate; V vocabulary, B = 1000 bins, H hidden, T temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coordexp.objective.context import HeadQuery, HeadScores, coord_ids_on
from coordexp.objective.coord_math import LOGIT_LIMIT, limit_logits
from coordexp.objective.vocab_chunks import (
    HeadProducts,
    Plan,
    VocabGrads,
    product,
    softmax_gradient,
    vocab_backward,
    vocab_scores,
    within_logit_limit,
)

# Logits alive at a time: on a CPU they should stay in its cache, on a GPU the matrix products should be large.
CHUNK_LOGITS_CPU = 2**21
CHUNK_LOGITS_GPU = 2**26


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

    ``z = h · W``, plus ``h · offset`` on the coordinate columns, limited as everywhere. Differentiable in
    ``hidden_NH``, ``weight_VH`` and ``offset_BH``; a frozen weight costs no gradient. Call it inside the wrapped
    model's forward: DDP and FSDP only prepare for gradients of parameters that are used there.

    Args: hidden_NH (N, H); weight_VH (V, H); label_N the N tokens; coord_ids the 1000 tokens; offset_BH (B, H) or None;
        chunk_logits: logits alive at a time.
    """
    device = hidden_NH.device
    ids = coord_ids_on(tuple(coord_ids), device)
    first = coord_ids[0]
    contiguous = tuple(coord_ids) == tuple(range(first, first + len(coord_ids)))
    dtype = torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    plan = Plan(
        query=query,
        label_U=label_N[query.vocab_in_N_U],
        coord_ids_B=ids,
        host_ids_B=coord_ids_on(tuple(coord_ids), torch.device("cpu")),
        coord_rows=slice(first, first + len(coord_ids)) if contiguous else ids,
        dtype=dtype,
        chunk_logits=chunk_logits or (CHUNK_LOGITS_CPU if device.type == "cpu" else CHUNK_LOGITS_GPU),
    )
    with torch.autocast(device.type, enabled=False):
        return HeadScores(*_ScoreHead.apply(hidden_NH, weight_VH, offset_BH, plan))  # pyright: ignore[reportGeneralTypeIssues]


class _ScoreHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, offset_BH: Any, plan: Plan) -> Any:
        head = HeadProducts(weight_VH, offset_BH, plan)
        query = plan.query
        rows_UH = hidden_NH[query.vocab_in_N_U].to(plan.dtype)
        scores = vocab_scores(head, rows_UH, plan, limited=False)
        raw_KB = head.coord_logits(hidden_NH[query.slot_in_N_K].to(plan.dtype))
        raw_GB = head.coord_logits(rows_UH[query.text_gate_in_U_G])
        high_N, low_N = raw_KB.new_zeros(2, len(hidden_NH))
        high_N[query.vocab_in_N_U], low_N[query.vocab_in_N_U] = scores.high_U, scores.low_U
        if raw_KB.numel():
            slots_K = query.slot_in_N_K  # often scored against the whole vocabulary too: keep the larger extremes
            high_N[slots_K] = torch.maximum(high_N[slots_K], raw_KB.amax(dim=1))
            low_N[slots_K] = torch.minimum(low_N[slots_K], raw_KB.amin(dim=1))
        nonfinite_N = ~(torch.isfinite(high_N) & torch.isfinite(low_N))
        clamped_N = ~nonfinite_N & ((high_N > LOGIT_LIMIT) | (low_N < -LOGIT_LIMIT))
        limited = _look(nonfinite_N | clamped_N)
        if limited:
            scores = vocab_scores(head, rows_UH, plan, limited=True)
        coord_lse_TG = torch.stack(
            [torch.logsumexp(limit_logits(raw_GB) / tau, dim=1) for tau in query.temperatures or (1.0,)]
        )
        ctx.save_for_backward(hidden_NH, weight_VH, offset_BH, scores.lse_TU, coord_lse_TG)
        ctx.plan, ctx.limited, ctx.device_type = plan, limited, hidden_NH.device.type
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(nonfinite_N, clamped_N)
        coord_logit_KB = limit_logits(raw_KB) if limited else raw_KB
        return scores.lse_TU, scores.label_logit_U, coord_lse_TG, coord_logit_KB, nonfinite_N, clamped_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.autocast(ctx.device_type, enabled=False):
            return _gradients(ctx, *grads[:4])


def _look(broken_N: torch.Tensor) -> bool:
    """The objective's one look from the host, once a row. Nearly all rows have no broken logit, and skip the limit's
    passes over all the logits of a row: far more work for the device than what it idles through a look."""
    return bool(broken_N.any())


def _gradients(ctx: Any, g_lse_TU: Any, g_label_U: Any, g_text_gate_TG: Any, g_coord_KB: Any) -> tuple[Any, ...]:
    """Of hidden states, weight and offset, from those of the scores; None where none is needed."""
    hidden_NH, weight_VH, offset_BH, lse_TU, text_gate_TG = ctx.saved_tensors
    plan: Plan = ctx.plan
    query = plan.query
    needs_hidden, needs_weight, needs_offset, _ = ctx.needs_input_grad
    head = HeadProducts(weight_VH, offset_BH, plan, limited=ctx.limited)
    wide = lse_TU.dtype
    d_hidden_NH = hidden_NH.new_zeros(hidden_NH.shape, dtype=wide)
    d_coord_BH = hidden_NH.new_zeros(len(plan.coord_ids_B), hidden_NH.shape[1], dtype=wide)

    def through_coord_columns(in_N: torch.Tensor, rows_H: torch.Tensor, dz_B: torch.Tensor) -> None:
        d_hidden_NH[in_N] += head.coord_backward(dz_B)
        if needs_weight or needs_offset:
            d_coord_BH.add_(product(dz_B.t(), head.finite(rows_H), plan.dtype))

    if g_coord_KB is not None and g_coord_KB.numel():
        rows_KH = hidden_NH[query.slot_in_N_K].to(plan.dtype)
        if ctx.limited:
            g_coord_KB = g_coord_KB * within_logit_limit(head.coord_logits(rows_KH))
        through_coord_columns(query.slot_in_N_K, rows_KH, g_coord_KB)
    if g_text_gate_TG is not None and g_text_gate_TG.numel():
        in_N_G = query.vocab_in_N_U[query.text_gate_in_U_G]
        rows_GH = hidden_NH[in_N_G].to(plan.dtype)
        dz_GB = softmax_gradient(
            head.coord_logits(rows_GH), query.temperatures, text_gate_TG, g_text_gate_TG, ctx.limited
        )
        through_coord_columns(in_N_G, rows_GH, dz_GB)

    d_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
    trained = slice(query.num_trained)
    if query.num_trained and (g_lse_TU is not None or g_label_U is not None):
        in_N = query.vocab_in_N_U[trained]
        grads = VocabGrads(
            None if g_lse_TU is None else g_lse_TU[:, trained],
            None if g_label_U is None else g_label_U[trained],
            lse_TU[:, trained],
            plan.label_U[trained],
        )
        rows_H = hidden_NH[in_N].to(plan.dtype)
        d_hidden_NH[in_N] += vocab_backward(
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
