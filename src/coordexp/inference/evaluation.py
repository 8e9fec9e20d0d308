"""``coordexp evaluate``: a checkpoint's answers for a dataset, and figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from coordexp import distributed
from coordexp.checkpoints.card import check_calibrates, read_card, with_own_template, write_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.resolved import AnswerConfig, EvaluationConfig
from coordexp.data.class_list import choose_list
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.files import check_writable
from coordexp.data.image_sources import broken_images
from coordexp.data.progress_bar import say
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import METRICS, ImageAnswer, answer_dataset
from coordexp.evaluation.confidence import calibrated, fit
from coordexp.evaluation.join_tiles import merge_all_tiles
from coordexp.evaluation.renaming import Renaming
from coordexp.evaluation.several_answers import merge_all, side_by_side
from coordexp.evaluation.summary import Summary, check_replaced, summarise, write_summary
from coordexp.hub import name_of
from coordexp.inference.asking import ONE_ANSWER, Asking
from coordexp.inference.session import checked_model, with_several_answers
from coordexp.records import ImageRecord


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Figures (``metrics``, by name) and answers, on every rank; ``files`` is empty on ranks other than the first. With
    several answers per image both are of the merged ones, and ``by_answers`` has the figures of
    :func:`~coordexp.evaluation.several_answers.side_by_side`."""

    summary: Summary
    answers: tuple[ImageAnswer, ...]
    data: Path
    metrics_json: Path
    files: tuple[Path, ...]
    by_answers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        return self.summary.figures

    def __repr__(self) -> str:
        f1, objects = self.metrics["f1"], int(self.metrics["gt_objects"])
        return f"<Evaluation on {self.data}: {len(self.answers)} images, {objects} objects, F1 {f1:.3f}>"


def run_evaluation(
    config: RunConfig | EvaluationConfig,
    console: Console,
    *,
    model: Path | None = None,
    data: Path | None = None,
    limit: int | None = None,
    output: Path | None = None,
    constant_score: float | None = None,
    rename: Renaming | None = None,
    segm: bool = False,
    calibrate: bool = False,
    overwrite: bool = False,
    asking: Asking = ONE_ANSWER,
) -> EvaluationResult:
    """Evaluate, and write figures and answers to ``output`` (None: :func:`evaluation_folder`).

    Predictions are scored by their tokens' probabilities unless ``constant_score`` is given. Under torchrun the images
    are spread over the ranks. ``rename`` gives predictions other descriptions; ``segm``: average precision of masks
    too; ``calibrate``: fit confidences to what is right here, and store the calibration in the checkpoint's folder;
    ``overwrite``: also replace the evaluation of something else. Raises ConfigError, DataError, CheckpointError or
    VocabError before weights are loaded.
    """
    if calibrate:
        check_calibrates(asking.answers, asking.tiling, constant_score)
    if calibrate and (name := name_of(model or config.model.model)) is not None:
        raise ConfigError(
            f"calibrate: a calibration is stored with the model, and {name} is in the hub's cache; copy it first: "
            f"coordexp model export {name} FOLDER"
        )
    path, rename, tiling = Path(model or config.model.model), rename or Renaming(), asking.tiling
    config = with_own_template(config, path)
    listed = tuple(choose_list(checkpoint=read_card(path).classes, class_names=asking.classes))
    folder = output or evaluation_folder(config.training.output_dir, path)
    source = data or config.custom.val_jsonl
    about = {
        "model": str(path),
        "data": str(source),
        "limit": config.custom.val_sample_limit if limit is None else limit,
        "fingerprints": [fingerprint(one) for one in (path, source) if one is not None and one.exists()],
        "score": "token_probability" if constant_score is None else "constant",
        **asking.settings(with_several_answers(AnswerConfig.of_run(config), asking.answers)),
        **rename.about,
    }
    if calibrate:
        check_writable(path)
    check_replaced(folder, about, overwrite)
    answered = answer_jsonl(
        config, console, f"evaluating {path}", path, data, limit,
        scored=constant_score is None, calibrates=calibrate, asking=asking,
    )  # fmt: skip
    photographs, skipped = answered.photographs, answered.skipped
    # Before they are merged, which compares descriptions.
    named = rename(answered.answers, {obj.desc for one in photographs for obj in one.objects if obj.soft is None})
    files: list[Path] = []
    if calibrate:
        calibration = fit(named, str(answered.jsonl))
        named = calibrated(named, calibration)
        if distributed.is_main():
            files.append(write_card(replace(read_card(path), calibration=calibration), path))
    detection = resolved_rollout(config).eval_detection
    options = detection.model_copy(update={"use_segm": segm or detection.use_segm}).scored(constant_score)
    single, merged = named, merge_all(named, asking.answers)
    if tiling is not None:  # the answers of a tile are merged first, as for predictions
        single, merged = (merge_all_tiles(photographs, tiling, *one) for one in ((single, asking.answers), (merged, 1)))
    by_answers = {} if asking.answers == 1 else side_by_side(single, merged, options)
    about |= {"by_answers": by_answers} if by_answers else {}
    summary = summarise(merged, options, rename.note(answered.answers, named, calibrate), with_confidences=True)
    if skipped:
        about["skipped"] = skipped
        note = f"{len(skipped)} images cannot be decoded and were not answered; the figures are of the others"
        summary = replace(summary, notes=(*summary.notes, note))
    if distributed.is_main():
        files += write_summary(folder, summary, merged, about, options, listed)
    return EvaluationResult(summary, tuple(merged), answered.jsonl, folder / METRICS, tuple(files), by_answers)


