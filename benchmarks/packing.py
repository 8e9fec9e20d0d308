"""Is choosing a packed row's segments worth its time?

Compares `select_segments` with oldest-first greedy (FIFO) and with plain `binpacking.to_constant_volume` (its fullest
bin), in one run: fill and time of a single choice from a pool, and fill and waiting time over a stream of steps with a
carry buffer, where a selector that leaves awkward segments behind pays later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import binpacking
import numpy as np
from reporting import machine, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

from coordexp.packing import oldest_first, select_segments

Selector = Callable[[list[int], int], list[int]]


def plain_binpacking(lengths: list[int], capacity: int) -> list[int]:
    """The fullest bin, without regard to waiting times."""
    # A dictionary's bins are dictionaries, though they are declared otherwise.
    bins = cast("list[dict[int, int]]", binpacking.to_constant_volume(dict(enumerate(lengths)), capacity))
    return sorted(max(bins, key=lambda chosen: sum(chosen.values())))


SELECTORS: dict[str, Selector] = {
    "select_segments": select_segments,
    "oldest-first": oldest_first,
    "binpacking": plain_binpacking,
}


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--segments", type=positive_list, default=[16, 64, 256, 512], help="pool sizes [16,64,256,512]")
    flags.add_argument("--capacity", type=positive_list, default=[4096, 16384], help="tokens per row [4096,16384]")
    flags.add_argument("--trials", type=positive, default=20, help="pools per pool size [20]")
    flags.add_argument("--stream-steps", type=positive, default=200, help="rows of the stream [200]")
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    print_machine(console, where, trials=options.trials, stream_steps=options.stream_steps, threads=threads)
    pools = [one_choice(count, capacity, options.trials) for capacity in options.capacity for count in options.segments]
    console.print(_pool_table(pools))
    streams = [stream(capacity, options.stream_steps) for capacity in options.capacity]
    console.print(_stream_table(streams))
    console.print("  waits: most rows that any segment waited; ours, FIFO, binpacking", style="dim", highlight=False)
    results = {"pool": pools, "stream": streams}
    write_json(options.json, "packing", where, {**vars(options), "threads": threads}, results)


def draw_lengths(rng: np.random.Generator, count: int, capacity: int) -> list[int]:
    """Log-normal lengths around an eighth of the capacity: many short answers, a long tail."""
    lengths = rng.lognormal(np.log(capacity / 8), 0.6, count).astype(int)
    return np.clip(lengths, 16, capacity).tolist()


def one_choice(count: int, capacity: int, trials: int) -> dict[str, Any]:
    """Mean fill and median time of one choice from a pool of ``count`` segments, per selector."""
    rng = np.random.default_rng([count, capacity])
    pools = [draw_lengths(rng, count, capacity) for _ in range(trials)]
    figures: dict[str, dict[str, float]] = {}
    for name, select in SELECTORS.items():
        select(pools[0], capacity)
        fills, seconds = [], []
        for pool in pools:
            started = time.perf_counter()
            chosen = select(pool, capacity)
            seconds.append(time.perf_counter() - started)
            fills.append(_fill(pool, chosen, capacity))
        figures[name] = {"fill": statistics.mean(fills), "ms": 1000 * statistics.median(seconds)}
    return {"segments": count, "capacity": capacity, "selectors": figures, "ratios": _ratios(figures)}


def stream(capacity: int, steps: int) -> dict[str, Any]:
    """A carry buffer over ``steps`` rows. Each step, segments arrive until at least two rows' tokens wait, then one row
    is taken. ``max_wait``: most steps that any segment waited, those still waiting at the end included."""
    figures: dict[str, dict[str, float]] = {}
    for name, select in SELECTORS.items():
        rng = np.random.default_rng(capacity)
        waiting: list[tuple[int, int]] = []  # (length, step of arrival)
        fills, seconds, waited = [], 0.0, 0
        for step in range(steps):
            while sum(length for length, _ in waiting) < 2 * capacity:
                waiting.append((draw_lengths(rng, 1, capacity)[0], step))
            lengths = [length for length, _ in waiting]
            started = time.perf_counter()
            chosen = select(lengths, capacity)
            seconds += time.perf_counter() - started
            fills.append(_fill(lengths, chosen, capacity))
            waited = max([waited, *(step - waiting[i][1] for i in chosen)])
            leaving = set(chosen)
            waiting = [segment for i, segment in enumerate(waiting) if i not in leaving]
        waited = max([waited, *(steps - arrived for _, arrived in waiting)])
        figures[name] = {"fill": statistics.mean(fills), "ms": 1000 * seconds / steps, "max_wait": waited}
    return {"capacity": capacity, "steps": steps, "selectors": figures, "ratios": _ratios(figures)}


def _fill(lengths: Sequence[int], chosen: Sequence[int], capacity: int) -> float:
    total = sum(lengths[i] for i in chosen)
    assert total <= capacity, "a selector overfilled the row"
    return total / capacity


def _ratios(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Fill and time of ``select_segments`` as multiples of each other selector's."""
    ours = figures["select_segments"]
    return {
        name: {"fill": ours["fill"] / found["fill"], "time": ours["ms"] / found["ms"]}
        for name, found in figures.items()
        if name != "select_segments"
    }


def _pool_table(pools: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="one choice from a pool of segments", title_justify="left")
    for name in ("row", "pool", *_COLUMNS):
        table.add_column(name, justify="right")
    for pool in pools:
        table.add_row(f"{pool['capacity']:,}", f"{pool['segments']:,}", *_cells(pool))
    return table


def _stream_table(streams: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="a carry buffer over many rows", title_justify="left")
    for name in ("row", *_COLUMNS, "waits"):
        table.add_column(name, justify="right")
    for run in streams:
        waits = ", ".join(f"{run['selectors'][name]['max_wait']}" for name in SELECTORS)
        table.add_row(f"{run['capacity']:,}", *_cells(run), waits)
    return table


_COLUMNS = ("fill", "ms", "fill ÷ FIFO", "fill ÷ binp.", "time ÷ FIFO", "time ÷ binp.")


def _cells(case: dict[str, Any]) -> list[str]:
    ours, ratios = case["selectors"]["select_segments"], case["ratios"]
    return [
        f"{ours['fill']:.4f}",
        f"{ours['ms']:.3f}",
        *(f"{ratios[name]['fill']:.3f}" for name in ("oldest-first", "binpacking")),
        *(f"{ratios[name]['time']:.1f}" for name in ("oldest-first", "binpacking")),
    ]


if __name__ == "__main__":
    main()
