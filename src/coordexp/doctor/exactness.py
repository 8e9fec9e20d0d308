"""Attention kernels, fused layers, packed rows, the language head and offload on this device, each against formulas in
float32 or float64. Needs no checkpoint and no data."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig

from coordexp.config.rollout import OffloadConfig
from coordexp.doctor.check import Row, Settings, compared, judged
from coordexp.errors import CoordExpError
from coordexp.modeling.attention import KERNELS, Segments, check_attention
from coordexp.modeling.inputs import VisionTower, row_inputs, to_device
from coordexp.modeling.kernels import LayerKernels, fuse_layers, liger_kernels
from coordexp.modeling.load import LoadedModel
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.objective import HeadQuery, score_head
from coordexp.packing import build_row
from coordexp.records import Segment
from coordexp.training.offload import TrainerOffload, held_by

LENGTHS = (40, 300, 1, 90, 513)
HEADS, KV_HEADS, DIM = 4, 2, 64
TYPES = {"packed": (torch.float32, torch.bfloat16), "varlen": (torch.bfloat16,), "flash": (torch.bfloat16,)}
# Relative errors. On GPUs the patches' convolution computes in TF32, by an algorithm that depends on their number.
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
SCORE_LIMIT = 1e-3  # products are summed in float32; logits rounded to bfloat16 would be further off
LAYER_TOKENS = 6
LAYER_LIMIT = 1.25  # of the layers' own error: both round, in other places
ROW_LIMIT = {torch.float32: 5e-3, torch.bfloat16: 5e-2}
OFFLOAD = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)
NO_OFFLOAD = "set rollout_matching.offload.enabled: false, and report this table"


def kernels(settings: Settings) -> Iterator[Row]:
    """Attention kernels, fused layers, the chunked language head, and offload, each alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kernel, dtypes in TYPES.items():
        advice = f"do not train with model.attn_implementation: {kernel}; try sdpa, and report this table"
        for dtype in dtypes:
            name = f"attention: {kernel}, {str(dtype)[6:]}"
            try:
                check_attention(kernel, device.type, half=True)
            except CoordExpError as error:
                yield Row(name, "skipped", str(error))
                continue
            error = max(attention_error(kernel, causal, dtype, device) for causal in (True, False))
            yield compared(name, error, LIMIT[dtype], advice, "against float64, with gradients")
    yield fused_kernels()
    errors = head_errors(device, *((512, 2048, 152_936) if device.type == "cuda" else (64, 256, 20_000)))
    advice = "do not train with training.bf16: true; report this table"
    for name, error, limit in zip(("scores", "gradients"), errors, (SCORE_LIMIT, LIMIT[torch.bfloat16]), strict=True):
        yield compared(f"language head, {name}", error, limit, advice, "bfloat16 against float32 logits")
    freed, problem = offload_there_and_back(device)
    figure = problem or f"{freed / 1e6:.0f} MB freed and filled again, bit for bit"
    yield judged("offload and back", problem is None, figure, NO_OFFLOAD)


