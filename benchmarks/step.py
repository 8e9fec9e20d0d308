"""Where does the time of a stage-2 optimizer step go?

Trains the demo's configuration for a few steps on generated dense scenes with the real trainer, and splits each step
into data, rollout, target building, packing, trainer and optimizer. CPU only: it is the tiny model's benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from coordexp.config import RunConfig

# Stage → what it holds; they add up to the step.
STAGES = {
    "data": "read images, encode prompts",
    "rollout": "generate one answer per sample",
    "targets": "parse, match, build, as far as decoding does not hide it",
    "packing": "choose segments, concatenate, count",
    "trainer": "forward, objective, backward, waiting for a row that is not built yet",
    "optimizer": "clip, step",
    "other": "schedule, clearing gradients, callbacks; logging is not in a step",
}


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--steps", type=positive, default=8, help="measured optimizer steps [8]")
    flags.add_argument("--warmup", type=positive, default=2, help="steps before them that are not counted [2]")
    flags.add_argument("--batch", type=positive, default=16, help="samples per step [16]")
    flags.add_argument("--max-new-tokens", type=positive, default=256, help="longest answer [256]")
    flags.add_argument("--model", type=Path, help="checkpoint [checkpoints/demo-stage1, else a random tiny one]")
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads)
    where = machine()
    with tempfile.TemporaryDirectory(prefix="coordexp-bench-") as folder:
        model, origin = checkpoint_or_tiny(options.model, Path(folder))
        print_machine(console, where, model=origin, batch=options.batch, steps=options.steps, threads=threads)
        config = dense_run(model, Path(folder), options, options.warmup + options.steps)
        steps = [_split(line, marks) for line, marks in timed_steps(config)][options.warmup :]
    results = summarise(steps, options.batch)
    console.print(_table(results))
    console.print("\n".join(f"  {name}: {what}" for name, what in STAGES.items()), style="dim", highlight=False)
    console.print(
        f"one step: {results['step_s']:.3f} s, {results['samples_per_s']:.2f} samples/s, "
        f"{results['truncated_share']:.0%} of answers cut off at {options.max_new_tokens} tokens",
        highlight=False,
    )
    settings = {**vars(options), "threads": threads, "model": origin}
    write_json(options.json, "step", where, settings, results)


def summarise(steps: Sequence[dict[str, float]], batch: int) -> dict[str, Any]:
    """Medians over ``steps``; a stage's share is of the summed seconds."""
    whole = sum(step["step"] for step in steps)
    stages: dict[str, dict[str, float]] = {}
    for name in STAGES:
        seconds = sum(step[name] for step in steps)
        stages[name] = {
            "seconds": statistics.median(step[name] for step in steps),
            "share": seconds / whole,
            "samples_per_s": batch * len(steps) / seconds,
            "ms_per_sample": 1000 * seconds / (batch * len(steps)),
        }
    for name, tokens in (("rollout", "rollout_tokens"), ("trainer", "trainer_tokens")):
        total = sum(step[tokens] for step in steps)
        stages[name]["tokens_per_s"] = total / sum(step[name] for step in steps)
        stages[name]["tokens"] = total / len(steps)
    return {
        "step_s": statistics.median(step["step"] for step in steps),
        "samples_per_s": batch * len(steps) / whole,
        "truncated_share": sum(step["truncated"] for step in steps) / (batch * len(steps)),
        "steps": len(steps),
        "stages": stages,
    }


def checkpoint_or_tiny(named: Path | None, folder: Path) -> tuple[Path, str]:
    """The checkpoint to train, and what to call it."""
    from coordexp.data.files import asset
    from coordexp.errors import CheckpointError
    from coordexp.modeling.tiny import build_tiny_checkpoint

    if named is not None:
        return named, str(named)
    try:
        return asset("checkpoints/demo-stage1"), "checkpoints/demo-stage1"
    except CheckpointError:
        # Its answers are noise that never ends: rollout and trainer lengths are then those of the worst case.
        return build_tiny_checkpoint(folder / "model"), "fresh tiny checkpoint, random weights"


