"""The cost of an optimizer step of each channel.

Trains the demo's two-channel configuration on dense generated scenes: Channel-A with one, two and three forwards,
Channel-B with rollouts by transformers and by vLLM in this process. Each case is a run of its own from the same
checkpoint, so the figures of one do not depend on the others. CPU only, with the tiny model.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table
from step import checkpoint_or_tiny, timed_steps

MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """One schedule: ``overrides`` of the configuration; ``needs`` a package."""

    name: str
    overrides: dict[str, Any]
    needs: str | None = None


def _channel_a(forwards: int, grad_mode: str = "unroll") -> dict[str, Any]:
    return {
        "stage2_ab.schedule.b_ratio": 0.0,
        "stage2_ab.n_softctx_iter": forwards,
        "stage2_ab.softctx_grad_mode": grad_mode,
    }


CASES = (
    Case("A, 1 forward", _channel_a(1)),
    Case("A, 2 forwards", _channel_a(2)),
    Case("A, 3 forwards", _channel_a(3)),
    Case("A, 3 forwards, em_detach", _channel_a(3, "em_detach")),
    Case("B, hf", {"stage2_ab.schedule.b_ratio": 1.0}),
    Case(
        "B, vllm",
        {
            "stage2_ab.schedule.b_ratio": 1.0,
            "rollout_matching.rollout_backend": "vllm",
            "rollout_matching.vllm.mode": "colocate",
            "rollout_matching.vllm.tensor_parallel_size": 1,
            "rollout_matching.vllm.enforce_eager": True,
        },
        needs="vllm",
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=positive, default=6, help="measured optimizer steps of each case [6]")
    flags.add_argument("--warmup", type=positive, default=2, help="steps before them that are not counted [2]")
    flags.add_argument("--batch", type=positive, default=16, help="samples per step [16]")
    flags.add_argument("--max-new-tokens", type=positive, default=MAX_NEW_TOKENS, help="longest answer [256]")
    flags.add_argument("--model", type=Path, help="checkpoint [checkpoints/demo-stage1, else a random tiny one]")
    flags.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only cases with names that begin with it, such as 'A' or 'B, hf'",
    )
    options = flags.parse_args(argv)
    if not any(case.name.startswith(options.only) for case in CASES):
        flags.error(f"--only {options.only!r}: no case begins with it; there are {[one.name for one in CASES]}")
    console = Console()
    threads = set_threads(options.threads)
    where = machine()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="coordexp-bench-") as folder:
        model, origin = checkpoint_or_tiny(options.model, Path(folder))
        print_machine(console, where, model=origin, batch=options.batch, steps=options.steps, threads=threads)
        for case in CASES:
            if not case.name.startswith(options.only):
                continue
            if case.needs is not None and importlib.util.find_spec(case.needs) is None:
                console.print(f"{case.name}: not measured, {case.needs} is not installed", highlight=False)
                continue
            results[case.name] = measure(case, model, Path(folder), options)
            console.print(f"{case.name}: {results[case.name]['step_s']:.3f} s a step", highlight=False, style="dim")
    console.print(_table(results))
    settings = {**vars(options), "threads": threads, "model": origin}
    write_json(options.json, "channels", where, settings, results)


def measure(case: Case, model: Path, folder: Path, options: Any) -> dict[str, float]:
    """Medians of a case's steps."""
    from coordexp.config import load_config
    from coordexp.data.files import asset
    from coordexp.data.scenes import DENSE, write_scenes

    if case.needs == "vllm":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    total = options.warmup + options.steps
    data = folder / "scenes" / "scenes.jsonl"
    if not data.is_file():
        write_scenes(folder / "scenes", min(256, options.batch * total), DENSE, seed=7)
    config = load_config(
        asset("configs/demo/two_channel.yaml"),
        {
            "model.model": str(model),
            "custom.train_jsonl": str(data),
            "custom.val_jsonl": None,
            "training.output_dir": str(folder / case.name.replace(" ", "_").replace(",", "")),
            "training.max_steps": total,
            "training.per_device_train_batch_size": options.batch,
            "training.logging_steps": 1,
            "training.report_to": [],
            "training.use_cpu": True,
            # Every sample of a step fits one row in either channel, so that their steps train on the same samples; an
            # engine reads it as the model's longest sequence, of which the demo's checkpoint has 8,192 positions.
            "global_max_length": min(8192, options.batch * (options.max_new_tokens + 512)),
            "training.packing_min_fill_ratio": 0.01,
            "rollout_matching.decode_batch_size": options.batch,
            "rollout_matching.max_new_tokens": options.max_new_tokens,
            **case.overrides,
        },
    )
    steps = timed_steps(config)[options.warmup :]
    return {
        "step_s": statistics.median(marks["step"] for _, marks in steps),
        "rollout_s": statistics.median(
            line.get("time/weight_sync_s", 0.0) + line.get("time/rollout_wait_s", 0.0) for line, _ in steps
        ),
        "learner_s": statistics.median(line["time/learner_s"] for line, _ in steps),
        "trainer_tokens": statistics.fmean(line["train/tokens_total"] for line, _ in steps),
        "new_tokens": statistics.fmean(line.get("rollout/gen_new_tokens_total", 0.0) for line, _ in steps),
        "samples_per_s": options.batch * len(steps) / sum(marks["step"] for _, marks in steps),
        "steps": len(steps),
    }


def _table(results: dict[str, dict[str, float]]) -> Table:
    table = Table(title="one optimizer step (medians)", title_justify="left")
    table.add_column("channel", no_wrap=True)
    for name in ("seconds", "x A1", "rollout s", "trainer s", "samples/s", "row tokens", "new tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    base = results.get(CASES[0].name)
    for name, figures in results.items():
        table.add_row(
            name,
            f"{figures['step_s']:.3f}",
            f"{figures['step_s'] / base['step_s']:.2f}" if base else "",
            f"{figures['rollout_s']:.3f}",
            f"{figures['learner_s']:.3f}",
            f"{figures['samples_per_s']:.1f}",
            f"{figures['trainer_tokens']:,.0f}",
            f"{figures['new_tokens']:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
