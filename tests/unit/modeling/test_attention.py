"""Each attention for packed rows gives what a softmax within each segment gives, and refuses where it cannot run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import send_to_device
from torch.distributed.utils import _recursive_to
from transformers import AttentionInterface

from coordexp.errors import ConfigError, MissingDependency
from coordexp.modeling.attention import (
    KERNELS,
    Segments,
    check_attention,
    row_arguments,
    transformers_name,
)

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = [(5,), (1, 1, 1), (127, 1, 128), (40, 300, 1, 90), (256, 256)]


def rows(total: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    return [
        torch.randn(1, heads, total, DIM, generator=generator, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def allowed_pairs(lengths: Sequence[int], causal: bool) -> torch.Tensor:
    """Which keys a token sees: those of its own segment, under ``causal`` the earlier ones."""
    segment_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same_LL = segment_L[:, None] == segment_L[None]
    return same_LL.tril() if causal else same_LL


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], causal: bool
) -> torch.Tensor:
    """Softmax over the tokens that each may see, as the formula says it."""
    allowed_LL = allowed_pairs(lengths, causal)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)) * DIM**-0.5
    return (scores.masked_fill(~allowed_LL, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["tokens", "patches"])
def test_forward_and_gradients_equal_the_formula(lengths: tuple[int, ...], causal: bool) -> None:
    leaves = q, k, v = [leaf.requires_grad_() for leaf in rows(sum(lengths))]
    output = KERNELS["packed"](q, k, v, Segments(lengths, causal), DIM**-0.5, 0.0)
    expected = reference(q, k, v, lengths, causal)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    ours, theirs = (torch.autograd.grad(found.square().sum(), leaves) for found in (output, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_segments_pass_unchanged_through_ddp_and_accelerate() -> None:
    """A tensor of lengths would be moved to the GPU with the rest, and every layer would wait to read it back."""
    arguments = row_arguments([3, 4])
    ddp = _recursive_to(arguments, torch.device("meta"), use_side_stream_for_tensor_copies=False)[0]
    for moved in (ddp, send_to_device(arguments, "meta")):
        assert moved["segments"] is arguments["segments"]
        assert moved["attention_mask"].device.type == "meta" and not moved["attention_mask"].numel()


def test_kernel_arguments_are_computed_once_per_forward() -> None:
    segments = Segments([3, 4, 5])
    starts = segments.cumulative(torch.device("cpu"))
    assert starts.tolist() == [0, 3, 7, 12] and starts.dtype == torch.int32
    assert segments.cumulative(torch.device("cpu")) is starts
    assert (segments.total, segments.longest) == (12, 5)


def test_lost_segments_are_detected() -> None:
    """If transformers stopped passing unknown arguments on, rows would silently be one causal sequence."""
    query, key, value = rows(7)
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, layer_idx=0)
    attend = AttentionInterface()[transformers_name("packed")]
    mask = row_arguments([3, 4])["attention_mask"]
    with pytest.raises(AssertionError, match="segments"):
        attend(layer, query, key, value, mask, scaling=DIM**-0.5)


def test_kernels_without_dropout_refuse_it() -> None:
    q, k, v = rows(8)
    with pytest.raises(ConfigError, match=r"model\.attn_implementation.*0\.1"):
        KERNELS["varlen"](q, k, v, Segments([8]), DIM**-0.5, 0.1)


REFUSED = [
    ("varlen", "cpu", True, ConfigError, "packed"),
    ("flash", "cpu", True, ConfigError, "packed"),
    ("varlen", "cuda", False, ConfigError, "bfloat16"),
    ("flash", "cuda", False, ConfigError, "bfloat16"),
    ("flash", "cuda", True, MissingDependency, "flash_attn"),
]


@pytest.mark.parametrize(("name", "device", "half", "error", "says"), REFUSED)
def test_unsupported_kernel_is_refused(
    name: str, device: str, half: bool, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # not installed
    with pytest.raises(error, match=says) as caught:
        check_attention(name, device, half)
    assert "model.attn_implementation" in str(caught.value)
    for supported in ("packed", "sdpa"):
        check_attention(supported, device, half)


def test_under_autocast_every_kernel_gets_half_precision() -> None:
    """Norms leave queries in float32; only SDPA would be cast by autocast itself."""
    query, key, value = rows(8, torch.float32)
    attend = AttentionInterface()[transformers_name("packed")]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attend(None, query, key, value, None, scaling=DIM**-0.5, segments=Segments([3, 5]))
    assert output.dtype == torch.bfloat16
