"""The cost of a training step, and the savings by packing and the chunked head.

Four questions, each with its ratios measured in the same run. The objective: softCE, W1 and the coordinate gate at
coordinate positions over the whole vocabulary, forward and backward, from hidden states to gradients of hidden states
and head: the chunked head against all the logits in float32 with the gate taken from them (five buffers of vocabulary
size). Training: samples of mixed lengths through a whole model, packed rows with the chunked head against padded
batches with all the logits, and against packed rows with all the logits. Rows: the main thread's idle share where a
second thread builds them one ahead, against the share that building them itself takes, with pixels in a real model's
patches. Packing: fill of the rows, time of a choice.
On a CPU a tiny model with a real vocabulary; on a GPU random weights in the sizes of Qwen3-VL 2B or 4B, with MFU.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import (
    machine,
    parser,
    peak_flops,
    positive,
    positive_list,
    print_machine,
    set_threads,
    write_json,
)
from rich.console import Console
from rich.table import Table

PARTS = ("objective", "training", "rows", "packing")


def main(argv: Sequence[str] | None = None) -> None:
    from coordexp.cpu_wheels import ensure_torchvision

    ensure_torchvision()
    from trainer_forms import GPU_SIZES, TINY
    from trainer_rows import rows, rows_table

    flags = parser(__doc__)
    flags.add_argument("--positions", type=positive, default=1000, help="coordinate positions of the objective [1000]")
    flags.add_argument("--hidden", type=positive_list, help="hidden sizes of the objective [64,192; GPU: 2048]")
    flags.add_argument("--vocabulary", type=positive, default=152_670, help="tokens [152670]")
    flags.add_argument("--size", choices=GPU_SIZES, default="2B", help="model on a GPU; without one it is tiny [2B]")
    flags.add_argument("--samples", type=positive, help="of the training part [24; GPU: 64]")
    flags.add_argument("--lengths", type=positive_list, help="shortest,longest sample [40,400; GPU: 100,3000]")
    flags.add_argument("--capacity", type=positive, help="tokens of a packed row [1200; GPU: 12000]")
    flags.add_argument("--batch", type=positive, default=4, help="samples of a padded batch [4]")
    flags.add_argument("--full-row", type=positive, default=12_000, help="tokens of a row of full size [12000]")
    flags.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure [all]")
    flags.add_argument("--repeats", type=positive, default=3, help="timed runs per figure; the median counts [3]")
    options = flags.parse_args(argv)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    sizes = replace(GPU_SIZES[options.size] if gpu else TINY, vocabulary=options.vocabulary)
    options.hidden = options.hidden or ([2048] if gpu else [64, 192])
    options.samples = options.samples or (64 if gpu else 24)
    options.lengths = options.lengths or ([100, 3000] if gpu else [40, 400])
    options.capacity = options.capacity or (12_000 if gpu else 1200)
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    model_name = options.size if gpu else "tiny"
    print_machine(console, where, model=model_name, vocabulary=options.vocabulary, threads=threads)
    parts: dict[str, Callable[[], Any]] = {
        "objective": lambda: [
            objective(options.positions, size, options.vocabulary, device, options) for size in options.hidden
        ],
        "training": lambda: training(sizes, device, options),
        "rows": lambda: rows(sizes, device, options),
        "packing": packing,
    }
    shown: dict[str, Callable[[Any], Any]] = {
        "objective": lambda found: _objective_table(found, options),
        "training": _training_table,
        "rows": rows_table,
        "packing": _packing_line,
    }
    results = {name: parts[name]() for name in options.parts}
    for name, found in results.items():
        console.print(shown[name](found), highlight=False)
    write_json(options.json, "trainer", where, {**vars(options), "threads": threads, "model": model_name}, results)


# -- objective -------------------------------------------------------------------------------------------------------


def objective(positions: int, hidden: int, vocabulary: int, device: torch.device, options: Any) -> dict[str, Any]:
    """Seconds and peak extra memory of each form, and of the head alone: three products, without any loss."""
    from trainer_forms import naive_gate_losses

    from coordexp.objective import HeadQuery, coord_math, score_head
    from coordexp.objective.head import CHUNK_LOGITS_CPU

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(positions, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(device, dtype).requires_grad_()
    bins = torch.randint(0, 1000, (positions,), generator=generator).to(device)
    coord_ids = range(vocabulary - 1000, vocabulary)
    label = bins + coord_ids[0]
    every = torch.arange(positions, device=device)
    query = HeadQuery(every, every, every[:0], every, positions, (1.0,))

    def chunked() -> float:
        scores = score_head(rows, weight, query, label, coord_ids)
        assert scores.coord_logit_KB is not None
        coord_lse = torch.logsumexp(scores.coord_logit_KB, dim=-1)
        log_p = scores.coord_logit_KB - coord_lse[:, None]
        q = coord_math.gaussian_targets(bins.to(log_p.dtype), 1000, 2.0, None)
        loss = coord_math.soft_cross_entropy(log_p, q) + coord_math.wasserstein1(log_p.exp(), q)
        loss = (loss + coord_math.coord_gate_of_lse(scores.vocab_lse_N[1.0], coord_lse)).mean()
        loss.backward()
        return loss.item()

    def naive() -> float:
        logits = (rows @ weight.T).float()
        loss = naive_gate_losses(logits, bins, slice(vocabulary - 1000, None)) / positions
        loss.backward()
        return loss.item()

    def head_alone() -> float:
        """The head's three products at their best: in the same chunks, with nothing of a loss between them."""
        with torch.no_grad():
            d_rows, d_weight = torch.zeros_like(rows), torch.empty_like(weight)
            size = max(256, CHUNK_LOGITS_CPU // positions) if device.type == "cpu" else vocabulary
            for start in range(0, vocabulary, size):
                part = weight[start : start + size]
                z = torch.mm(rows, part.t())
                d_rows += z @ part
                d_weight[start : start + size] = z.t() @ rows
        return 0.0

    def measured(run: Callable[[], float]) -> dict[str, float]:
        return _measure(run, [rows, weight], device, options.repeats)

    found = {"chunked": measured(chunked), "naive": measured(naive), "head_alone": measured(head_alone)}
    leaf = (rows @ weight.T).float().detach().requires_grad_()

    def naive_from_logits() -> float:
        leaf.grad = None
        loss = naive_gate_losses(leaf, bins, slice(vocabulary - 1000, None)) / positions
        loss.backward()
        return loss.item()

    found["naive_from_logits"] = measured(naive_from_logits)
    assert abs(found["chunked"]["value"] - found["naive"]["value"]) < 1e-2 * abs(found["naive"]["value"])
    beyond = found["chunked"]["seconds"] - found["head_alone"]["seconds"]
    return {
        "positions": positions,
        "hidden": hidden,
        "vocabulary": vocabulary,
        "forms": found,
        "speedup_with_head": found["naive"]["seconds"] / found["chunked"]["seconds"],
        "chunked_beyond_head_s": beyond,
        # On a busy machine the difference of two timings may be nothing at all.
        "speedup_beyond_head": found["naive_from_logits"]["seconds"] / beyond if beyond > 0 else None,
        "memory_ratio": found["chunked"]["extra_mb"] / max(1e-9, found["naive"]["extra_mb"]),
    }


# -- training --------------------------------------------------------------------------------------------------------


def training(sizes: Any, device: torch.device, options: Any) -> dict[str, Any]:
    """One optimizer step's forward and backward over all samples, in each form: tokens/s, peak memory, MFU."""
    from trainer_forms import FORMS, build_model, draw_segments, flops_per_step, pack

    from coordexp.targets import count_terms

    model = build_model(sizes, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rng = np.random.default_rng(1)
    low, high = options.lengths[0], options.lengths[-1]
    lengths = rng.integers(low, high + 1, options.samples).tolist()
    segments = draw_segments(lengths, sizes)
    capacity = max(options.capacity, *(segment.length for segment in segments))
    totals = count_terms(segment.target for segment in segments)
    rows = pack(segments, capacity)
    batches = [segments[start : start + options.batch] for start in range(0, len(segments), options.batch)]
    tokens = sum(segment.length for segment in segments)
    scored = totals["struct_ce"] + totals["desc_ce"] + totals["coord"]
    needed = flops_per_step(model, segments, scored)
    peak = peak_flops(torch.cuda.get_device_name() if device.type == "cuda" else None)
    found: dict[str, Any] = {}
    for name, form in FORMS.items():
        parts = batches if name == "padded" else rows

        def step(form: Any = form, parts: Any = parts) -> float:
            total = 0.0
            for part in parts:
                loss = form(model, part, totals)
                loss.backward()
                total += loss.item()
            return total

        try:
            figures = _measure(step, list(model.parameters()), device, options.repeats)
        except torch.OutOfMemoryError:
            if name == "ours":
                raise
            found[name] = None  # a peer that does not fit is a result too
            continue
        found[name] = {
            **figures,
            "tokens_per_s": tokens / figures["seconds"],
            "mfu": None if peak is None else needed / figures["seconds"] / peak,
        }
    values = [figures["value"] for figures in found.values() if figures]
    assert max(values) - min(values) < 2e-2 * max(values), f"the forms disagree: {values}"
    return {
        "tokens": tokens,
        "samples": len(segments),
        "scored_positions": scored,
        "padding_share": 1 - tokens / sum(len(part) * max(s.length for s in part) for part in batches),
        "fill": tokens / (capacity * len(rows)),
        "forms": found,
        "speedup": {name: figures["seconds"] / found["ours"]["seconds"] for name, figures in found.items() if figures},
        "memory_ratio": {
            name: found["ours"]["extra_mb"] / max(1e-9, figures["extra_mb"])
            for name, figures in found.items()
            if figures
        },
    }


def packing(capacity: int = 12_000, count: int = 256, trials: int = 20, rows: int = 200) -> dict[str, float]:
    """Segments of 100–3000 tokens: time of a choice from ``count``, and fill of a stream's rows while 64 wait."""
    from coordexp.packing import select_segments

    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(trials):
        lengths = rng.integers(100, 3001, count).tolist()
        started = time.perf_counter()
        select_segments(lengths, capacity)
        seconds.append(time.perf_counter() - started)
    # A stream, as in training: later samples replace those that a row has taken.
    waiting, fills = rng.integers(100, 3001, 64).tolist(), []
    for _ in range(rows):
        chosen = set(select_segments(waiting, capacity))
        fills.append(sum(waiting[index] for index in chosen) / capacity)
        waiting = [length for index, length in enumerate(waiting) if index not in chosen]
        waiting += rng.integers(100, 3001, len(chosen)).tolist()
    return {"rows": rows, "fill": statistics.mean(fills), "ms": 1000 * statistics.median(seconds)}


# -- measuring -------------------------------------------------------------------------------------------------------


def _measure(
    run: Callable[[], float], leaves: Sequence[torch.Tensor], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median seconds, and the peak memory beyond that before, without the gradients of the leaves."""
    value, seconds, extra = 0.0, [], 0.0
    for _ in range(repeats):
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        before = _reset_peak(device)
        started = time.perf_counter()
        value = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        extra = max(extra, _peak(device) - before)
    for leaf in leaves:
        leaf.grad = None
    return {"seconds": statistics.median(seconds), "extra_mb": extra / 2**20, "value": value}


def _reset_peak(device: torch.device) -> float:
    """Forget the peak so far; returns the bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory would hide what is taken next
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return float("nan")
    return _status("VmRSS")


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return float("nan")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), float("nan"))


# -- tables ----------------------------------------------------------------------------------------------------------


def _objective_table(results: Sequence[dict[str, Any]], options: Any) -> Table:
    title = f"objective at {options.positions} coordinate positions × {options.vocabulary}, forward and backward"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in results:
        table.add_column(f"hidden {row['hidden']}", justify="right")
    says = {
        "chunked": "head and objective, chunked",
        "naive": "head and objective, all logits",
        "head_alone": "head alone: three products",
        "naive_from_logits": "objective alone, all logits",
    }
    for name, what in says.items():
        table.add_row(f"{what}, s", *(f"{row['forms'][name]['seconds']:.3f}" for row in results))
    for name in ("chunked", "naive"):
        table.add_row(f"{says[name]}, extra MB", *(f"{row['forms'][name]['extra_mb']:,.0f}" for row in results))
    table.add_row("chunked is faster, with the head ×", *(f"{row['speedup_with_head']:.1f}" for row in results))
    beyond = (row["speedup_beyond_head"] for row in results)
    table.add_row("chunked is faster, beyond the head ×", *("?" if x is None else f"{x:.1f}" for x in beyond))
    table.add_row("chunked's extra memory", *(f"{row['memory_ratio']:.1%}" for row in results))
    return table


def _training_table(results: dict[str, Any]) -> Table:
    title = (
        f"{results['samples']} samples, {results['tokens']} tokens: padding {results['padding_share']:.0%} of a padded "
        f"batch, rows filled to {results['fill']:.3f}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("form", "seconds", "tokens/s", "peak extra MB", "MFU", "ours is faster ×", "our memory"):
        table.add_column(name, justify="left" if name == "form" else "right")
    says = {"ours": "packed, chunked head", "padded": "padded, all logits", "full": "packed, all logits"}
    for name, figures in results["forms"].items():
        if figures is None:
            table.add_row(says[name], "out of memory")
            continue
        mfu = "" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
        ratios = [f"{results['speedup'][name]:.2f}", f"{results['memory_ratio'][name]:.1%}"]
        row = [f"{figures['seconds']:.2f}", f"{figures['tokens_per_s']:,.0f}", f"{figures['extra_mb']:,.0f}", mfu]
        table.add_row(says[name], *row, *ratios)
    return table


def _packing_line(packed: dict[str, float]) -> str:
    return (
        f"packing, segments of 100–3000 tokens in rows of 12,000: {packed['ms']:.2f} ms to choose from 256; "
        f"fill {packed['fill']:.4f} over {packed['rows']} rows while 64 wait"
    )


if __name__ == "__main__":
    main()
