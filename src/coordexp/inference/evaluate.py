"""``coordexp evaluate``: a checkpoint's answers for a dataset → figures, and one line per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from coordexp import distributed
from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.progress_bar import reporting
from coordexp.errors import ConfigError
from coordexp.evaluation import EvaluationOptions, ImageAnswer, Prediction, Summary, summarise
from coordexp.evaluation.predict import ON_COUNTS_ALONE, evaluate_dataset, gather_answers
from coordexp.evaluation.renaming import NO_RENAMING, Renaming
from coordexp.evaluation.summary import METRICS, write_summary
from coordexp.inference.session import checked_model, open_session
from coordexp.records import ImageRecord
from coordexp.rollouts import check_backend


@dataclass(frozen=True, slots=True)
class CheckedEvaluation:
    """What to evaluate on what, with everything cheap looked at. No weights are loaded."""

    config: RunConfig
    rollout: RolloutMatchingConfig
    model: Path
    data: Path
    records: Sequence[ImageRecord]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Everything measured, on every rank, and the files that the first rank wrote (none elsewhere)."""

    summary: Summary
    answers: tuple[ImageAnswer, ...]
    data: Path
    metrics_json: Path
    files: tuple[Path, ...]


def check_evaluation(
    config: RunConfig,
    model: str | Path | None = None,
    data: str | Path | None = None,
    limit: int | None = None,
    classes: Sequence[str] = (),
) -> CheckedEvaluation:
    """Read the dataset, the tokenizer and the backend's name; None stands for what ``config`` says. ``classes``: the
    only descriptions that answers may hold.

    Raises:
        ConfigError, DataError, CheckpointError, VocabError.
    """
    rollout = resolved_rollout(config)
    check_backend(rollout, bool(classes))
    jsonl = data or config.custom.val_jsonl
    if jsonl is None:
        raise ConfigError("custom.val_jsonl: null, so there is nothing to evaluate on; give a file there or by --data")
    records = open_records(
        jsonl,
        limit=limit if limit is not None else config.custom.val_sample_limit,
        wait_s=config.training.ddp_timeout,
    )
    check_images(records, wait_s=config.training.ddp_timeout)
    path = checked_model(config, model)
    return CheckedEvaluation(config, rollout, path, Path(jsonl), records)


def run_evaluation(
    config: RunConfig,
    console: Console,
    *,
    model: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    output: Path | None = None,
    constant_score: float | None = None,
    rename: Renaming = NO_RENAMING,
    segm: bool = False,
    classes: Sequence[str] = (),
) -> EvaluationResult:
    """Evaluate, and write figures and answers to ``output`` (``<training.output_dir>/evaluation``).

    Predictions are scored by their tokens' probabilities unless ``constant_score`` is given; ``rename``: gives
    predictions other descriptions; ``segm``: average precision of masks too; ``classes``: the only descriptions that
    answers may hold. Under torchrun the images are shared out
    over the ranks.
    """
    checked = check_evaluation(config, model, data, limit, classes)
    folder = output or Path(config.training.output_dir) / "evaluation"
    options = EvaluationOptions.from_config(checked.rollout.eval_detection)
    options = replace(options, coco=True, constant_score=constant_score, segm=segm or options.segm)
    evaluated = _evaluate(checked, console, f"evaluating {checked.model}", ON_COUNTS_ALONE,
                      scored=constant_score is None, classes=classes)  # fmt: skip
    mine = [prediction.answer() for prediction in evaluated.predictions]
    written = gather_answers(mine, evaluated.batch_size)
    answers = rename(written)
    summary = summarise(answers, options, rename.note(written, answers))
    files: list[Path] = []
    if distributed.is_main():
        about = {
            "model": str(checked.model),
            "data": str(checked.data),
            "score": "token_probability" if constant_score is None else "constant",
            **({"classes": list(classes)} if classes else {}),
            **(rename.about or {}),
        }
        files = write_summary(folder, summary, answers, about, options)
    return EvaluationResult(summary, tuple(answers), checked.data, folder / METRICS, tuple(files))


def evaluate_model(
    config: RunConfig, console: Console, *, model: str | Path | None = None, description: str = "evaluating"
) -> tuple[dict[str, float], list[Prediction]]:
    """Global figures of ``model`` on ``custom.val_jsonl``, and this rank's answers. Writes nothing."""
    evaluated = _evaluate(check_evaluation(config, model), console, description, ON_COUNTS_ALONE, scored=False)
    return evaluated.figures, evaluated.predictions


class _Evaluated(NamedTuple):
    """Global figures, this rank's answers, and how many of them it asked for at a time."""

    figures: dict[str, float]
    predictions: list[Prediction]
    batch_size: int


def _evaluate(
    checked: CheckedEvaluation,
    console: Console,
    description: str,
    options: EvaluationOptions,
    *,
    scored: bool,
    classes: Sequence[str] = (),
) -> _Evaluated:
    config = checked.config
    with (
        open_session(config, checked.rollout, checked.model, classes) as session,
        reporting(console, description, stays=True) as on_progress,
    ):
        dataset = RecordDataset(
            checked.records, session.encoder.encode, config.custom.object_ordering, config.training.seed
        )
        batch_size = session.backend.batch_size(checked.rollout.decode_batch_size)
        figures, predictions = evaluate_dataset(
            dataset,
            session.backend,
            session.loaded.vocab,
            batch_size=batch_size,
            seed=config.training.seed,
            on_progress=on_progress,
            on_answer=on_progress,
            options=options,
            scorer=session.scorer if scored else None,
        )
    return _Evaluated(figures, predictions, batch_size)
