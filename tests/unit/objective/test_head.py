"""The chunked head against all the logits and plain autograd: values, gradients, the limit, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coordexp.objective import HeadQuery, HeadScores, score_head
from coordexp.objective import head as head_module
from coordexp.objective.pipeline import coordinate_logits
from coordexp.records import NUM_BINS
from support.objective_rows import scores_from_logits

V, H, N = 700, 5, 9
SCATTERED = (3, 4, 5, 99, 300, 301, 302, 303, 304, 650)
CONTIGUOUS = tuple(range(250, 262))  # over the edge of the first chunk


TRAINED = [0, 2, 3, 5, 8]


def query(temperatures: tuple[float, ...] = (1.0, 1.7)) -> HeadQuery:
    """Seven of nine positions scored, two only measured; three coordinate slots, two text-gate positions."""
    return HeadQuery(
        vocab_in_N_U=torch.tensor([0, 1, 2, 3, 4, 5, 8]),
        trained_in_N=torch.tensor(TRAINED),
        coord_mass_in_N_G=torch.tensor([0, 8]),
        slot_in_N_K=torch.tensor([2, 5, 1]),
        num_scored=7,
        temperatures=temperatures,
    )


NO_IDS = torch.zeros(0, dtype=torch.long)
NOTHING = HeadQuery(NO_IDS, NO_IDS, NO_IDS, None, 0, ())


def tensors(dtype: torch.dtype = torch.float64, bins: int = 12, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(N, H, dtype=torch.float64, generator=generator)
    weight = torch.randn(V, H, dtype=torch.float64, generator=generator)
    offset = 0.3 * torch.randn(bins, H, dtype=torch.float64, generator=generator)
    label = torch.randint(0, V, (N,), generator=generator)
    label[0] = label[2] = 255  # one of the coordinate tokens, twice
    return (*(value.to(dtype).requires_grad_() for value in (hidden, weight, offset)), label)


def parts_of(scores: HeadScores) -> list[torch.Tensor]:
    assert scores.coord_logit_KB is not None
    return [
        *(lse_N[TRAINED] for lse_N in scores.vocab_lse_N.values()),
        scores.label_logit_N[TRAINED],
        *(lse_N[[0, 8]] for lse_N in scores.coord_lse_N.values()),
        scores.coord_logit_KB,
    ]


def total(scores: HeadScores) -> torch.Tensor:
    """A function of every score with a gradient, non-linear in each."""
    parts = parts_of(scores)
    return sum(
        (((0.3 + part).sin() * torch.linspace(0.5, 2, part.numel(), dtype=part.dtype).view_as(part)).sum()
         for part in parts),
        start=torch.zeros(()),
    )  # fmt: skip


@pytest.mark.parametrize("chunk_logits", [1, 256 * 7, 10**9], ids=["three chunks", "also three", "one"])
@pytest.mark.parametrize("ids", [CONTIGUOUS, SCATTERED], ids=["contiguous ids", "scattered ids"])
@pytest.mark.parametrize("with_offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("temperatures", [(1.0,), (0.6,), (1.0, 1.7), (0.5, 1.0, 2.0)])
def test_it_equals_full_logits_with_autograd(temperatures, with_offset, ids, chunk_logits) -> None:
    hidden, weight, offset, label = tensors(bins=len(ids))
    leaves = [hidden, weight, *([offset] if with_offset else [])]
    asked = query(temperatures)
    logits = hidden @ weight.T
    if with_offset:
        logits = logits.index_add(1, torch.tensor(ids), hidden @ offset.T)
    want = scores_from_logits(logits, asked, label, ids)
    got = score_head(hidden, weight, asked, label, ids, offset if with_offset else None, chunk_logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    want_grads = torch.autograd.grad(total(want), leaves)
    got_grads = torch.autograd.grad(total(got), leaves)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert b.abs().max() > 1e-3


def test_positions_that_are_only_measured_get_no_gradient() -> None:
    hidden, weight, _, label = tensors()
    scores = score_head(hidden, weight, query(), label, CONTIGUOUS)
    scores.vocab_lse_N[1.0].sum().backward()
    assert torch.nonzero(hidden.grad.abs().sum(dim=1))[:, 0].tolist() == TRAINED


@pytest.mark.parametrize("frozen", ["weight", "hidden", "offset"])
def test_frozen_weights_get_no_gradient_and_change_no_other(frozen: str) -> None:
    def grads(freeze: str | None) -> dict[str, Any]:
        hidden, weight, offset, label = tensors()
        leaves = {"hidden": hidden, "weight": weight, "offset": offset}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name != freeze)
        total(score_head(hidden, weight, query(), label, CONTIGUOUS, offset)).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    all_of_them, some = grads(None), grads(frozen)
    for name, grad in all_of_them.items():
        if name == frozen:
            assert some[name] is None
        else:
            assert torch.equal(some[name], grad)


def test_no_positions_still_give_a_graph() -> None:
    hidden, weight, _, label = tensors()
    scores = score_head(hidden, weight, NOTHING, label, CONTIGUOUS)
    assert scores.vocab_lse_N == scores.coord_lse_N == {} and scores.coord_logit_KB is None
    scores.label_logit_N[:0].sum().backward()
    assert all(leaf.grad is not None and torch.count_nonzero(leaf.grad) == 0 for leaf in (hidden, weight))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(half: torch.dtype) -> None:
    """Equal to the same rounded factors multiplied in float64, far beyond what half-precision logits could say."""
    hidden, weight, _, label = (value.detach() for value in tensors(half))
    exact = [value.double().requires_grad_() for value in (hidden, weight)]
    narrow = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = score_head(exact[0], exact[1], query(), label, CONTIGUOUS)
    got = score_head(narrow[0], narrow[1], query(), label, CONTIGUOUS)
    for a, b in zip(parts_of(got), parts_of(want), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)
    total(got).backward()
    total(want).backward()
    for a, b in zip(narrow, exact, strict=True):
        assert a.grad.dtype == half
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.02, atol=0.02 * b.grad.abs().max().item())


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_broken_column_is_limited_alike_in_half_precision(broken: float) -> None:
    hidden, label = torch.ones(N, 1), torch.full((N,), 7)
    weight = torch.linspace(-1, 1, V)[:, None].bfloat16()
    weight[7] = broken
    exact = score_head(hidden.double(), weight.double(), query(), label, CONTIGUOUS)
    half = score_head(hidden.bfloat16(), weight, query(), label, CONTIGUOUS)
    for a, b in zip(parts_of(half), parts_of(exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)
    assert torch.equal(half.nonfinite_N, exact.nonfinite_N)


def test_autocast_computes_in_half_and_gradients_have_the_leaves_dtype() -> None:
    hidden, weight, _, label = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = score_head(hidden, weight, query(), label, CONTIGUOUS)
    rounded = score_head(hidden.bfloat16(), weight.bfloat16(), query(), label, CONTIGUOUS)
    assert torch.equal(got.vocab_lse_N[1.7], rounded.vocab_lse_N[1.7])
    total(got).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_under_autocast_the_fed_coordinates_have_the_heads_own_logits() -> None:
    """Two bins differ by 4e-3 at logits of about 40, where bfloat16 has steps of 0.25 and would call it a tie."""
    hidden_KH = torch.ones(3, 64)
    rows_BH = torch.zeros(NUM_BINS, 64)
    rows_BH[300], rows_BH[200] = 0.625, 0.625
    rows_BH[300, 0] += 2**-8  # its last bit
    offset_BH = torch.zeros(NUM_BINS, 64)
    offset_BH[400, :] = 0.62502
    slots = HeadQuery(NO_IDS, NO_IDS, NO_IDS, torch.arange(3), 3, (1.0,))
    for offset in (None, offset_BH):
        with torch.autocast("cpu", torch.bfloat16):
            fed_KB = coordinate_logits(hidden_KH, rows_BH, offset)
            scored = score_head(hidden_KH, rows_BH, slots, torch.zeros(3, dtype=torch.int64), range(NUM_BINS), offset)
        torch.testing.assert_close(fed_KB, scored.coord_logit_KB, rtol=1e-6, atol=0)
        assert fed_KB.argmax(dim=-1).tolist() == [300] * 3


# -- the limit ---------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
BROKEN = [NAN, INF, -INF, 3e4, -3e4]


@pytest.mark.parametrize("column", [7, 255, 690], ids=["text", "coordinate", "last chunk"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_column_is_limited_as_in_the_reference(broken: float, column: int) -> None:
    """One hidden unit that is 1 everywhere: the first column of the weight is then every position's logits."""
    hidden = torch.ones(N, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight[column] = broken
    weight.requires_grad_()
    label = torch.full((N,), column)
    got = score_head(hidden, weight, query(), label, CONTIGUOUS)
    want = scores_from_logits(hidden @ weight.T, query(), label, CONTIGUOUS)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    asked = query()
    assert int((got.clamped_N if math.isfinite(broken) else got.nonfinite_N).sum()) == asked.num_scored
    grad, d_hidden = torch.autograd.grad(total(got), (weight, hidden))
    (reference,) = torch.autograd.grad(total(want), weight)
    assert grad[column] == 0 and torch.isfinite(grad).all()
    assert torch.isfinite(d_hidden).all(), "the broken weight must not spread"
    torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-12)


