"""``coordexp predict``: images → answers with scores, written as they arrive; an interrupted run can be resumed.
``coordexp evaluate``: a checkpoint's answers for a dataset → figures."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from rich.console import Console

from coordexp import distributed
from coordexp.checkpoints.calibration import Calibration
from coordexp.checkpoints.card import read_card, write_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.checkpoints.folder import checkpoint_fingerprint
from coordexp.checkpoints.template import with_own_template
from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.resolved import AnswerConfig, EvaluationConfig
from coordexp.data.class_list import choose_list
from coordexp.data.dataset import RecordDataset
from coordexp.data.dataset_cache import check_images, open_records
from coordexp.data.files import append_line, check_writable, write_atomically
from coordexp.data.image_sources import FoundImages, broken_images, find_images
from coordexp.data.preparation import ImagePreparation
from coordexp.data.progress_bar import reporting
from coordexp.data.tiles import CutTiles, Tiling, tile_records, whole_of
from coordexp.engine.trainer.backends import check_backend
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import (
    CLASS_LIST,
    METRICS,
    PREDICTIONS,
    SETTINGS,
    ImageAnswer,
    answer_batches,
    answer_dataset,
    from_line,
    is_of,
    samples_of_batch,
    to_line,
    write_answers,
)
from coordexp.evaluation.coco_results import write_coco
from coordexp.evaluation.confidence import at_least, calibrated, fit
from coordexp.evaluation.drawing import save_drawings
from coordexp.evaluation.join_tiles import merge_all_tiles, merge_tiles
from coordexp.evaluation.renaming import Renaming
from coordexp.evaluation.several_answers import merge_all, side_by_side
from coordexp.evaluation.summary import Summary, check_replaced, summarise, write_summary
from coordexp.hub import name_of
from coordexp.inference.session import checked_model, open_session, size_note, with_several_answers
from coordexp.printable import printable
from coordexp.records import ImageRecord, read_lines
from coordexp.temporary import temporary_folder

DRAWINGS = "images"
Score = Literal["token_probability", "confidence"] | float


@dataclass(frozen=True, slots=True)
class PredictionResult:
    """``resumed``: number of answers from an earlier run; ``skipped``: (image, reason) if one could not be read;
    ``left_out``: objects of too low a confidence. ``answers``, without those, and ``files`` are empty on ranks other
    than the first."""

    images: int
    resumed: int
    files: tuple[Path, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    answers: tuple[ImageAnswer, ...] = ()
    left_out: int = 0


def run_prediction(
    config: AnswerConfig,
    console: Console,
    *,
    source: Path | Sequence[Path],
    output: Path,
    model: Path | None = None,
    limit: int | None = None,
    score: Score = "token_probability",
    skip_broken: bool = False,
    save_images: bool = False,
    classes: Sequence[str] = (),
    min_confidence: float | None = None,
    overwrite: bool = False,
    answers: int = 1,
    tiling: Tiling | None = None,
    fix: str = "name another folder with --out, or add --overwrite",
) -> PredictionResult:
    """Answer every image of ``source`` (:func:`~coordexp.data.image_sources.find_images`) and write
    ``predictions.jsonl`` and COCO results to ``output``.

    Each batch is on the disk before the next one starts; called again with the same settings, it continues where it
    stopped. Under torchrun each rank writes its share into a file of its own, and the first rank joins them at the end.

    Args:
        model: None means ``model.model``.
        limit: maximum number of images.
        score: of an object: the probability of its tokens (to rank), its confidence (to act on), or one number for all.
        skip_broken: leave out images that cannot be read.
        save_images: draw each image with its answer too.
        classes: the only descriptions that answers may contain; empty for any.
        min_confidence: leave objects below out of everything but ``predictions.jsonl``.
        overwrite: delete the answers in ``output`` first.
        answers: per image, merged into one (:func:`~coordexp.evaluation.several_answers.merge_answers`).
        tiling: answer tiles, and merge their answers (:func:`~coordexp.evaluation.join_tiles.merge_tiles`) at the end.
        fix: what to do about answers of other settings in ``output``, for the error.

    Raises:
        ConfigError: as :func:`~coordexp.inference.session.with_several_answers`.
        DataError: ``output`` has answers of other settings or for other images, or an image cannot be read.
    """
    config = with_several_answers(config, answers)
    check_backend(config.rollout_matching, bool(classes))
    sources = [source] if isinstance(source, Path) else list(source)
    images = find_images(sources, limit=limit, skip_broken=skip_broken)
    records = images.records
    asked = records if tiling is None else tile_records(records, tiling)
    path = checked_model(config, model)
    card = read_card(path)
    calibration = card.calibration if score == "token_probability" else None
    _note(console, images, asked, card.preparation)
    settings = _settings(config, path, sources, score, classes, card.preparation, calibration, answers, tiling)
    listed = tuple(choose_list(checkpoint=card.classes, class_names=classes))
    settings[CLASS_LIST] = list(listed)
    distributed.join(use_cpu=config.use_cpu)
    with distributed.raise_on_all_ranks("coordexp predict"):
        if distributed.is_main():
            _claim(output, settings, [*records, *asked], overwrite, fix)
    with distributed.raise_on_all_ranks("coordexp predict"):  # after the first rank has deleted what is replaced
        known = _answered(output)
        resumed = sum(record.sample_id in known for record in records)
        todo = [at for at, one in enumerate(asked) if known.keys().isdisjoint((one.sample_id, whole_of(one)))]
    part = output / (PREDICTIONS if distributed.is_main() else f"predictions.rank{distributed.rank()}.jsonl")
    if todo:  # with all answers there, the model is not loaded
        with (
            open_session(config, path, classes) as session,
            reporting(console, f"predicting with {path}", _counted(tiling), stays=True) as on_progress,
            temporary_folder("coordexp-tiles-") as cut,
            distributed.raise_on_all_ranks("coordexp predict"),
        ):
            shown = asked if tiling is None else CutTiles(asked, cut, samples_of_batch(session.backend, answers))
            scorer = session.scorer if isinstance(score, str) else None
            if scorer is not None and score == "confidence":
                scorer = replace(scorer, calibration=None)  # fitted on annotations that count as complete
            # Seeded by the images' positions in the source: an interrupted run answers as a whole one does.
            for batch in answer_batches(
                RecordDataset(shown, session.encoder.encode, "file", config.seed),
                todo,
                session.backend,
                session.vocab,
                seed=config.seed,
                scorer=scorer,
                on_progress=on_progress,
                on_answer=on_progress,
                count=answers,
            ):
                merged = merge_all(batch, answers)
                lines = [to_line(_finished(answer, score, images.annotated)) + "\n" for answer in merged]
                if lines:
                    append_line(part, "".join(lines).encode("utf-8"))
    distributed.barrier()
    if not distributed.is_main():
        return PredictionResult(len(records), resumed, (), images.skipped)
    whole, files = _join_parts(output, records, tiling, images.annotated)
    whole, left_out = (whole, 0) if min_confidence is None else at_least(whole, min_confidence)
    has_polygons = any(obj.kind == "poly" for answer in whole for obj in answer.pred)
    files += write_coco(whole, output, None, segm=has_polygons, classes=listed)
    if save_images:
        files += save_drawings(whole, output / DRAWINGS)
    return PredictionResult(len(records), resumed, tuple(files), images.skipped, tuple(whole), left_out)


def _settings(
    config: AnswerConfig,
    model: Path,
    sources: Sequence[Path],
    score: Score,
    classes: Sequence[str],
    preparation: ImagePreparation,
    calibration: Calibration | None,
    answers: int,
    tiling: Tiling | None,
) -> dict[str, Any]:
    # Everything that an answer depends on.
    return {
        "model": str(model.resolve()),
        "fingerprint": checkpoint_fingerprint(model),
        "source": str(sources[0].resolve()) if len(sources) == 1 else [str(one.resolve()) for one in sources],
        "prompt": config.template.prompt,
        "system": config.template.system,
        **_decoding(config),
        "score": score,
        **({} if answers == 1 else {"answers": answers}),
        **({} if tiling is None else {"tiles": asdict(tiling)}),
        **({"classes": list(classes)} if classes else {}),
        **({} if preparation.resize is None else {"resize": asdict(preparation.resize)}),
        **({} if calibration is None else {"calibration": asdict(calibration)}),
    }


def _decoding(config: AnswerConfig) -> dict[str, Any]:
    rollout = config.rollout_matching
    return {
        "dtype": config.model.dtype,
        "seed": config.seed,
        "backend": rollout.rollout_backend,
        "max_new_tokens": rollout.max_new_tokens,
        "decoding": rollout.decoding.model_dump(mode="json"),
        "num_beams": rollout.num_beams,
        "repetition_penalty": rollout.repetition_penalty,
        "repeat_terminate": rollout.repeat_terminate.model_dump(mode="json"),
    }


def _finished(answer: ImageAnswer, score: Score, annotated: Collection[str]) -> ImageAnswer:
    # With the chosen scores, and without annotations that the source does not have.
    pred = answer.pred
    if score == "confidence":
        pred = tuple(replace(obj, score=obj.confidence) for obj in pred)
    elif not isinstance(score, str):
        pred = tuple(replace(obj, score=score) for obj in pred)
    return replace(answer, pred=pred, gt=answer.gt if answer.sample_id in annotated else None)


def _counted(tiling: Tiling | None) -> str:
    return "images" if tiling is None else "tiles"


def _note(console: Console, images: FoundImages, asked: Sequence[ImageRecord], preparation: ImagePreparation) -> None:
    size = size_note(asked, preparation)
    notes = [] if size is None else [size]
    limit = Image.MAX_IMAGE_PIXELS or 0
    large = [record.sample_id for record in images.records if limit and record.width * record.height > limit]
    if large:
        notes.append(
            f"{len(large)} images have more than {limit:,} pixels, the first is {large[0]}; they need much memory"
        )
    lines = [f"note: {note}" for note in (*notes, *images.passed_over)]
    lines += [printable(f"skipped {image}: {reason}") for image, reason in images.skipped]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _claim(output: Path, settings: dict[str, Any], records: Sequence[ImageRecord], overwrite: bool, fix: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    path = output / SETTINGS
    if path.is_file() and overwrite:
        for old in (*_parts(output), path):
            old.unlink()
        shutil.rmtree(output / DRAWINGS, ignore_errors=True)
    if not path.is_file():
        if not overwrite and any(output.iterdir()):
            raise DataError(f"the folder is not empty and has no {SETTINGS}; {fix}", path=output)
        write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        times = [path.stat().st_mtime_ns, *(one.image.stat().st_mtime_ns for one in records if one.image.is_file())]
        os.utime(path, ns=(max(times), max(times)))  # pictures may be of another clock, or another time zone
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    other = sorted(name for name in settings.keys() | earlier.keys() if settings.get(name) != earlier.get(name))
    if other:
        raise DataError(
            f"has answers made with another {', '.join(other)} ({earlier.get(other[0])!r}, now "
            f"{settings.get(other[0])!r}); {fix}",
            path=output,
        )
    answered = _answered(output)
    for record in records:
        if (answer := answered.get(record.sample_id)) is None:
            continue
        is_tile = whole_of(record) != record.sample_id  # its picture was a temporary file
        # Images in shards have no time of their own.
        is_newer = record.image.is_file() and record.image.stat().st_mtime > path.stat().st_mtime
        if is_newer or not (is_tile or is_of(answer, record)):
            problem = f"{record.sample_id} is another picture now ({record.image}), or a newer one, than was answered"
            raise DataError(f"{problem}; {fix}", path=output)
    if lost := answered.keys() - {record.sample_id for record in records}:
        asked = len({whole_of(record) for record in records})
        raise DataError(
            f"has answers for {len(lost)} images that are not among these {asked}, such as {min(lost)}; {fix}",
            path=output,
        )


def _parts(output: Path) -> list[Path]:
    parts = (output / PREDICTIONS, *sorted(output.glob("predictions.rank*.jsonl")))
    return [part for part in parts if part.is_file()]


def _answered(output: Path) -> dict[str, ImageAnswer]:
    # Text after the last line break is a line that a kill left unfinished.
    lines = ((part, number, line) for part in _parts(output) for number, line in read_lines(part, whole=True))
    answers = [from_line(line, path=part, line=number) for part, number, line in lines]
    return {answer.sample_id: answer for answer in answers}


def _join_parts(
    output: Path, records: Sequence[ImageRecord], tiling: Tiling | None, annotated: Collection[str]
) -> tuple[list[ImageAnswer], list[Path]]:
    """One file in the order of the source, an answer for each of its images."""
    answered = _answered(output)
    for record in records:
        if tiling is not None and record.sample_id not in answered:
            tiles = [answered[tile.sample_id] for tile in tile_records([record], tiling)]
            answered[record.sample_id] = merge_tiles(record, tiling, tiles)
    # Answers of an earlier run depend on the pictures alone: the annotations are those of now.
    gt_of = {record.sample_id: record.objects if record.sample_id in annotated else None for record in records}
    answers = [replace(answered[name], gt=gt) for name, gt in gt_of.items()]
    whole = output / PREDICTIONS
    write_answers(answers, whole)
    for part in set(_parts(output)) - {whole}:
        part.unlink()
    return answers, [whole]


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
    classes: Sequence[str] = (),
    calibrate: bool = False,
    overwrite: bool = False,
    answers: int = 1,
    tiling: Tiling | None = None,
) -> EvaluationResult:
    """Evaluate, and write figures and answers to ``output`` (None: :func:`evaluation_folder`).

    Predictions are scored by their tokens' probabilities unless ``constant_score`` is given. Under torchrun the images
    are spread over the ranks. ``rename`` gives predictions other descriptions; ``segm``: average precision of masks
    too; ``classes``: the only descriptions that answers may contain, empty for any; ``calibrate``: fit confidences to
    what is right here, and store the calibration in the checkpoint's folder; ``overwrite``: also replace the evaluation
    of something else; ``answers``: per image, merged into one; ``tiling``: answer tiles, merged into one answer. Raises
    ConfigError, DataError, CheckpointError or VocabError before weights are loaded.
    """
    if calibrate and (tiling is not None or answers > 1):
        raise ConfigError("calibrate: it is fitted to one answer for each whole image; leave out tiles and answers")
    if calibrate and (name := name_of(model or config.model.model)) is not None:
        raise ConfigError(
            f"calibrate: a calibration is stored with the model, and {name} is in the hub's cache; copy it first: "
            f"coordexp model export {name} FOLDER"
        )
    path, rename = Path(model or config.model.model), rename or Renaming()
    config = with_own_template(config, path)
    listed = tuple(choose_list(checkpoint=read_card(path).classes, class_names=classes))
    folder = output or evaluation_folder(config.training.output_dir, path)
    source = data or config.custom.val_jsonl
    about = {
        "model": str(path),
        "data": str(source),
        "limit": config.custom.val_sample_limit if limit is None else limit,
        "fingerprints": [fingerprint(one) for one in (path, source) if one is not None and one.exists()],
        "prompt": config.template.prompt,
        "system": config.template.system,
        "score": "token_probability" if constant_score is None else "constant",
        "answering": _decoding(with_several_answers(AnswerConfig.of_run(config), answers)),
        **({"classes": list(classes)} if classes else {}),
        **({} if answers == 1 else {"answers": answers}),
        **({} if tiling is None else {"tiles": [tiling.width, tiling.height, tiling.overlap]}),
        **rename.about,
    }
    if calibrate:
        check_writable(path)
    check_replaced(folder, {"classes": None, "answers": None, "tiles": None, **about}, overwrite)
    jsonl, written, broken, photographs = answer_jsonl(
        config, console, f"evaluating {path}", path, data, limit, scored=constant_score is None, classes=classes,
        calibrates=calibrate, answers=answers, tiling=tiling,
    )  # fmt: skip
    # Before they are merged, which compares descriptions.
    named = rename(written, {obj.desc for one in photographs for obj in one.objects if obj.soft is None})
    files: list[Path] = []
    if calibrate:
        calibration = fit(named, str(jsonl))
        named = calibrated(named, calibration)
        if distributed.is_main():
            files.append(write_card(replace(read_card(path), calibration=calibration), path))
    detection = resolved_rollout(config).eval_detection
    options = detection.model_copy(update={"use_segm": segm or detection.use_segm}).scored(constant_score)
    single, merged = named, merge_all(named, answers)
    if tiling is not None:  # the answers of a tile are merged first, as for predictions
        single, merged = (merge_all_tiles(photographs, tiling, *one) for one in ((single, answers), (merged, 1)))
    by_answers = {} if answers == 1 else side_by_side(single, merged, options)
    about |= {"by_answers": by_answers} if by_answers else {}
    summary = summarise(merged, options, rename.note(written, named, calibrate), with_confidences=True)
    if broken:
        about["skipped"] = broken
        note = f"{len(broken)} images cannot be decoded and were not answered; the figures are of the others"
        summary = replace(summary, notes=(*summary.notes, note))
    if distributed.is_main():
        files += write_summary(folder, summary, merged, about, options, listed)
    return EvaluationResult(summary, tuple(merged), jsonl, folder / METRICS, tuple(files), by_answers)


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


def answer_jsonl(
    config: RunConfig | EvaluationConfig,
    console: Console,
    description: str,
    model: Path,
    data: Path | None = None,
    limit: int | None = None,
    *,
    scored: bool = False,
    classes: Sequence[str] = (),
    calibrates: bool = False,
    answers: int = 1,
    tiling: Tiling | None = None,
) -> tuple[Path, list[ImageAnswer], dict[str, str], list[ImageRecord]]:
    """The dataset (None: ``custom.val_jsonl``), all ranks' answers for it, and, by sample, why images that cannot be
    decoded were left out. Everything cheap is checked before weights are loaded. ``calibrates``: with raw confidences;
    ``answers``: of each image, in a row; ``tiling``: answers are those of tiles, followed by their photographs'."""
    config = with_own_template(config, model)
    answering = with_several_answers(AnswerConfig.of_run(config), answers)
    check_backend(answering.rollout_matching, bool(classes))
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
        console.print(f"skipped {sample}: {problem}", highlight=False, markup=False, soft_wrap=True)
    whole = [] if tiling is None else [record for at, record in enumerate(records) if at not in broken]
    asked = records if tiling is None else tile_records(whole, tiling)
    with (
        open_session(answering, model, classes) as session,
        reporting(console, description, _counted(tiling), stays=True) as on_progress,
        temporary_folder("coordexp-tiles-") as cut,
    ):
        seed = config.training.seed
        scorer = replace(session.scorer, calibration=None) if calibrates else session.scorer
        shown = asked if tiling is None else CutTiles(asked, cut, samples_of_batch(session.backend, answers))
        answered = answer_dataset(
            RecordDataset(shown, session.encoder.encode, config.custom.object_ordering, seed),
            session.backend,
            session.vocab,
            seed=seed,
            on_progress=on_progress,
            on_answer=on_progress,
            scorer=scorer if scored else None,
            count=answers,
            leave_out=broken if tiling is None else (),
        )
    return Path(jsonl), answered, skipped, whole
