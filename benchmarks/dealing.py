"""Who answers what: is the plan that deals requests to rollout servers ever worse than dealing each micro-step alone?

Counts, without any server, over 1-8 trainer ranks, 1-8 servers with even and uneven numbers of devices, batch sizes of
decoding, and steps of small and large micro-steps. A *wave* is the time in which every device decodes once as many
sequences as `decode_batch_size` lets it; each rank has at most `floor(decode_batch_size * S / W)` requests in flight.

- `planned`: what `plan_calls` deals: the window's requests, in batches as large as a rank may have in flight, to the
  places that `server_slots` gives the rank.
- `each alone`: every rank deals every micro-step by itself, `ceil(n * s / S)` to the next server. Its waves are those
  of ranks that know of each other and never wait without need, a lower bound: real ranks do not know of each other,
  and then a device gets more than `decode_batch_size` at once (`over`: the worst multiple).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

from coordexp.rollouts.chunking import chunk_size, plan_calls, server_slots, split_requests

DECODE_BATCH_SIZES = (1, 2, 4, 8, 16)
MICRO_STEPS = tuple(itertools.product((1, 2, 4, 8), (1, 2, 3, 4, 8)))  # how many, and of how many samples


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=positive, default=8, help="most trainer ranks [8]")
    flags.add_argument("--servers", type=positive, default=8, help="most servers [8]")
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    print_machine(console, where, ranks=options.ranks, servers=options.servers, threads=threads)
    rows = [compare(ranks, options.servers) for ranks in range(1, options.ranks + 1)]
    console.print(_table(rows))
    write_json(options.json, "dealing", where, {**vars(options), "threads": threads}, rows)


def compare(ranks: int, most_servers: int) -> dict[str, Any]:
    """Both ways for this number of ranks, over everything else."""
    row = {"ranks": ranks, "cases": 0, "planned_more_waves": 0, "alone_more_waves": 0, "worst_waves_ratio": 1.0}
    over, planned_over, planned_waves, alone_waves = 1.0, 1.0, 0, 0
    for devices, decode, (steps, samples) in itertools.product(worlds(most_servers), DECODE_BATCH_SIZES, MICRO_STEPS):
        if decode * sum(devices) < ranks:
            continue  # refused when training starts
        rounds = [samples] * steps
        planned, load = plan(rounds, devices, decode, ranks)
        alone, alone_load = each_alone(rounds, devices, decode, ranks)
        row["cases"] += 1
        row["planned_more_waves"] += planned > alone
        row["alone_more_waves"] += alone > planned
        row["worst_waves_ratio"] = max(row["worst_waves_ratio"], alone / planned)
        planned_waves, alone_waves = planned_waves + planned, alone_waves + alone
        over, planned_over = max(over, alone_load), max(planned_over, load)
    return row | {"mean_waves_ratio": alone_waves / planned_waves, "planned_over": planned_over, "alone_over": over}


def worlds(most_servers: int) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of 1 to ``most_servers`` servers: even, uneven, the largest first, last, and in between."""
    patterns = ((1,), (2,), (8,), (2, 1), (1, 2, 3, 4), (4, 3, 2, 1), (8, 1, 1, 1), (1, 1, 1, 8), (1, 8, 4, 2))
    seen = {
        tuple(itertools.islice(itertools.cycle(p), count)) for p in patterns for count in range(1, most_servers + 1)
    }
    yield from sorted(seen)


def plan(rounds: Sequence[int], devices: Sequence[int], decode: int, ranks: int) -> tuple[int, float]:
    """(waves, most sequences on a device at once as a multiple of ``decode``) of the plan: every batch is one wave."""
    waves, most = 0, 0.0
    batches = [plan_calls(rounds, server_slots(decode, devices, ranks, rank)) for rank in range(ranks)]
    for together in itertools.zip_longest(*batches, fillvalue=[]):
        load = [0] * len(devices)
        for call in itertools.chain.from_iterable(together):
            load[call.server] += len(call.indices)
        waves += 1
        most = max(most, *(held / (decode * size) for held, size in zip(load, devices, strict=True)))
    return waves, most


def each_alone(rounds: Sequence[int], devices: Sequence[int], decode: int, ranks: int) -> tuple[int, float]:
    """The same of every micro-step dealt alone, its waves a lower bound."""
    chunk = chunk_size(decode, devices, ranks)
    dealt = [[len(part) for part in split_requests(size, devices)] for size in rounds]
    load = [ranks * sum(parts) for parts in zip(*dealt, strict=True)]
    busiest = max(-(-held // (decode * size)) for held, size in zip(load, devices, strict=True))
    at_once = [0] * len(devices)
    room = chunk
    for parts in dealt:  # the first requests that a rank has in flight
        for server, part in enumerate(parts):
            taken = min(room, part)
            at_once[server] += taken
            room -= taken
    over = max(ranks * held / (decode * size) for held, size in zip(at_once, devices, strict=True))
    return max(busiest, -(-sum(rounds) // chunk)), over


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="waves, and the most that a device holds at once", title_justify="left")
    for name in ("ranks", "cases", "planned slower", "alone slower", "mean ×", "worst ×", "planned over", "alone over"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(f"{row[key]:,}" for key in ("ranks", "cases", "planned_more_waves", "alone_more_waves")),
            *(f"{row[key]:.2f}" for key in ("mean_waves_ratio", "worst_waves_ratio", "planned_over", "alone_over")),
        )
    return table


if __name__ == "__main__":
    main()
