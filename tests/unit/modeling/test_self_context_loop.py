"""The self-context loop on a toy model in float64: gradients against finite differences, and which of them vanish."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from coordexp.modeling.forward import EmbedMode, GradMode, SelfContext, coord_embeddings, unroll

HIDDEN, BINS, SLOTS = 5, 7, 3


class ToyModel(torch.nn.Module):
    """Three coordinate slots behind one another; each sees its own input and the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.7)

        self.table_BH = weight(BINS, HIDDEN)
        self.mix_HH = weight(HIDDEN, HIDDEN)
        self.head_BH = weight(BINS, HIDDEN)
        self.token_KH = weight(SLOTS, HIDDEN)  # the ground truth's own embeddings, where nothing is fed
        self.calls: list[bool] = []

    def forward(self, fed_KH: torch.Tensor | None) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        embedded_KH = self.token_KH if fed_KH is None else fed_KH
        return torch.tanh(embedded_KH @ self.mix_HH + embedded_KH.mean(0))

    def logits(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        return hidden_KH @ self.head_BH.T

    def run(self, settings: SelfContext) -> tuple[torch.Tensor, torch.Tensor]:
        return unroll(self, self.logits, self.table_BH, settings)


def text_loss(model: ToyModel, settings: SelfContext) -> torch.Tensor:
    return model.logits(model.run(settings)[0]).logsumexp(-1).sum()


def coord_loss(model: ToyModel, settings: SelfContext) -> torch.Tensor:
    log_p_KB = model.logits(model.run(settings)[1]).log_softmax(-1)
    return -log_p_KB[torch.arange(SLOTS), torch.tensor([1, 4, 6])].sum()


def numeric_gradient(loss: Callable[[], torch.Tensor], parameter: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    gradient = torch.zeros_like(parameter)
    flat, out = parameter.data.view(-1), gradient.view(-1)
    for index in range(flat.numel()):
        old = flat[index].item()
        flat[index] = old + eps
        above = loss().item()
        flat[index] = old - eps
        below = loss().item()
        flat[index] = old
        out[index] = (above - below) / (2 * eps)
    return gradient


def gradients(loss: torch.Tensor, model: ToyModel) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(model.named_parameters(), found, strict=True)
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
def test_the_unrolled_loop_has_the_gradient_of_finite_differences(iterations: int, temperature: float) -> None:
    model, settings = ToyModel(), SelfContext(iterations, "soft", "unroll", temperature)
    found = gradients(coord_loss(model, settings) + text_loss(model, settings), model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            numeric = numeric_gradient(lambda: coord_loss(model, settings) + text_loss(model, settings), parameter)
        torch.testing.assert_close(found[name], numeric, atol=1e-7, rtol=1e-6)


def test_straight_through_has_the_tokens_value_and_the_means_gradient() -> None:
    z_KB = torch.randn(SLOTS, BINS, requires_grad=True)
    table_BH = torch.randn(BINS, HIDDEN, requires_grad=True)
    upstream_KH = torch.randn(SLOTS, HIDDEN)
    fed = {mode: coord_embeddings(z_KB, table_BH, mode, 0.7) for mode in ("soft", "st", "hard")}
    assert torch.equal(fed["st"], fed["hard"]) and torch.equal(fed["hard"], table_BH[z_KB.argmax(-1)])
    torch.testing.assert_close(fed["soft"], (z_KB / 0.7).softmax(-1) @ table_BH)
    soft, straight = (torch.autograd.grad(fed[mode], (z_KB, table_BH), upstream_KH) for mode in ("soft", "st"))
    assert torch.equal(soft[0], straight[0]) and torch.equal(soft[1], straight[1])
    only_table = torch.autograd.grad(fed["hard"], (z_KB, table_BH), upstream_KH, allow_unused=True)
    assert only_table[0] is None and only_table[1] is not None


@pytest.mark.parametrize("mode", ["soft", "st", "hard"])
@pytest.mark.parametrize("iterations", [2, 3])
def test_with_detached_embeddings_only_the_last_forward_has_gradient(mode: EmbedMode, iterations: int) -> None:
    """The coordinate loss depends on the last forward alone; its inputs are constants."""
    model = ToyModel()
    fed_KH = None
    for _ in range(iterations - 1):
        with torch.no_grad():
            fed_KH = coord_embeddings(model.logits(model(fed_KH)), model.table_BH, mode, 1.0)
    log_p_KB = model.logits(model(fed_KH)).log_softmax(-1)
    alone = gradients(-log_p_KB[torch.arange(SLOTS), torch.tensor([1, 4, 6])].sum(), model)
    found = gradients(coord_loss(model, SelfContext(iterations, mode, "em_detach", 1.0)), model)
    for name in found:
        assert torch.equal(found[name], alone[name]), name
    # Exactly zero: the ground truth's tokens and the table reach the last forward only through its inputs.
    assert not found["token_KH"].any() and not found["table_BH"].any()
    assert found["mix_HH"].any() and found["head_BH"].any()
    unrolled = gradients(coord_loss(model, SelfContext(iterations, "soft", "unroll", 1.0)), model)
    assert unrolled["token_KH"].any() and unrolled["table_BH"].any()


@pytest.mark.parametrize("grad_mode", ["unroll", "em_detach"])
def test_the_text_loss_depends_only_on_the_first_forward(grad_mode: GradMode) -> None:
    model = ToyModel()
    plain = gradients(text_loss(model, SelfContext(1, "st", "unroll", 1.0)), model)
    found = gradients(text_loss(model, SelfContext(3, "soft", grad_mode, 1.0)), model)
    for name in found:
        assert torch.equal(found[name], plain[name]), name


@pytest.mark.parametrize(
    ("grad_mode", "iterations", "with_gradient"),
    [
        ("unroll", 1, [True]),
        ("unroll", 4, [True, True, True, True]),
        ("em_detach", 1, [True]),
        ("em_detach", 2, [True, True]),
        ("em_detach", 4, [True, False, False, True]),  # those between keep no activations
    ],
)
def test_forwards_that_keep_a_graph(grad_mode: GradMode, iterations: int, with_gradient: list[bool]) -> None:
    model = ToyModel()
    model.run(SelfContext(iterations, "soft", grad_mode, 1.0))
    assert model.calls == with_gradient