def dense_run(
    model: Path, folder: Path, options: argparse.Namespace, steps: int, over: Mapping[str, Any] | None = None
) -> RunConfig:
    """The demo's stage 2 on generated dense scenes, for ``steps`` steps of ``options.batch`` samples each; ``over``:
    further keys of the configuration."""
    from coordexp.config import load_config
    from coordexp.data.files import asset
    from coordexp.data.scenes import DENSE, write_scenes

    return load_config(
        asset("configs/demo/stage2.yaml"),
        {
            "model.model": str(model),
            "custom.train_jsonl": str(write_scenes(folder / "scenes", min(256, options.batch * steps), DENSE, seed=7)),
            "custom.val_jsonl": None,
            "training.output_dir": str(folder / "run"),
            "training.max_steps": steps,
            "training.per_device_train_batch_size": options.batch,
            "training.logging_steps": 1,
            "training.save_strategy": "no",
            "training.report_to": [],
            "training.resume_from_checkpoint": None,
            "training.use_cpu": True,
            # Every sample of a step fits its row, so that each step trains on what was answered for it.
            "global_max_length": options.batch * (options.max_new_tokens + 512),
            "training.packing_min_fill_ratio": 0.01,
            "rollout_matching.decode_batch_size": options.batch,
            "rollout_matching.max_new_tokens": options.max_new_tokens,
            **(over or {}),
        },
    )


def timed_steps(config: RunConfig) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Train; per step what was logged, and the seconds of ``data``, ``optimizer`` and the whole ``step``."""
    from coordexp.training.checked_run import check_run
    from coordexp.training.run import build_trainer

    trainer, _ = build_trainer(check_run(config), Console(stderr=True), "benchmark")
    clock = _Clock(trainer)
    try:
        trainer.train()
    finally:
        trainer.close()
    logged = [line for line in trainer.state.log_history if "time/learner_s" in line]
    return list(zip(logged, clock.steps, strict=True))


def _split(line: dict[str, float], marks: dict[str, float]) -> dict[str, float]:
    split = {
        "data": marks["data"],
        "rollout": line["time/weight_sync_s"] + line["time/rollout_wait_s"],
        "targets": line["time/window_prepare_s"]
        - sum(line[f"time/{part}_s"] for part in ("weight_sync", "rollout_wait", "pack")),
        "packing": line["time/pack_s"],
        "trainer": line["time/learner_s"],
        "optimizer": marks["optimizer"],
    }
    return {
        **split,
        "other": marks["step"] - sum(split.values()),
        "step": marks["step"],
        "rollout_tokens": line["rollout/gen_new_tokens_total"],
        "trainer_tokens": line["train/tokens_total"],
        "truncated": line["rollout/parse_truncated_total"],
    }


class _Clock:
    """Times what the trainer itself does not: reading samples, the optimizer, the whole step."""

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._started: float | None = None
        self._backward_ended = 0.0
        take, accumulate = trainer.batches.take, trainer.step.accumulate

        def timed_take() -> Any:
            started = time.perf_counter()
            taken = take()
            self._now["data"] += time.perf_counter() - started
            return taken

        def timed_accumulate(*args: Any) -> None:
            self._started = time.perf_counter()
            accumulate(*args)
            self._backward_ended = time.perf_counter()

        trainer.batches.take, trainer.step.accumulate = timed_take, timed_accumulate
        clock = self

        class Marks(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                clock._now["optimizer"] = time.perf_counter() - clock._backward_ended

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock._end_step()

        trainer.add_callback(Marks())

    def _end_step(self) -> None:
        assert self._started is not None, "a step ended before its samples were fetched"
        self.steps.append({**self._now, "step": time.perf_counter() - self._started})
        self._now, self._started = defaultdict(float), None


def _table(results: dict[str, Any]) -> Table:
    table = Table(title=f"one stage-2 step (median of {results['steps']})", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in ("seconds", "share", "ms/sample", "samples/s", "tokens/s", "tokens/step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in STAGES:
        stage = results["stages"][name]
        tokens = [f"{stage[key]:,.0f}" if key in stage else "" for key in ("tokens_per_s", "tokens")]
        table.add_row(
            name,
            f"{stage['seconds']:.4f}",
            f"{stage['share']:.1%}",
            f"{stage['ms_per_sample']:.2f}",
            f"{stage['samples_per_s']:,.1f}",
            *tokens,
        )
    return table


if __name__ == "__main__":
    main()
