"""Each attention for packed rows gives what a softmax within each segment gives, and refuses where it cannot run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import send_to_device
from torch.distributed.utils import _recursive_to
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from coordexp.errors import ConfigError, MissingDependency
from coordexp.modeling import attention as module
from coordexp.modeling import cpu_products
from coordexp.modeling.attention import (
    KERNELS,
    Segments,
    attend_varlen,
    check_attention,
    keeping_attention,
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


def generation(new: int, dtype: torch.dtype, mask: bool = True) -> list[torch.Tensor]:
    """What a layer gives for ``new`` tokens of each of three sequences, one of which is padded: ours, transformers'."""
    torch.manual_seed(new)
    query, key, value = (
        torch.randn(3, heads, length, DIM).to(dtype) for heads, length in ((HEADS, new), (KV_HEADS, 40), (KV_HEADS, 40))
    )
    sees = torch.ones(3, 1, new, 40, dtype=torch.bool).tril(40 - new)
    sees[0, ..., :17] = False
    sees[0, ..., 17] = True  # no token sees nothing
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, layer_idx=0)
    with torch.no_grad():
        return [
            AttentionInterface()[name](layer, query, key, value, sees if mask else None, scaling=DIM**-0.5)[0]
            for name in (transformers_name("packed"), "sdpa")
        ]


@pytest.mark.parametrize("new", [1, 5, 40], ids="{} new tokens".format)
def test_generation_gives_what_transformers_gives(new: int) -> None:
    """To the last bit, though keys and values are not copied to each query head."""
    ours, theirs = generation(new, torch.float32)
    assert ours.shape == (3, new, HEADS, DIM) and ours.equal(theirs)


@pytest.mark.parametrize(("new", "mask"), [(1, True), (1, False), (5, True), (40, True), (40, False)])
@pytest.mark.parametrize("autocast", [False, True])
def test_generation_in_half_precision(new: int, mask: bool, autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = generation(new, torch.float32 if autocast else torch.bfloat16, mask)
    assert ours.shape == (3, new, HEADS, DIM) and ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_a_cpu_without_instructions_for_bfloat16_attends_in_float32(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own loop takes five to seven times as long in the backward pass."""
    monkeypatch.setattr(cpu_products, "multiplies_bfloat16", lambda: False)
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, layer_idx=0)
    rounded = rows(64, torch.bfloat16)
    outputs = []
    for leaves in (rounded, [row.float() for row in rounded]):
        attend = AttentionInterface()[transformers_name(attention)]
        output, _ = attend(layer, *leaves, None, scaling=DIM**-0.5)
        outputs.append(output)
    assert outputs[0].equal(outputs[1].bfloat16()) and outputs[0].dtype == torch.bfloat16


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


def test_torch_has_the_operations() -> None:
    arguments = [one.name for one in torch.ops.torch_attn._varlen_attn.default._schema.arguments]
    assert arguments[:11] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale",
                              "window_size", "enable_gqa"]  # fmt: skip
    arguments = [one.name for one in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    assert arguments == ["grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k",
                         "is_causal", "rng_state", "scale", "window_size"]  # fmt: skip


class Operations:
    """torch's operations of variable-length attention, by the formula; ``calls`` of the forward are counted."""

    def __init__(self) -> None:
        self.calls = 0

    def _attend(
        self, q_LHD: torch.Tensor, k_LHD: torch.Tensor, v_LHD: torch.Tensor, starts: torch.Tensor, causal: bool
    ):
        q, k, v = (part.transpose(0, 1)[None] for part in (q_LHD, k_LHD, v_LHD))
        return reference(q, k, v, starts.diff().tolist(), causal)[0]

    def _varlen_attn(self, q, k, v, starts, _, longest, __, causal, scaling, window, grouped):
        self.calls += 1
        assert scaling == DIM**-0.5 and grouped and window == ([-1, 0] if causal else [-1, -1])
        return self._attend(q, k, v, starts, causal), torch.zeros(HEADS, len(q)), torch.zeros(2)

    def _varlen_attn_backward(self, grad, q, k, v, out, lse, starts, _, longest, __, causal, *rest):
        with torch.enable_grad():
            leaves = q, k, v = [part.detach().requires_grad_() for part in (q, k, v)]
            again = self._attend(q, k, v, starts, causal)
        assert torch.equal(again, out), "the saved output belongs to these queries"
        return torch.autograd.grad(again, leaves, grad)


def test_a_recomputed_layer_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, each with two attentions, in two rows: gradients are those without recomputation."""
    monkeypatch.setattr(module, "_OPERATIONS", operations := Operations())
    weight = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64).requires_grad_()

    def layer(x_1HLD: torch.Tensor, segments: Segments) -> torch.Tensor:
        for factor in (1.0, 0.5):
            kv = (x_1HLD * weight)[:, :KV_HEADS]
            x_1HLD = attend_varlen(x_1HLD * weight * factor, kv, kv.sin(), segments, DIM**-0.5).transpose(1, 2)
        return x_1HLD

    def gradient(recomputed: bool, causal: bool = True, keeps_causal: bool = True) -> torch.Tensor:
        losses = []
        for lengths in ((3, 5), (4, 1)):
            x, segments = rows(sum(lengths))[0], Segments(lengths, causal)
            for _ in range(2):
                if recomputed:
                    keeping = partial(keeping_attention, causal=keeps_causal)
                    x = checkpoint(layer, x, segments, use_reentrant=False, context_fn=keeping)
                else:
                    x = layer(x, segments)
            losses.append(x.square().sum())
        return torch.autograd.grad(torch.stack(losses).sum(), weight)[0]

    plain = gradient(recomputed=False)
    assert operations.calls == 8
    torch.testing.assert_close(gradient(recomputed=True), plain, atol=0, rtol=0)
    assert operations.calls == 16, "eight more: none was computed again"
    with torch.no_grad():
        checkpoint(layer, rows(8)[0], Segments((8,)), use_reentrant=False, context_fn=keeping_attention)
    assert operations.calls == 18
    torch.testing.assert_close(gradient(recomputed=True, keeps_causal=False), plain, atol=0, rtol=0)
    assert operations.calls == 34, "each twice"
    gradient(recomputed=True, causal=False, keeps_causal=False)
    assert operations.calls == 42, "images keep theirs"


def test_a_recomputed_layer_may_train_only_what_follows_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of the vision tower with adapters of its MLP alone."""
    monkeypatch.setattr(module, "_OPERATIONS", Operations())
    weight = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64).requires_grad_()

    def layer(x_1HLD: torch.Tensor, segments: Segments) -> torch.Tensor:
        kv = x_1HLD[:, :KV_HEADS]
        return (attend_varlen(x_1HLD, kv, kv.sin(), segments, DIM**-0.5).transpose(1, 2) * weight).sin()

    x, segments = rows(8)[0].detach(), Segments((3, 5), causal=False)
    recomputed = checkpoint(layer, x, segments, use_reentrant=False, context_fn=keeping_attention)
    found, plain = (torch.autograd.grad(one.sum(), weight)[0] for one in (recomputed, layer(x, segments)))
    torch.testing.assert_close(found, plain, atol=0, rtol=0)