def test_one_broken_position_does_not_change_the_others() -> None:
    hidden, weight, _, label = tensors()
    sound = score_head(hidden, weight, query(), label, CONTIGUOUS)
    broken = hidden.detach().clone()
    broken[2] = NAN
    got = score_head(broken.requires_grad_(), weight, query(), label, CONTIGUOUS)
    assert torch.nonzero(got.nonfinite_N)[:, 0].tolist() == [2] and not got.clamped_N.any()
    assert got.vocab_lse_N[1.0][2].item() == pytest.approx(math.log(V)), "NaN reads as 0 everywhere"
    others = [0, 1, 3, 4, 5, 8]
    torch.testing.assert_close(got.vocab_lse_N[1.7][others], sound.vocab_lse_N[1.7][others])
    total(got).backward()
    assert broken.grad is not None and torch.isfinite(broken.grad).all()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()
    assert torch.count_nonzero(broken.grad[2]) == 0


# -- memory ------------------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_on_a_gpu_no_buffer_has_the_size_of_positions_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "KEPT_LOGITS_CPU", 0)  # a GPU keeps none
    size, hidden_size = 40_000, 4
    weight = torch.randn(size, hidden_size, requires_grad=True)
    hidden = torch.randn(N, hidden_size, requires_grad=True)
    with Peak() as peak:
        scores = score_head(hidden, weight, query(), torch.arange(N), CONTIGUOUS, chunk_logits=7 * 1024)
        torch.autograd.backward(total(scores))
    # The largest are the weight and its gradient; the logits would be larger.
    assert peak.numel == size * hidden_size < 7 * size


