"""The main thread and rows: built by itself when their turn comes, or waited for, one ahead. For `trainer.py`.

Two measurements. A tiny model trains on real rows both ways, which must give one loss. And rows of full size (12,000
tokens, ten images in a real model's patches, bfloat16) go to a device that is played: it computes ``COMPUTE_S`` a row,
and the main thread sleeps meanwhile, as it does when it waits for a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from trainer_forms import IMAGE, PIPELINE, build_model, draw_segments, pack

from coordexp.config.objective import PipelineConfig
from coordexp.modeling.inputs import VisionTower
from coordexp.objective import RowObjective, RowTensors, build_pipeline
from coordexp.packing import build_row
from coordexp.records import NUM_BINS, PackedRow
from coordexp.targets import count_terms
from coordexp.training.rows import PrefetchedRows, RowBuilder

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
    vocabulary = model.config.text_config.vocab_size
    pipeline = build_pipeline(PipelineConfig.model_validate(PIPELINE))
    objective = RowObjective(pipeline, tuple(range(vocabulary - NUM_BINS, vocabulary)))

    def learn(built: RowTensors) -> float:
        row = built.to(device)
        scores = model(forward_fn=partial(objective.scores, row=row))
        loss = objective.result(row.supervision, scores, totals).loss
        loss.backward()
        return loss.item()

    def sleep(built: RowTensors) -> float:
        built.to(device)
        time.sleep(COMPUTE_S)
        return 0.0

    tower = VisionTower.from_model(model)
    builder = RowBuilder(model.model.get_rope_index, tower, IMAGE, "packed", device)

    def build(row: PackedRow) -> RowTensors:
        return builder(row, objective)

    full = build_row(draw_segments([options.full_row // 10] * 10, sizes, answer=1 / 6))
    return {
        "trained": _both_ways(build, packed, learn, options.repeats),
        "played": _both_ways(build, [full] * FULL_ROWS, sleep, options.repeats),
    }


Build = Callable[[PackedRow], RowTensors]


def _both_ways(
    build: Build, packed: Sequence[PackedRow], compute: Callable[[RowTensors], float], repeats: int
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
    build: Build, packed: Sequence[PackedRow], compute: Callable[[RowTensors], float], ahead: bool
) -> RowSeconds:
    """Every row in its order, built when its turn comes or (``ahead``) in a second thread while the one before it
    computes, as the trainer does."""
    started = time.perf_counter()
    waited = total = 0.0
    with PrefetchedRows(build, packed) if ahead else nullcontext(map(build, packed)) as rows:
        rows = iter(rows)
        for _ in packed:
            asked = time.perf_counter()
            built = next(rows)
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
