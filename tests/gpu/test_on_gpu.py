"""On a GPU: attention equals separate forwards, memory is freed and filled again, the host runs ahead."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coordexp.doctor.exactness import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYER_LIMIT,
    LENGTHS,
    LIMIT,
    ROW_LIMIT,
    SCORE_LIMIT,
    attention_error,
    head_errors,
    layer_errors,
    offload_there_and_back,
    packed_row_error,
)
from coordexp.modeling.attention import KERNELS, Segments, recompute_layers, varlen_runs_on
from coordexp.modeling.inputs import ON_HOST, image_arguments, to_device
from coordexp.modeling.kernels import liger_kernels
from coordexp.objective import RowObjective, RowTensors, build_pipeline
from coordexp.objective import head as head_module
from coordexp.records import PackedRow
from coordexp.targets import count_terms
from coordexp.training.rows import DeviceMetrics, PrefetchedRows, RowBuilder
from support.objective_rows import EVERYTHING, config
from support.tiny_run import gt_segments, load_tiny, row_of

# --- attention for packed rows ---

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)


def runs(name: str) -> bool:
    if name == "flash":
        return importlib.util.find_spec("flash_attn") is not None
    return name != "varlen" or varlen_runs_on(CUDA)


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    if not runs(request.param):
        pytest.skip(f"{request.param} does not run on this machine")
    yield request.param


@pytest.fixture(params=[True, False], ids=["tokens", "patches"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_forward_and_gradients_equal_the_formula(kernel: str, causal: bool) -> None:
    assert attention_error(kernel, causal, torch.bfloat16, CUDA) < LIMIT[torch.bfloat16]


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(1, heads, sum(LENGTHS), DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, device=CUDA, dtype=dtype, requires_grad=True) for shape in shapes]


def test_packed_uses_varlen_in_half_precision_and_sdpa_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("attend_varlen", "attend_each_segment"):
        monkeypatch.setattr(f"coordexp.modeling.attention.{name}", lambda *a, n=name: taken.append(n) or a[0])
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = rows(dtype)
        KERNELS["packed"](q, k, v, Segments(LENGTHS), None, 0.0)
    expected = "attend_varlen" if varlen_runs_on(CUDA) else "attend_each_segment"
    assert taken == [expected, "attend_each_segment"]


def test_a_packed_row_equals_separate_forwards(kernel: str) -> None:
    loaded = load_tiny("bfloat16", kernel)
    model: Any = loaded.model
    model.cuda()
    assert packed_row_error(loaded, gt_segments(loaded, 4), CUDA) < ROW_LIMIT[torch.bfloat16]


def test_the_head_in_bfloat16_equals_float32_logits() -> None:
    scores, gradients = head_errors(CUDA, 64, 256, 20_000)
    assert scores < SCORE_LIMIT and gradients < LIMIT[torch.bfloat16]


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


# --- fused kernels ---


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs the package liger-kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_are_as_exact_as_transformers(dtype: torch.dtype) -> None:
    found = layer_errors(liger_kernels(), dtype, "cuda")
    for layer, errors in found.items():
        for own, fused in errors:
            assert fused < 1e-5 if dtype == torch.float32 else fused < LAYER_LIMIT * own < 0.1, layer


# --- memory ---


def test_device_memory_is_freed_and_restored_bit_for_bit() -> None:
    freed, problem = offload_there_and_back(CUDA)
    assert problem is None and freed > 0


# --- rows in pinned memory, and one synchronisation per row ---


@contextmanager
def no_waits(mode: str = "error") -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def objective_of(loaded: Any) -> RowObjective:
    return RowObjective(build_pipeline(config(**EVERYTHING)), tuple(loaded.vocab.coord_token_ids))


def builder(loaded: Any) -> Callable[[PackedRow], RowTensors]:
    device = torch.device("cuda", torch.cuda.current_device())
    build = RowBuilder.from_model(loaded, device)
    return lambda row: build(row, objective_of(loaded))


@pytest.mark.parametrize("scattered", [False, True], ids=["coordinate ids in a row", "coordinate ids anywhere"])
def test_an_objective_synchronises_once_per_row(scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, every module's loss and diagnostics, and backward, from hidden states on."""
    loaded = load_tiny()
    segments = gt_segments(loaded, 4)
    built = builder(loaded)(row_of(segments))
    objective, device = objective_of(loaded), torch.device("cuda", torch.cuda.current_device())
    ids = tuple(reversed(objective.coord_ids)) if scattered else objective.coord_ids
    totals = count_terms(segment.target for segment in segments)
    vocabulary = loaded.model.get_output_embeddings().weight.shape[0]
    weight_VH = torch.randn(vocabulary, 64, device=device, requires_grad=True)
    hidden_NH = torch.randn(len(built.supervision.position_N), 64, device=device, requires_grad=True)
    looks: list[int] = []
    look = head_module.read_any

    def counted(broken_N: torch.Tensor) -> bool:
        looks.append(1)
        with no_waits("default"):
            return look(broken_N)

    monkeypatch.setattr(head_module, "read_any", counted)
    metrics = DeviceMetrics()

    def row() -> None:
        row = built.to(device)
        scores = [head_module.score_head(hidden_NH, weight_VH, row.queries[0], row.supervision.label_N, ids)]
        result = objective.result(row.supervision, scores, totals)
        metrics.add(result.terms, scores, row.queries)
        result.loss.backward()

    row()  # creates everything that is created once
    looks.clear()
    with no_waits():
        row()
        row()
    assert len(looks) == 2
    assert len(metrics.sync()) == 3


