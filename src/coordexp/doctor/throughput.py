"""Training at the speed of this machine: shipped configurations by ``coordexp train``, with their loader processes, on
generated images; and memory against the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from coordexp.checkpoints.memory import check_memory
from coordexp.doctor.check import Row, Settings, judged, measured
from coordexp.doctor.runs import ShippedRun, matrix_flops, train_shipped
from coordexp.doctor.samples import answering_model, keys_of, model_of
from coordexp.training.watches import free_cores, loader_advice

WARM_UP, TIMED = 2, 4  # steps
MEMORY_RATIO = (0.75, 1.15)  # of the measured peak to the estimate; below, runs that fit are refused
NEEDS_GPU = "needs a GPU"


def training(settings: Settings) -> Iterator[Row]:
    """Steps of ``configs/stage1/sft.yaml``."""
    run = _run(settings, "stage1/sft.yaml", model_of(settings), "large_scenes")
    yield _rates("training", run)
    yield measured("parts of a step", run.shares(), **run.parts)
    yield _loaders(run)
    if not torch.cuda.is_available():
        yield Row("arithmetic", "skipped", NEEDS_GPU)
        yield Row("peak memory", "skipped", f"{NEEDS_GPU}: the estimate is of a GPU's memory")
        return
    possible, achieved = matrix_flops(torch.device("cuda")), run.figures["flops_per_s_computing"]
    figure = f"{achieved / 1e12:.0f} TFLOP/s in the parts that compute, {achieved / possible:.2f} of a large product's "
    figure += f"{possible / 1e12:.0f}; {run.figures['flops_per_s'] / possible:.2f} over whole steps"
    yield measured("arithmetic", figure, flops=achieved, matrix_flops=possible, mfu=achieved / possible)
    peak, estimate = 1e9 * run.figures["allocated_peak_gb"], check_memory(run.config).total
    ratio = peak / estimate
    figure = f"{peak / 1e9:.1f} GB, estimated {estimate / 1e9:.1f} ({ratio:.2f} of it)"
    advice = "coordexp config check misjudges memory here: leave room, and report this table"
    is_near = MEMORY_RATIO[0] <= ratio <= MEMORY_RATIO[1]
    yield judged("peak memory", is_near, figure, advice, peak_bytes=peak, estimated_bytes=estimate)


def stage_2(settings: Settings) -> Iterator[Row]:
    """Steps of ``configs/stage2_rollout_aligned/rewritten.yaml``, answers by transformers."""
    run = _run(settings, "stage2_rollout_aligned/rewritten.yaml", answering_model(settings), "scenes_in_turn")
    yield _rates("stage 2", run)
    yield measured("parts of a stage 2 step", run.shares(), **run.parts)


def _run(settings: Settings, file: str, model: Path, scenes: str) -> ShippedRun:
    on_gpu = torch.cuda.is_available()
    name = file.replace("/", "-").removesuffix(".yaml")
    keys = {
        **keys_of(settings, model, scenes, f"run-{name}"),
        "training.overwrite_output_dir": True,
        "rollout_matching.max_new_tokens": 256 if on_gpu else 64,
    }
    if file.startswith("stage2"):
        keys["rollout_matching.repeat_terminate.min_new_tokens"] = 32
    warm_up, timed = (WARM_UP, TIMED) if on_gpu else (1, 1)
    if not on_gpu:
        keys |= {"training.use_cpu": True, "global_max_length": 1024, "training.effective_batch_size": 8}
    keys["training.max_steps"] = warm_up + timed
    return train_shipped(file, keys, settings.folder / "logs" / f"run-{name}.log", settings.timeout_s, warm_up)


def _rates(row: str, run: ShippedRun) -> Row:
    figures = run.figures
    figure = (
        f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['images_per_s']:.1f} images/s, {run.step_s:.2f} s a step "
    )
    figure += f"of {figures['tokens']:,.0f} tokens"
    return measured(row, figure, **figures)


def _loaders(run: ShippedRun) -> Row:
    """Whether loader processes are fast enough, and how many would be, of those that have a core."""
    workers, share = run.config.data.num_workers, run.parts["reading"] / run.step_s
    figure = f"a step waits {share:.1%} for {workers} of them"
    cores = free_cores(0 if torch.cuda.is_available() else torch.get_num_threads())
    if (advice := loader_advice(workers, share, 1.0, cores)) is not None:
        figure += f"; {advice}"
    return measured("loader processes", figure, share=share, workers=workers)
