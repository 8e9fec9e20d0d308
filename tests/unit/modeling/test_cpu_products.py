"""Products in bfloat16 on a CPU without instructions for them: the same factors, sums in float32, one rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from coordexp.modeling import cpu_products


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "multiplies_bfloat16", lambda: False)


def integers(*shape: int) -> Tensor:
    """Small ones: their products and sums are exact in float32, in any order, so that only the rounding is left."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def results(
    product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool
) -> list[Tensor]:
    """Output, and gradients of all that has one."""
    leaves = [one.clone().requires_grad_() for one in (x, weight, bias) if one is not None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = product(*leaves)
    (out.float() * integers(*out.shape)).sum().backward()
    return [out, *(one.grad for one in leaves if one.grad is not None)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("autocast", [True, False], ids=["float32 weights under autocast", "bfloat16 weights"])
def test_a_linear_layer_and_its_gradients_are_torchs(autocast: bool, biased: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    x, weight, bias = (integers(*shape).to(dtype) for shape in ((3, 7, 240), (10, 240), (10,)))
    found, expected = (
        results(product, x, weight, bias if biased else None, autocast)
        for product in (cpu_products.linear, functional.linear)
    )
    assert len(found) == len(expected) == 3 + biased
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.equal(theirs)
    assert not found[0].float().equal(functional.linear(x.float(), weight.float())), "sums that bfloat16 rounds"


def test_factors_and_gradients_are_rounded_as_on_other_machines() -> None:
    weight = torch.tensor([[1 + 2**-9, -1.0] * 4, [1.0, -1.0] * 4], requires_grad=True)  # the first 1.00195 becomes 1
    x = torch.ones(8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = cpu_products.linear(x, weight)
    assert out.tolist() == [[0.0, 0.0]] * 8
    out.backward(torch.tensor([[1.0, -1.0], [2**-9, 0.0], *[[0.0, 0.0]] * 6]).bfloat16())
    assert x.grad is not None and weight.grad is not None
    assert x.grad[:2].tolist() == [[0.0] * 8, [2**-9, -(2**-9)] * 4], "both rows of weights are ones"
    assert weight.grad.tolist() == [[1.0] * 8, [-1.0] * 8], "1 + 2**-9, rounded"


def test_wide_layers_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = (integers(*shape).bfloat16() for shape in ((9, 24), (10, 24), (10,)))
    whole = cpu_products.linear(x, weight, bias)
    monkeypatch.setattr(cpu_products, "_BLOCK", 3 * 24)
    assert cpu_products.linear(x, weight, bias).equal(whole)


def test_other_number_types_are_torchs_own_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 24), torch.randn(10, 24)
    found, expected = (results(product, x, weight, None, False) for product in (cpu_products.linear, functional.linear))
    assert all(mine.equal(theirs) for mine, theirs in zip(found, expected, strict=True))


def test_factors_of_two_number_types_are_refused_as_on_other_machines() -> None:
    x, weight = torch.ones(9, 8).bfloat16(), torch.ones(4, 8)
    for factors in ((x, weight), (x, weight.bfloat16(), torch.ones(4))):
        with pytest.raises(RuntimeError, match="same dtype"):
            cpu_products.linear(*factors)


def test_autocast_leaves_float64_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu_products.linear(torch.ones(9, 8).double(), torch.ones(4, 8).double()).dtype == torch.float64


def test_a_frozen_layer_needs_no_gradient_of_its_weight() -> None:
    x, weight = torch.randn(8, 8).bfloat16().requires_grad_(), torch.randn(4, 8).bfloat16()
    cpu_products.linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_attention_keeps_its_number_type() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8).bfloat16() for _ in range(3))
    options: dict[str, Any] = {"is_causal": True}
    with torch.autocast("cpu", torch.bfloat16):
        found = cpu_products.attention(functional.scaled_dot_product_attention, query, key, value, **options)
    exact = functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)
    assert found.equal(exact.bfloat16()), "rounded once"


def test_layers_are_taken_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False)))
    before = dict(model.named_parameters())
    cpu_products.take_linear_layers(model)
    assert all(one is before[name] for name, one in model.named_parameters())
    assert sum(isinstance(one, cpu_products.Linear) for one in model.modules()) == 2