def attention_error(kernel: str, causal: bool, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of ``kernel``'s output and gradients against the formula in float64."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, heads, sum(LENGTHS), DIM, generator=generator).to(device, dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    q, k, v = leaves
    output = KERNELS[kernel](q, k, v, Segments(LENGTHS, causal), DIM**-0.5, 0.0)
    ours = torch.autograd.grad(output.float().square().sum(), leaves)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key, value = (part.repeat_interleave(HEADS // part.shape[1], dim=1) for part in exact)
    segment_L = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)
    same_LL = segment_L[:, None] == segment_L[None]
    scores = (query @ key.transpose(-1, -2)) * DIM**-0.5
    scores = scores.masked_fill(~(same_LL.tril() if causal else same_LL), float("-inf"))
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    theirs = torch.autograd.grad(expected.square().sum(), exact)
    return max(map(relative_error, (output, *ours), (expected, *theirs)))


def layer_errors(
    kernels: LayerKernels, dtype: torch.dtype, device: str, heads: bool = True
) -> dict[str, list[tuple[float, float]]]:
    """By layer: relative error of its output, of its input's gradient and of its weights' gradients, each (own, fused),
    against transformers' layer in float32. ``heads``: also norms of many heads, slow in Triton's interpreter."""
    # No powers of two: kernels mask the rest.
    text: Any = Qwen3VLTextConfig(
        hidden_size=96, intermediate_size=200, head_dim=40, num_attention_heads=4, num_key_value_heads=2
    )
    vision: Any = Qwen3VLVisionConfig(hidden_size=144, intermediate_size=200, num_heads=2)
    text._attn_implementation = vision._attn_implementation = "eager"
    torch.manual_seed(0)
    angles_L1D = torch.rand(LAYER_TOKENS, 1, 1, device=device) * torch.arange(1.0, 37.0, device=device)

    def rotation(half: int, given: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles_1LD = torch.cat((angles_L1D[..., :half],) * 2, dim=-1).transpose(0, 1)
        return angles_1LD.cos().to(given), angles_1LD.sin().to(given)

    def text_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(x, position_embeddings=rotation(20, x.dtype))

    def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (one[0] for one in rotation(36, torch.float32))
        return layer(x[0], cu_seqlens=torch.tensor([0, LAYER_TOKENS]), position_embeddings=(cos, sin))

    cases: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "decoder layer": (qwen3_vl.Qwen3VLTextDecoderLayer(text, 0), text_layer, (1, LAYER_TOKENS, 96)),
        "vision block": (qwen3_vl.Qwen3VLVisionBlock(vision), block, (1, LAYER_TOKENS, 144)),
    }
    if heads:  # many short rows take another kernel
        cases["norm of heads"] = (qwen3_vl.Qwen3VLTextRMSNorm(6), lambda norm, x: norm(x), (1, 4096, 8, 6))
    found: dict[str, list[tuple[float, float]]] = {}
    for name, (module, call, shape) in cases.items():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
        own = module.to(device, dtype)
        fused, exact = copy.deepcopy(own), copy.deepcopy(own).float()
        fuse_layers(fused, kernels)
        x, wanted = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        results = []
        for layer in (exact, own, fused):
            given = x.detach().to(next(layer.parameters()).dtype).requires_grad_()
            out = call(layer, given)
            out.backward(wanted.reshape(out.shape).to(out.dtype))
            weights = torch.cat([one.grad.flatten().float() for one in layer.parameters()])
            assert given.grad is not None
            results.append((out.detach().float(), given.grad.float(), weights))
        truth, *others = results
        own_error, fused_error = (
            [float((mine - true).norm() / true.norm()) for mine, true in zip(one, truth, strict=True)] for one in others
        )
        found[name] = list(zip(own_error, fused_error, strict=True))
    return found


def fused_kernels() -> Row:
    """liger-kernel's on this GPU: in bfloat16, errors not much larger than those of the layers themselves."""
    name = "fused kernels, bfloat16"
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return Row(name, "skipped", "needs a GPU and the package liger-kernel")
    errors = [pair for layer in layer_errors(liger_kernels(), torch.bfloat16, "cuda").values() for pair in layer]
    worst = max(fused / own for own, fused in errors)
    figure = f"{worst:.2f} of the error of transformers' layers, allowed {LAYER_LIMIT}; with gradients"
    advice = "set model.fused_kernels: false, and report this table"
    return judged(name, worst <= LAYER_LIMIT, figure, advice, error=worst)


def head_errors(device: torch.device, num: int, hidden: int, vocabulary: int) -> tuple[float, float]:
    """Largest relative error of the scores of the chunked head in bfloat16 against all logits in float32, and of their
    gradients. ``num`` positions, every fourth a coordinate."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num, hidden, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight_VH = (
        torch.randn(vocabulary, hidden, generator=generator)
        .mul_(hidden**-0.5)
        .to(device, torch.bfloat16)
        .requires_grad_()
    )
    coord_ids = tuple(range(vocabulary - 1000, vocabulary))
    label_N = torch.randint(vocabulary, (num,), generator=generator).to(device)
    all_N = torch.arange(num, device=device)
    slot_K = all_N[::4]
    query = HeadQuery(all_N, all_N, all_N, slot_K, num, (1.0,))

    def loss(lse_N: Any, label_logit_N: Any, mass_N: Any, slot_KB: Any) -> torch.Tensor:
        return (lse_N - label_logit_N).sum() + (lse_N - mass_N).sum() + slot_KB.softmax(-1)[:, 500].log().sum()

    scores = score_head(hidden_NH, weight_VH, query, label_N, coord_ids)
    assert scores.coord_logit_KB is not None
    ours = scores.vocab_lse_N[1.0], scores.label_logit_N, scores.coord_lse_N[1.0], scores.coord_logit_KB
    gradients = torch.autograd.grad(loss(*ours), (hidden_NH, weight_VH))
    exact = [leaf.detach().float().requires_grad_() for leaf in (hidden_NH, weight_VH)]
    logits_NV = exact[0] @ exact[1].T
    coord_NB = logits_NV[:, -1000:]
    theirs = (
        logits_NV.logsumexp(-1),
        logits_NV.gather(1, label_N[:, None])[:, 0],
        coord_NB.logsumexp(-1),
        coord_NB[slot_K],
    )
    expected = torch.autograd.grad(loss(*theirs), exact)
    return max(map(relative_error, ours, theirs)), max(map(relative_error, gradients, expected))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, by the norm of ``expected``."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    return float((found.detach().to(wide) - expected.detach().to(wide)).norm() / expected.detach().to(wide).norm())


def offload_there_and_back(device: torch.device) -> tuple[int, str | None]:
    """Offload a small model with its optimizer. Returns: bytes that were freed meanwhile, and the problem, if there is
    one. On CPUs, where offload frees nothing, its storages are moved all the same."""
    model = torch.nn.Sequential(torch.nn.Embedding(4096, 256), torch.nn.Linear(256, 4096)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [*model.parameters(), *(tensor for tensor in held_by(optimizer) if tensor.dim())]
    before = [tensor.detach().cpu().clone() for tensor in tensors]
    # DDP has its hooks on the accumulators.
    accumulators = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    offload = offload_of(model, device)
    offload.optimizer = lambda: optimizer
    with offload.away():
        left = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        with TrainerWeights(model, offload.current).full() as weights:
            read = all(tensor.device.type == "cpu" and tensor.isfinite().all() for _, tensor in weights)
    if left or not read:
        return held - left, f"{left} of {held} bytes stayed on the device, or a weight could not be read meanwhile"
    if not all(torch.equal(tensor.cpu(), value) for tensor, value in zip(tensors, before, strict=True)):
        return held, "values changed"
    if [get_gradient_edge(parameter).node for parameter in model.parameters()] != accumulators:
        return held, "gradient accumulators were replaced, so DDP would no longer exchange gradients"
    return held, None


def offload_of(model: Any, device: torch.device) -> TrainerOffload:
    if device.type == "cuda":
        return TrainerOffload(model, OFFLOAD)
    return TrainerOffload(model, OFFLOAD, stays=lambda tensor: False)


@torch.no_grad()
def packed_row_error(loaded: LoadedModel, segments: Sequence[Segment], device: torch.device) -> float:
    """Largest relative error of the logits of a packed row against those of each segment alone."""
    model: Any = loaded.model
    tower = VisionTower.from_model(model)

    def logits(chosen: Sequence[Segment]) -> torch.Tensor:
        rope_index = model.model.get_rope_index
        inputs = row_inputs(build_row(chosen), rope_index, loaded.image_token_id, loaded.attention, tower)
        return model(**to_device(inputs, device), use_cache=False).logits[0]

    together = logits(segments).split([segment.length for segment in segments])
    return max(relative_error(packed, logits([segment])) for packed, segment in zip(together, segments, strict=True))