def test_without_gradients_no_logits_are_kept() -> None:
    size, hidden_size = 40_000, 4
    hidden, weight = torch.randn(N, hidden_size), torch.randn(size, hidden_size, requires_grad=True)
    with Peak() as peak, torch.no_grad():
        score_head(hidden, weight, query(), torch.arange(N), CONTIGUOUS, chunk_logits=7 * 1024)
    assert peak.numel < 7 * size


@pytest.mark.parametrize(("kept", "computed_again"), [(0, 4), (7 * 300, 3), (2**28, 0)], ids=["none", "one", "all"])
def test_on_a_cpu_the_backward_pass_uses_the_logits_that_were_kept(monkeypatch, kept: int, computed_again: int) -> None:
    """Of four chunks of 256, 256, 184 and 4 columns."""
    exact, of_logits = head_module.product, []

    def recorded(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        if a.shape == (7, H):
            of_logits.append(b.shape[1])
        return exact(a, b, *rest)

    def gradients(budget: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(head_module, "KEPT_LOGITS_CPU", budget)
        hidden, weight, _, label = tensors()
        asked = replace(query(), trained_in_N=query().vocab_in_N_U)
        loss = score_head(hidden, weight, asked, label, CONTIGUOUS, chunk_logits=7 * 256).cross_entropy_N().sum()
        of_logits.clear()
        return torch.autograd.grad(loss, (hidden, weight))

    want = gradients(0)
    monkeypatch.setattr(head_module, "product", recorded)
    got = gradients(kept)
    assert len(of_logits) == computed_again
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_vocabulary_products_have_widths_that_gpus_are_fast_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's 152,670 rows are not a multiple of 8: the six left over are a product by themselves."""
    widths: list[int] = []
    exact = head_module.product

    def recorded(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        widths.append(b.shape[1])
        return exact(a, b, *rest)

    monkeypatch.setattr(head_module, "product", recorded)
    hidden, weight, _, label = tensors()
    rows = torch.cat([weight, weight.new_zeros(152_670 - len(weight), weight.shape[1])])
    score_head(hidden, rows, query(), label, CONTIGUOUS, chunk_logits=450_000)
    assert [width for width in widths if width != len(CONTIGUOUS)] == [64_256, 64_256, 24_152, 6]
