"""The main thread and rows: built by itself when their turn comes, or waited for, one ahead. For `learner.py`.

Two measurements. A tiny model trains on real rows both ways, which must give one loss. And rows of full size (12,000
tokens, ten images in a real model's patches, bfloat16) go to a device that is played: it computes ``COMPUTE_S`` a row,
and the main thread sleeps meanwhile, as it does when it waits for a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from learner_forms import IMAGE, PIPELINE, build_model, draw_segments, pack
from rich.table import Table

from coordexp.config.objective import PipelineConfig
from coordexp.modeling.inputs import VisionTower, to_device
from coordexp.objective import build_pipeline
from coordexp.objective.supervision import tensors_to_device
from coordexp.packing import build_row
from coordexp.records import NUM_BINS, PackedRow
from coordexp.targets import count_terms
from coordexp.training.objective_step import TeacherForcing
from coordexp.training.row_prefetch import RowBuilder, RowPrefetch

COMPUTE_S = 0.3  # about what a 2B model needs for such a row
FULL_ROWS = 8


@dataclass(frozen=True, slots=True)
class RowSeconds:
    """Seconds of a pass over rows; of them, those in which the main thread built a row or waited for one; the loss."""

    total: float
    without_work: float
    loss: float


def rows(sizes: Any, device: torch.device, options: Any) -> dict[str, Any]:
    """Both measurements: medians of passes that alternate, so that both ways see one machine."""
    sizes = replace(sizes, patch=16)
    model = build_model(sizes, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    lengths = np.random.default_rng(2).integers(options.lengths[0], options.lengths[-1] + 1, options.samples).tolist()
    segments = draw_segments(lengths, sizes)
    totals = count_terms(segment.target for segment in segments)
    packed = [build_row(row) for row in pack(segments, max(options.capacity, *(one.length for one in segments)))]
    build = _builder(model, model.dtype, device)

    def learn(built: dict[str, Any]) -> float:
        supervision, queries = tensors_to_device((built["supervision"], built["queries"]), device)
        inputs = to_device(built["model"], device)
        scores = model(forward_fn=build.objective.forward_fn(inputs, supervision, queries))
        loss = build.objective.result(supervision, scores, totals).loss
        loss.backward()
        return loss.item()

    def sleep(built: dict[str, Any]) -> float:
        to_device(built["model"], device)
        time.sleep(COMPUTE_S)
        return 0.0

    full = build_row(draw_segments([options.full_row // 10] * 10, sizes, answer=1 / 6))
    return {
        "trained": _both_ways(build, packed, learn, options.repeats),
        "played": _both_ways(_builder(model, torch.bfloat16, device), [full] * FULL_ROWS, sleep, options.repeats),
    }


def _builder(model: Any, dtype: torch.dtype, device: torch.device) -> RowBuilder:
    vocabulary = model.config.text_config.vocab_size
    pipeline = build_pipeline(PipelineConfig.model_validate(PIPELINE))
    objective = TeacherForcing(pipeline, tuple(range(vocabulary - NUM_BINS, vocabulary)))
    rope_index, tower = model.model.get_rope_index, VisionTower.from_model(model)
    return RowBuilder(rope_index, tower, IMAGE, "packed", dtype, objective, device)


def _both_ways(
    build: RowBuilder, packed: Sequence[PackedRow], compute: Callable[[dict[str, Any]], float], repeats: int
) -> dict[str, Any]:
    passes: dict[bool, list[RowSeconds]] = {False: [], True: []}
    for _ in range(repeats):
        for ahead, found in passes.items():
            found.append(go_through(build, packed, compute, ahead))
    losses = [one.loss for found in passes.values() for one in found]
    assert max(losses) - min(losses) <= 1e-5 * max(losses), "rows built ahead are not the same rows"
    seconds = {ahead: statistics.median(one.total for one in found) for ahead, found in passes.items()}
    share = {ahead: statistics.median(one.without_work / one.total for one in found) for ahead, found in passes.items()}
    pixels = sum(one.model_inputs["pixel_values"].nbytes for row in packed for one in row.segments)
    return {
        "rows": len(packed),
        "row_mb": pixels / len(packed) / 2**20,
        "in_turn_s": seconds[False],
        "ahead_s": seconds[True],
        "in_turn_share": share[False],
        "ahead_share": share[True],
        "speedup": seconds[False] / seconds[True],
    }


def go_through(
    build: RowBuilder, packed: Sequence[PackedRow], compute: Callable[[dict[str, Any]], float], ahead: bool
) -> RowSeconds:
    """Every row in its order, built when its turn comes or (``ahead``) in a second thread while the one before it
    computes, as the trainer does."""
    started = time.perf_counter()
    prefetch = RowPrefetch(build, [packed]) if ahead else None
    waited = total = 0.0
    for row in packed:
        asked = time.perf_counter()
        built = build(row) if prefetch is None else prefetch.take()
        waited += time.perf_counter() - asked
        total += compute(built)
    return RowSeconds(time.perf_counter() - started, waited, total)


def rows_table(results: dict[str, Any]) -> Table:
    """A line for each measurement."""
    table = Table(title="rows: the main thread's share without work", title_justify="left")
    for name in ("", "MB of pixels a row", "building them itself", "waiting, built one ahead", "faster ×"):
        table.add_column(name, justify="right" if name else "left")
    says = {"trained": "a tiny model trains", "played": f"a device that computes {COMPUTE_S} s a row, played"}
    for name, found in results.items():
        shares = (f"{found[f'{way}_share']:.1%}" for way in ("in_turn", "ahead"))
        table.add_row(says[name], f"{found['row_mb']:.0f}", *shares, f"{found['speedup']:.2f}")
    return table
