"""Training at the speed of this machine: the real trainer on generated scenes, and its memory against the estimate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from coordexp.checkpoints.memory import check_memory
from coordexp.doctor.check import Row, Settings, judged, measured
from coordexp.doctor.samples import config_of, first_step, model_of, trainer_of

WARM_UP, TIMED = 2, 4  # steps
ROW = {True: 12_000, False: 1024}  # tokens of a packed row, on a GPU and on a CPU
SAMPLES = {True: 24, False: 8}  # of a step: more than fit
MEMORY_RATIO = (0.75, 1.15)  # of the measured peak to the estimate; below, runs that fit are refused
MATRIX = 8192  # side of the matrices whose product shows the GPU's speed


def training(settings: Settings) -> Iterator[Row]:
    """Steps of ``configs/stage1/sft.yaml`` with rows of :data:`ROW` tokens, after a warm-up."""
    on_gpu = torch.cuda.is_available()
    on_cpu: dict[str, Any] = {"model__dtype": "float32", "training__bf16": False, "training__master_weights": None}
    config = config_of(
        settings, "stage1/sft.yaml", model_of(settings), "large_scenes",
        global_max_length=ROW[on_gpu], training__use_cpu=not on_gpu, training__max_steps=WARM_UP + TIMED,
        training__effective_batch_size=SAMPLES[on_gpu], training__per_device_train_batch_size=SAMPLES[on_gpu],
        rollout_matching__max_new_tokens=256, **({} if on_gpu else on_cpu),
    )  # fmt: skip
    trainer = trainer_of(config)
    tokens = patches = scored = 0
    started = 0.0
    for number in range(WARM_UP + TIMED):
        if number == WARM_UP:
            started, tokens, patches, scored = _now(), 0, 0, 0
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        rows = first_step(trainer)  # the same samples in each step
        trainer.step.update()
        for row in rows:
            tokens += row.length
            patches += sum(len(segment.model_inputs["pixel_values"]) for segment in row.segments)
            scored += sum(len(segment.target.token_ids) for segment in row.segments)
    seconds = _now() - started
    figure = f"{tokens / seconds:,.0f} tokens/s, {seconds / TIMED:.2f} s a step of {tokens // TIMED:,} tokens"
    numbers = {"tokens_per_s": tokens / seconds, "step_s": seconds / TIMED}
    if on_gpu:
        achieved = 6 * _products(trainer.model, tokens, patches, scored) / seconds
        possible = _matrix_flops(trainer.run.accelerator.device)
        figure += (
            f"; {achieved / 1e12:.0f} TFLOP/s, {achieved / possible:.2f} of a large product's {possible / 1e12:.0f}"
        )
        numbers |= {"flops": achieved, "mfu": achieved / possible}
    yield measured("training", figure, **numbers)
    if not on_gpu:
        yield Row("peak memory", "skipped", "needs a GPU: the estimate is of a GPU's memory")
        return
    peak, estimate = torch.cuda.max_memory_allocated(), check_memory(config).total
    ratio = peak / estimate
    figure = f"{peak / 1e9:.1f} GB, estimated {estimate / 1e9:.1f} ({ratio:.2f} of it)"
    advice = "coordexp config check misjudges memory here: leave room, and report this table"
    is_near = MEMORY_RATIO[0] <= ratio <= MEMORY_RATIO[1]
    yield judged("peak memory", is_near, figure, advice, peak_bytes=peak, estimated_bytes=estimate)


def _products(model: Any, tokens: int, patches: int, scored: int) -> float:
    """Multiplications of one forward, without attention's own: a weight of a matrix is used once a token; in the vision
    tower once a patch, the head's once a supervised token."""
    sizes = {"visual": 0, "language_model": 0}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed" not in name:
            part = next((part for part in sizes if f".{part}." in name), None)
            if part is not None:
                sizes[part] += parameter.numel()
    head = model.get_output_embeddings().weight.numel()
    return float(sizes["language_model"] * tokens + sizes["visual"] * patches + head * scored)


def _matrix_flops(device: torch.device) -> float:
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    started = _now()
    for _ in range(10):
        torch.mm(a, b)
    return 10 * 2 * MATRIX**3 / (_now() - started)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
