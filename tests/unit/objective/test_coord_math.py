"""The arithmetic on coordinate logits against numbers worked out apart from it, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from coordexp.objective import coord_gate, coord_math
from coordexp.objective.coord_math import LOGIT_LIMIT, gaussian_targets, limit_logits

V = 152_670  # tokens of the Qwen vocabulary with coordinates
F64 = torch.float64


def text_gate(full: torch.Tensor, coord: torch.Tensor, temperature: float) -> torch.Tensor:
    return coord_math.text_gate_of_lse(*(torch.logsumexp(limit_logits(z) / temperature, dim=-1) for z in (full, coord)))


def target(center: float, sigma: float = 2.0, truncate: float | None = None) -> torch.Tensor:
    return gaussian_targets(torch.tensor([center], dtype=F64), 1000, sigma, truncate)


def spiked(at: int | None, size: int = 1000, height: float = 20.0) -> torch.Tensor:
    logits = torch.zeros(1, size, dtype=F64)
    if at is not None:
        logits[0, at] = height
    return logits


@pytest.mark.parametrize(
    ("center", "truncate", "peak", "entropy"),
    [
        (500, None, 0.19947115, 2.11208582),
        (500, 16, 0.19947115, None),
        (500, 8, 0.19947465, None),
        (500, 0, 1.0, 0.0),
        (0, None, 0.33259848, 1.51766968),
        (999, None, 0.33259848, 1.51766968),
    ],
)
def test_gaussian_targets(center, truncate, peak, entropy) -> None:
    q = target(center, truncate=truncate)
    assert q.shape == (1, 1000)
    assert q.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert q.argmax().item() == center
    assert q.max().item() == pytest.approx(peak, abs=1e-7)
    if entropy is not None:
        assert torch.special.entr(q).sum().item() == pytest.approx(entropy, abs=5e-7)


def test_a_fractional_center_is_between_its_bins() -> None:
    q = target(500.25)
    expected = (q[0] * torch.arange(1000, dtype=F64)).sum().item()
    assert expected == pytest.approx(500.25, abs=1e-9)
    assert q[0, 500] > q[0, 501] > q[0, 499]


@pytest.mark.parametrize(("center", "nonzero"), [(500.5, [500, 501]), (500.25, [500]), (998.9, [999])])
def test_truncation_never_empties_a_row(center: float, nonzero: list[int]) -> None:
    q = target(center, truncate=0.1)
    assert torch.nonzero(q[0])[:, 0].tolist() == nonzero
    assert q.sum().item() == pytest.approx(1.0)


def test_a_tiny_sigma_gives_no_nan() -> None:
    assert target(500.5, sigma=0.01)[0, 499:503].tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("at", "temperature", "center", "truncate", "soft_ce", "w1"),
    [
        (None, 1, 500, None, 6.907755, 0.24868664),
        (None, 1, 0, None, 6.907755, 0.4986966),
        (None, 1, 1, None, 6.907755, 0.498218),
        (None, 1, 999, None, 6.907755, 0.498696),
        (None, 1, 500, 16, 6.907755, 0.24868664),
        (500, 1, 500, None, 16.01057816, 0.00156412),
        (500, 1, 500, 0, 2.03e-6, 5e-7),
        (500, 2, 500, None, 8.04964447, 0.01202641),
        (500, 1, 510, None, 19.99998856, 0.01001047),
    ],
)
def test_soft_cross_entropy_and_wasserstein(at, temperature, center, truncate, soft_ce, w1) -> None:
    log_p = torch.log_softmax(spiked(at) / temperature, dim=-1)
    q = target(center, truncate=truncate)
    assert coord_math.soft_cross_entropy(log_p, q).item() == pytest.approx(soft_ce, rel=1e-6, abs=1e-6)
    assert coord_math.wasserstein1(log_p.exp(), q).item() == pytest.approx(w1, rel=1e-5, abs=3e-8)


@pytest.mark.parametrize(("a", "b", "distance"), [(10, 10, 0.0), (10, 12, 2 / 999), (0, 999, 1.0), (999, 0, 1.0)])
def test_wasserstein_of_two_points_is_their_distance(a: int, b: int, distance: float) -> None:
    p, q = torch.zeros(1, 1000, dtype=F64), torch.zeros(1, 1000, dtype=F64)
    p[0, a] = q[0, b] = 1
    assert coord_math.wasserstein1(p, q).item() == pytest.approx(distance, abs=1e-12)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("text", "coord", "temperature", "gate", "leak"),
    [
        # (logit of one text token, of one coordinate token; all others 0)
        (0, 0, 1, 5.02827883, 0.00657162),
        (0, 20, 1, 0.00031281, 8.07085224),
        (20, 0, 1, 13.09255791, None),
        (0, 20, 2, None, None),
        (0, 200, 1, 0.0, 13.815510),  # the text gate is capped at -log(1e-6)
        (INF, 0, 1, 9993.092245, 0.0),
        (0, INF, 1, 0.0, 13.815510),
        (-INF, 0, 1, None, None),
        (NAN, 0, 1, 5.02827883, 0.00657162),
    ],
)
def test_both_gates(text: float, coord: float, temperature: float, gate: float | None, leak: float | None) -> None:
    full = torch.zeros(1, V, dtype=F64)
    full[0, 5], full[0, -1000] = text, coord
    args = (full, full[:, -1000:], temperature)
    limited = [min(LOGIT_LIMIT, max(-LOGIT_LIMIT, 0.0 if math.isnan(x) else x)) / temperature for x in (text, coord)]
    peak = max(0.0, *limited)
    weight_text = math.exp(limited[0] - peak) + (V - 1001) * math.exp(-peak)
    weight_coord = math.exp(limited[1] - peak) + 999 * math.exp(-peak)
    mass = weight_coord / (weight_coord + weight_text)
    if mass > 0:
        assert coord_gate(*args).item() == pytest.approx(-math.log(mass), abs=1e-7)
        assert text_gate(*args).item() == pytest.approx(-math.log1p(-min(mass, 1 - 1e-6)), abs=1e-7)
    if gate is not None:
        assert coord_gate(*args).item() == pytest.approx(gate, rel=1e-6, abs=2e-6)
    if leak is not None:
        assert text_gate(*args).item() == pytest.approx(leak, rel=1e-6, abs=1e-8)


def test_the_coordinate_gate_is_never_negative_after_rounding() -> None:
    whole = torch.tensor([20.0])
    assert coord_math.coord_gate_of_lse(whole, torch.nextafter(whole, torch.tensor(30.0))).item() == 0.0


def test_broken_logits_read_as_zeros_and_leave_no_gradient() -> None:
    logits = torch.full((1, V), NAN, requires_grad=True)
    gate = coord_gate(logits, logits[:, -1000:], 1.0)
    log_p = torch.log_softmax(coord_math.limit_logits(logits[:, -1000:]), dim=-1)
    soft = coord_math.soft_cross_entropy(log_p, target(500).float())
    assert gate.item() == pytest.approx(5.0283, abs=1e-4)
    assert soft.item() == pytest.approx(6.9077, abs=1e-3)
    (gate + soft).sum().backward()
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_everything_runs_in_float32_or_wider(dtype) -> None:
    assert coord_math.limit_logits(torch.zeros(2, dtype=dtype)).dtype == torch.float32
    assert coord_gate(torch.zeros(1, 2000, dtype=dtype), torch.zeros(1, 1000, dtype=dtype), 1.0).dtype == torch.float32
    assert coord_math.limit_logits(torch.zeros(2, dtype=F64)).dtype == F64


@pytest.mark.parametrize(
    ("logits", "position"),
    [
        ({250: 10.0}, 0.26109675),
        ({250: 20.0}, 0.25025076),  # the same at temperature 0.5
        ({0: 30.0, 999: 30.0}, 0.5),  # between two equal peaks
    ],
)
def test_decoding_by_expectation(logits: dict[int, float], position: float) -> None:
    z = torch.zeros(1, 1000, dtype=F64)
    for at, height in logits.items():
        z[0, at] = height
    assert coord_math.expected_position(z.softmax(dim=-1)).item() == pytest.approx(position, abs=1e-6)


BOX = (100, 100, 200, 200)


@pytest.mark.parametrize(
    ("predicted", "true", "smoothl1", "ciou"),
    [
        (BOX, BOX, 0.0, 0.0),
        ((110, 100, 210, 200), BOX, 2.505e-5, 0.18634301),
        ((100, 100, 300, 200), BOX, 0.0012525, 0.55324817),
        ((600, 600, 700, 700), BOX, 0.12525, 1.69444418),
        ((200, 100, 100, 200), BOX, 0.0, 0.0),  # an inverted box is read as the box it spans, by both losses
        ((200, 200, 200, 200), BOX, 0.00250501, 1.25),
        ((300, 300, 300, 300), (300, 300, 300, 300), 0.0, 1.0),
    ],
)
def test_box_losses(predicted, true, smoothl1, ciou) -> None:
    a, b = (coord_math.canonical_boxes(torch.tensor([box], dtype=F64) / 999) for box in (predicted, true))
    l1 = torch.nn.functional.smooth_l1_loss(a, b, beta=1.0)
    assert l1.item() == pytest.approx(smoothl1, rel=1e-4, abs=1e-9)
    # 1 - IoU of identical boxes keeps the rounding of eps = 1e-7 against their area.
    assert coord_math.ciou_loss(a, b).item() == pytest.approx(ciou, abs=2e-5)


def test_canonical_boxes_stay_inside() -> None:
    boxes = torch.tensor([[0.9, 1.2, 0.1, -0.3]])
    assert coord_math.canonical_boxes(boxes).tolist() == [pytest.approx([0.1, 0.0, 0.9, 1.0])]


def test_a_point_for_a_box_leaves_a_finite_gradient() -> None:
    logits = torch.zeros(4, 1000, dtype=F64, requires_grad=True)
    point = coord_math.expected_position(logits.softmax(-1)).reshape(1, 4)  # all four sides at 0.5
    coord_math.ciou_loss(coord_math.canonical_boxes(point), torch.tensor([BOX], dtype=F64) / 999).sum().backward()
    assert logits.grad.abs().max() < 1.0


def functions() -> dict:
    q = gaussian_targets(torch.tensor([2.0, 7.3], dtype=F64), 10, 1.5, 4.0)
    true = torch.tensor([[0.1, 0.2, 0.6, 0.7], [0.3, 0.3, 0.9, 0.8]], dtype=F64)

    def boxes(x: torch.Tensor) -> torch.Tensor:
        return coord_math.canonical_boxes(x[:, :4].sigmoid())

    return {
        "soft_ce": lambda x: coord_math.soft_cross_entropy(x[:, :10].log_softmax(-1), q),
        "w1": lambda x: coord_math.wasserstein1(x[:, :10].softmax(-1), q),
        "coord_gate": lambda x: coord_gate(x, x[:, :10], 0.7),
        "text_gate": lambda x: text_gate(x, x[:, :10], 0.7),
        "expected_position": lambda x: coord_math.expected_position(x[:, :10].softmax(-1)),
        "ciou": lambda x: coord_math.ciou_loss(boxes(x), true),
    }


@pytest.mark.parametrize("name", functions())
def test_neither_losses_nor_gradients_ask_the_device_for_numbers(name: str) -> None:
    """On a GPU the host would wait for each. prod()'s backward does: it looks for zeros."""
    x = torch.randn(2, 14, dtype=F64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        functions()[name](x).sum().backward()
    asked = {"aten::item", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}
    assert not asked & {event.name for event in trace.events()}  # pyright: ignore[reportOptionalIterable]


@pytest.mark.parametrize("name", functions())
def test_gradients(name: str) -> None:
    x = torch.randn(2, 14, dtype=F64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    assert torch.autograd.gradcheck(functions()[name], (x,))
