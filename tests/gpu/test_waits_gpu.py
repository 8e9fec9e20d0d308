"""On a GPU the host runs ahead: rows are in pinned memory, and an objective synchronises once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coordexp.modeling.inputs import ON_HOST, image_arguments, to_device
from coordexp.objective import RowObjective, RowTensors, build_pipeline
from coordexp.objective import head as head_module
from coordexp.records import PackedRow
from coordexp.targets import count_terms
from coordexp.training.rows import DeviceMetrics, PrefetchedRows, RowBuilder
from support.objective_rows import EVERYTHING, config
from support.tiny_run import gt_segments, load_tiny, row_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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
    build = RowBuilder.from_model(loaded, device, torch.bfloat16)
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