def evaluation_folder(output_dir: Path, model: Path) -> Path:
    """Where the evaluation of ``model`` belongs in the folder of a run: ``evaluation`` for the run's own model, and a
    folder in it for each other one."""
    own, home = model.resolve(), output_dir.resolve()
    if own == home:
        return output_dir / "evaluation"
    if own.is_relative_to(home):
        return output_dir / "evaluation" / "-".join(own.relative_to(home).parts)
    if (name := name_of(model)) is not None:
        repo, _, commit = name.partition("@")
        return output_dir / "evaluation" / f"{Path(repo).name}-{commit[:8]}"
    is_step = re.fullmatch(r"checkpoint-\d+", own.name)
    return output_dir / "evaluation" / (f"{own.parent.name}-{own.name}" if is_step else own.name)


@dataclass(frozen=True, slots=True)
class DatasetAnswers:
    """All ranks' ``answers`` to the images of ``jsonl``; several answers of an image follow each other. With tiles they
    are answers to tiles, in the order of ``photographs``, which is empty otherwise. ``skipped``: by sample, why images
    that cannot be decoded were left out."""

    jsonl: Path
    answers: list[ImageAnswer]
    skipped: dict[str, str]
    photographs: list[ImageRecord]


def answer_jsonl(
    config: RunConfig | EvaluationConfig,
    console: Console,
    description: str,
    model: Path,
    data: Path | None = None,
    limit: int | None = None,
    *,
    scored: bool = False,
    calibrates: bool = False,
    asking: Asking = ONE_ANSWER,
) -> DatasetAnswers:
    """Answers for a dataset (None: ``custom.val_jsonl``). Everything cheap is checked before weights are loaded.
    ``calibrates``: with raw confidences."""
    config = with_own_template(config, model)
    answering = asking.checked(AnswerConfig.of_run(config))
    jsonl = data or config.custom.val_jsonl
    if jsonl is None:
        raise ConfigError("custom.val_jsonl: null, so there is nothing to evaluate on; give a file there or by --data")
    limit = config.custom.val_sample_limit if limit is None else limit
    records = open_records(jsonl, limit=limit, wait_s=config.training.ddp_timeout)
    check_images(records, wait_s=config.training.ddp_timeout)
    checked_model(answering, model)
    broken = broken_images(records)
    if len(broken) == len(records):
        raise DataError(f"no image that can be read; the first: {broken[0]}", path=jsonl)
    skipped = {records[at].sample_id: problem for at, problem in broken.items()}
    for sample, problem in skipped.items():
        say(console, f"skipped {sample}: {problem}")
    whole = [] if asking.tiling is None else [record for at, record in enumerate(records) if at not in broken]
    samples = records if asking.tiling is None else asking.samples(whole)
    ordering = config.custom.object_ordering
    with asking.loaded(samples, answering, model, ordering, console, description) as (session, how):
        scorer = replace(session.scorer, calibration=None) if calibrates else session.scorer
        leave_out = broken if asking.tiling is None else ()
        answered = answer_dataset(**how, scorer=scorer if scored else None, leave_out=leave_out)
    return DatasetAnswers(Path(jsonl), answered, skipped, whole)
