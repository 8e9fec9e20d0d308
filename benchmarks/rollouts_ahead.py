"""The gain of `rollout_matching.rollouts_ahead: 1`. Needs vLLM and two cores.

Trains the demo's stage-2 configuration on answers of a real `coordexp serve`, without and with looking ahead, in one
run. The server is pinned to one core and the trainer to another, as if each had a device of its own. No step can be
shorter than the longer of its rollouts and its training; the last column is the step's time relative to that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table
from rollout_server import TIMEOUT_S, server_entry, serving
from step import checkpoint_or_tiny, dense_run, timed_steps

from coordexp.config import RunConfig
from coordexp.errors import require


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=positive, default=10, help="measured optimizer steps of each way [10]")
    flags.add_argument("--warmup", type=positive, default=2, help="steps before them that are not counted [2]")
    flags.add_argument("--batch", type=positive, default=16, help="samples per step [16]")
    flags.add_argument("--max-new-tokens", type=positive, default=256, help="longest answer [256]")
    flags.add_argument("--model", type=Path, help="checkpoint [checkpoints/demo-stage1, else a random tiny one]")
    options = flags.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        flags.error("server and trainer take a core each, and this process may use one")
    require("vllm", "this benchmark")
    threads, where, console = set_threads(options.threads or 1), machine(), Console()
    server_core, trainer_core = cores[0], cores[-1]
    with tempfile.TemporaryDirectory(prefix="coordexp-ahead-") as name:
        folder = Path(name)
        model, origin = checkpoint_or_tiny(options.model, folder)
        settings = {**vars(options), "threads": threads, "model": origin, "cores": [server_core, trainer_core]}
        print_machine(console, where, **{key: value for key, value in settings.items() if key != "json"})
        config = _config(folder, model, options)
        served = folder / "serve.yaml"
        served.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        with _pinned(server_core), serving(served), _pinned(trainer_core):
            results = {str(ahead): _measure(config, ahead, options) for ahead in (0, 1)}
    console.print(_table(results))
    ratio = results["0"]["step_s"] / results["1"]["step_s"]
    console.print(f"looking ahead: {ratio:.2f} x as many steps in the same time", highlight=False)
    write_json(options.json, "rollouts_ahead", where, settings, {**results, "speedup": ratio})


def _measure(config: RunConfig, ahead: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians of the measured steps; ``learning`` is all of a step but its push and its waiting."""
    assert config.rollout_matching is not None
    run = config.model_copy(
        update={
            "rollout_matching": config.rollout_matching.model_copy(update={"rollouts_ahead": ahead}),
            "training": config.training.model_copy(
                update={"output_dir": config.training.output_dir.with_name(f"ahead{ahead}")}
            ),
        }
    )
    # The last step requests no further answers, so it is not comparable.
    steps = timed_steps(run)[options.warmup : -1]
    medians = {
        "step_s": statistics.median(marks["step"] for _, marks in steps),
        "rollout_s": statistics.median(line["time/rollout_s"] for line, _ in steps),
        "push_s": statistics.median(line["time/weight_sync_s"] for line, _ in steps),
        "wait_s": statistics.median(line["time/rollout_wait_s"] for line, _ in steps),
        "learning_s": statistics.median(
            marks["step"] - line["time/weight_sync_s"] - line["time/rollout_wait_s"] for line, marks in steps
        ),
        "staleness_steps": max(line["rollout/staleness_steps"] for line, _ in steps),
    }
    return {**medians, "ratio": medians["step_s"] / max(medians["rollout_s"], medians["learning_s"])}


def _table(results: dict[str, dict[str, float]]) -> Table:
    table = Table(
        "rollouts_ahead", "step s", "rollout s", "learning s", "push s", "waited s", "step / max(rollout, learning)"
    )
    for ahead, row in results.items():
        names = ("step_s", "rollout_s", "learning_s", "push_s", "wait_s", "ratio")
        table.add_row(ahead, *(f"{row[name]:.3f}" for name in names))
    return table


def _config(folder: Path, model: Path, options: argparse.Namespace) -> RunConfig:
    vllm = {
        "mode": "server",
        "tensor_parallel_size": 1,
        "enforce_eager": True,
        "engine_args": {"max_num_seqs": options.batch},
        "server": {"servers": [server_entry()], "timeout_s": TIMEOUT_S},
        "sync": {"timeout_s": TIMEOUT_S},
    }
    over = {
        "rollout_matching.rollout_backend": "vllm",
        "rollout_matching.vllm": vllm,
        # Every sample of a step fits its row, and a row fits the model's 8,192 positions, which vLLM insists on.
        "global_max_length": options.batch * (options.max_new_tokens + 128),
    }
    return dense_run(model, folder, options, options.warmup + options.steps + 1, over)


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """This thread, and every process and thread that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    main()
