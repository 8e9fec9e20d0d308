"""``coordexp evaluate``: a checkpoint's answers for a dataset → figures, and one line per image."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import ConfigError
from coordexp.evaluation import Prediction, evaluate_dataset
from coordexp.records import GTObject, ImageRecord, PredictedObject
from coordexp.rollouts import build_backend, check_backend

METRICS = "metrics.json"
PREDICTIONS = "predictions.jsonl"
_LINE_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class CheckedEvaluation:
    """What to evaluate on what, with everything cheap looked at. No weights are loaded."""

    config: RunConfig
    rollout: RolloutMatchingConfig
    model: Path
    data: Path
    records: tuple[ImageRecord, ...]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Global figures, and the two files they were written to by the first rank."""

    metrics: dict[str, float]
    data: Path
    metrics_json: Path
    predictions_jsonl: Path


def check_evaluation(
    config: RunConfig, model: str | Path | None = None, data: str | Path | None = None, limit: int | None = None
) -> CheckedEvaluation:
    """Read the dataset, the tokenizer and the backend's name; None stands for what ``config`` says.

    Raises:
        ConfigError, DataError, CheckpointError, VocabError.
    """
    from coordexp.modeling.load import load_vocab

    rollout = config.rollout_matching or RolloutMatchingConfig(rollout_backend="hf")
    check_backend(rollout)
    jsonl = data or config.custom.val_jsonl
    if jsonl is None:
        raise ConfigError("custom.val_jsonl: null, so there is nothing to evaluate on; give a file there or by --data")
    records = read_jsonl(jsonl, limit=limit if limit is not None else config.custom.val_sample_limit)
    check_dataset(records)
    path = Path(model or config.model.model)
    load_vocab(path)
    return CheckedEvaluation(config, rollout, path, Path(jsonl), tuple(records))


def run_evaluation(
    config: RunConfig,
    console: Console,
    *,
    model: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    output: Path | None = None,
) -> EvaluationResult:
    """Evaluate, and write ``metrics.json`` and ``predictions.jsonl`` to ``output``
    (``<training.output_dir>/evaluation``). Under torchrun the images are shared out over the ranks.
    """
    checked = check_evaluation(config, model, data, limit)
    folder = output or Path(config.training.output_dir) / "evaluation"
    metrics, predictions = _evaluate(checked, console, f"evaluating {checked.model}")
    parts = distributed.gather_json([prediction_line(prediction) for prediction in predictions])
    result = EvaluationResult(metrics, checked.data, folder / METRICS, folder / PREDICTIONS)
    if distributed.is_main():
        _write(result, checked, parts)
    return result


def evaluate_model(
    config: RunConfig, console: Console, *, model: str | Path | None = None, description: str = "evaluating"
) -> tuple[dict[str, float], list[Prediction]]:
    """Global figures of ``model`` on ``custom.val_jsonl``, and this rank's answers. Writes nothing."""
    return _evaluate(check_evaluation(config, model), console, description)


def prediction_line(prediction: Prediction) -> dict[str, Any]:
    """One line of ``predictions.jsonl``: coordinates as norm1000 bins, ``dropped`` the unusable entries by reason."""
    record, parsed = prediction.record, prediction.parsed
    return {
        "sample_id": record.sample_id,
        "image": str(record.image),
        "width": record.width,
        "height": record.height,
        "gt": [_object(obj) for obj in record.objects],
        "pred": [_object(obj) for obj in parsed.objects],
        "dropped": {reason.value: count for reason, count in parsed.dropped.items() if count},
        "truncated": prediction.rollout.truncated,
        "text": prediction.rollout.text,
    }


def _object(obj: GTObject | PredictedObject) -> dict[str, Any]:
    return {"desc": obj.desc, obj.kind: list(obj.bins)}


def _evaluate(
    checked: CheckedEvaluation, console: Console, description: str
) -> tuple[dict[str, float], list[Prediction]]:
    from accelerate import PartialState

    from coordexp.data.images import open_rgb
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.modeling.load import base_checkpoint, load_model
    from coordexp.modeling.weights import LearnerWeights
    from coordexp.rollouts.build import LearnerParts

    config, rollout = checked.config, checked.rollout
    state = PartialState(cpu=config.training.use_cpu)  # joins the process group under torchrun
    loaded = load_model(checked.model, config.model.dtype, config.model.attn_implementation)
    torch.nn.Module.to(loaded.model, state.device)
    encoder = PromptEncoder(loaded.processor, config.template.prompt, config.template.system)
    dataset = RecordDataset(checked.records, encoder.encode, config.custom.object_ordering, config.training.seed)
    backend = build_backend(
        rollout,
        LearnerParts(
            model=loaded.model,
            vocab=loaded.vocab,
            image_token_id=loaded.image_token_id,
            weights=LearnerWeights(loaded.model),
            checkpoint=base_checkpoint(checked.model),
            dtype=config.model.dtype,
            max_length=config.global_max_length,
            open_image=open_rgb,
        ),
    )
    try:
        with _reporting(console, description) as on_progress:
            return evaluate_dataset(
                dataset,
                backend,
                loaded.vocab,
                batch_size=rollout.decode_batch_size,
                seed=config.training.seed,
                on_progress=on_progress,
            )
    finally:
        backend.close()


@contextmanager
def _reporting(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with ETA on a terminal, a line now and then elsewhere; gives the callback that drives it."""
    from coordexp.training.progress import make_progress

    if console.is_terminal:
        with make_progress(console) as bar:
            task = bar.add_task(description, total=None, note="")
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    started = last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S or done == total:
            last = now
            left = (now - started) / done * (total - done)
            text = f"{description}: {done}/{total} images, eta {left:.0f} s"
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    yield line


def _write(result: EvaluationResult, checked: CheckedEvaluation, parts: list[list[dict[str, Any]]]) -> None:
    """``parts``: each rank's lines; rank r has the samples r, r + W, r + 2W, …"""
    result.metrics_json.parent.mkdir(parents=True, exist_ok=True)
    with result.predictions_jsonl.open("w", encoding="utf-8") as file:
        for index in range(len(checked.records)):
            line = parts[index % len(parts)][index // len(parts)]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    summary = {"model": str(checked.model), "data": str(checked.data), "metrics": result.metrics}
    result.metrics_json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