def test_the_vision_tower_never_synchronises() -> None:
    """Forward and backward of several images of several sizes, in bfloat16."""
    loaded = load_tiny("bfloat16")
    model: Any = loaded.model
    model.cuda()
    row = builder(loaded)(row_of(gt_segments(loaded, 4))).inputs

    def features() -> None:
        inputs = to_device(row, torch.device("cuda", torch.cuda.current_device()))
        given = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], **image_arguments(inputs)
        )
        torch.cat(
            [*given.pooler_output, *(one for parts in given.deepstack_features for one in parts)]
        ).sum().backward()

    features()  # creates everything that is created once
    with no_waits():
        features()
        features()


def test_a_row_waits_for_nothing_and_recomputed_layers_change_no_gradient() -> None:
    """Images included, in bfloat16; layers keep their attention while others are recomputed."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for every in (0, 1, 2):
        loaded = load_tiny("bfloat16")
        model: Any = loaded.model
        model.cuda().train()
        recompute_layers(model, every)
        row = builder(loaded)(row_of(gt_segments(loaded, 4))).inputs

        def step(model: Any = model, row: Any = row) -> None:
            inputs = to_device(row, torch.device("cuda", torch.cuda.current_device()))
            model.model(**inputs, use_cache=False)[0].square().sum().backward()

        step()  # creates everything that is created once
        model.zero_grad()
        with no_waits():
            step()
        found[every] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for every in (1, 2):
        for name, gradient in found[0].items():  # attention's backward adds in no fixed order
            assert (found[every][name] - gradient).norm() <= 0.02 * gradient.norm(), name


def test_rows_are_pinned_and_unchanged() -> None:
    loaded = load_tiny()
    build, rows = builder(loaded), [row_of([segment]) for segment in gt_segments(loaded, 3)]
    with PrefetchedRows(build, rows) as prefetched:
        for row, built in zip(rows, prefetched, strict=True):
            alone = build(row)
            for name, value in built.inputs.items():
                if isinstance(value, torch.Tensor):
                    assert value.is_pinned() == (name not in ON_HOST and value.numel() > 0), name
                    assert torch.equal(value, alone.inputs[name]), name
            assert built.supervision.position_N.is_pinned() and built.queries[0].vocab_in_N_U.is_pinned()
            assert torch.equal(built.supervision.position_N.cuda().cpu(), alone.supervision.position_N)
