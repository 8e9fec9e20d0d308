"""On a GPU every attention for packed rows equals separate forwards, without host synchronisation."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from coordexp.modeling.attention import KERNELS, Segments, varlen_runs_on
from coordexp.modeling.inputs import VisionTower, row_inputs, to_device
from support.tiny_run import gt_segments, load_tiny, row_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (40, 300, 1, 90, 513)
HEADS, KV_HEADS, DIM = 4, 2, 64


def runs(name: str) -> bool:
    if name == "flash":
        return importlib.util.find_spec("flash_attn") is not None
    return name != "varlen" or varlen_runs_on(torch.device("cuda", 0))


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    if not runs(request.param):
        pytest.skip(f"{request.param} does not run on this machine")
    yield request.param


@pytest.fixture(params=[True, False], ids=["tokens", "patches"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, heads, sum(LENGTHS), DIM, generator=generator, device="cuda", dtype=torch.float32)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    segment_L = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).cuda()
    same_LL = segment_L[:, None] == segment_L[None]
    allowed_LL = same_LL.tril() if causal else same_LL
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)) * DIM**-0.5
    return (scores.masked_fill(~allowed_LL, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def test_forward_and_gradients_equal_the_formula(kernel: str, causal: bool) -> None:
    leaves = q, k, v = rows(torch.bfloat16)
    output = KERNELS[kernel](q, k, v, Segments(LENGTHS, causal), DIM**-0.5, 0.0)
    ours = torch.autograd.grad(output.float().square().sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = reference(exact[0], exact[1], exact[2], causal)
    theirs = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() < 2e-2 * b.norm()


def test_packed_uses_varlen_in_half_precision_and_sdpa_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("attend_varlen", "attend_each_segment"):
        monkeypatch.setattr(f"coordexp.modeling.attention.{name}", lambda *a, n=name: taken.append(n) or a[0])
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = rows(dtype)
        KERNELS["packed"](q, k, v, Segments(LENGTHS), None, 0.0)
    expected = "attend_varlen" if varlen_runs_on(torch.device("cuda", 0)) else "attend_each_segment"
    assert taken == [expected, "attend_each_segment"]


def test_a_packed_row_equals_separate_forwards(kernel: str) -> None:
    loaded = load_tiny("bfloat16", kernel)
    model: Any = loaded.model
    model.cuda()
    segments = gt_segments(loaded, 4)

    @torch.no_grad()
    def logits(chosen: list) -> torch.Tensor:
        rope_index, tower = model.model.get_rope_index, VisionTower.from_model(model)
        inputs = row_inputs(row_of(chosen), rope_index, loaded.image_token_id, kernel, torch.bfloat16, tower)
        return model(**to_device(inputs, torch.device("cuda")), use_cache=False).logits[0].float()

    together = logits(segments).split([segment.length for segment in segments])
    for packed, segment in zip(together, segments, strict=True):
        alone = logits([segment])
        assert (packed - alone).abs().max() < 0.05 * alone.abs().max()


@pytest.mark.parametrize("name", ["packed", "varlen"])
def test_layers_never_synchronise(name: str) -> None:
    """Lengths are Python numbers; tensors that kernels need of them are made in the first layer."""
    if not runs(name):
        pytest.skip(f"{name} does not run on this machine")
    (q, k, v), segments = rows(torch.bfloat16), Segments(LENGTHS)
    KERNELS[name](q, k, v, segments, DIM**-0.5, 0.0)  # makes the segment starts
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            for _ in range(3):
                KERNELS[name](q, k, v, segments, DIM**-0.5, 0.0).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
