"""``coordexp evaluate``: a checkpoint's answers for a dataset → figures, and one line per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.config.schema import AnswerConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.progress_bar import reporting
from coordexp.errors import ConfigError
from coordexp.evaluation import EvaluationOptions, ImageAnswer, Summary, summarise
from coordexp.evaluation.answering import COUNTS_ONLY, answer_dataset
from coordexp.evaluation.renaming import NO_RENAMING, Renaming
from coordexp.evaluation.summary import METRICS, write_summary
from coordexp.inference.session import checked_model, open_session
from coordexp.rollouts import check_backend


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Everything measured, on every rank, and the files that the first rank wrote (none elsewhere)."""

    summary: Summary
    answers: tuple[ImageAnswer, ...]
    data: Path
    metrics_json: Path
    files: tuple[Path, ...]


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

    Predictions are scored by their tokens' probabilities unless ``constant_score`` is given. Under torchrun the images
    are spread over the ranks.

    Args:
        rename: gives predictions other descriptions.
        segm: average precision of masks too.
        classes: the only descriptions that answers may contain; empty for any.

    Raises:
        ConfigError, DataError, CheckpointError, VocabError: before weights are loaded.
    """
    path = Path(model or config.model.model)
    jsonl, written = _answer(config, console, f"evaluating {path}", path, data, limit, constant_score is None, classes)
    answers = rename(written)
    options = EvaluationOptions.from_config(AnswerConfig.of_run(config).rollout_matching.eval_detection)
    options = replace(options, coco=True, constant_score=constant_score, segm=segm or options.segm)
    summary = summarise(answers, options, rename.note(written, answers))
    folder = output or Path(config.training.output_dir) / "evaluation"
    files: list[Path] = []
    if distributed.is_main():
        about = {
            "model": str(path),
            "data": str(jsonl),
            "score": "token_probability" if constant_score is None else "constant",
            **({"classes": list(classes)} if classes else {}),
            **(rename.about or {}),
        }
        files = write_summary(folder, summary, answers, about, options)
    return EvaluationResult(summary, tuple(answers), jsonl, folder / METRICS, tuple(files))


def evaluate_model(
    config: RunConfig, console: Console, *, model: str | Path | None = None, description: str = "evaluating"
) -> tuple[dict[str, float], list[ImageAnswer]]:
    """Figures and answers of ``model`` on ``custom.val_jsonl``, without average precision. Writes nothing."""
    path = Path(model or config.model.model)
    _, answers = _answer(config, console, description, path, None, None, scored=False)
    return summarise(answers, COUNTS_ONLY).figures, answers


def _answer(
    config: RunConfig,
    console: Console,
    description: str,
    model: Path,
    data: Path | None,
    limit: int | None,
    scored: bool,
    classes: Sequence[str] = (),
) -> tuple[Path, list[ImageAnswer]]:
    """The dataset, and all ranks' answers for it. Everything cheap is checked before weights are loaded."""
    answering = AnswerConfig.of_run(config)
    check_backend(answering.rollout_matching, bool(classes))
    jsonl = data or config.custom.val_jsonl
    if jsonl is None:
        raise ConfigError("custom.val_jsonl: null, so there is nothing to evaluate on; give a file there or by --data")
    limit = config.custom.val_sample_limit if limit is None else limit
    records = open_records(jsonl, limit=limit, wait_s=config.training.ddp_timeout)
    check_images(records, wait_s=config.training.ddp_timeout)
    checked_model(answering, model)
    with (
        open_session(answering, model, classes) as session,
        reporting(console, description, stays=True) as on_progress,
    ):
        seed = config.training.seed
        answers = answer_dataset(
            RecordDataset(records, session.encoder.encode, config.custom.object_ordering, seed),
            session.backend,
            session.loaded.vocab,
            batch_size=session.backend.batch_size,
            seed=seed,
            on_progress=on_progress,
            on_answer=on_progress,
            scorer=session.scorer if scored else None,
        )
    return Path(jsonl), answers
