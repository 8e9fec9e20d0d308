"""``coordexp predict``: images → answers with scores, written as they arrive; an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from coordexp import distributed
from coordexp.checkpoints.card import Card, read_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.config.resolved import AnswerConfig
from coordexp.data.class_list import choose_list
from coordexp.data.files import append_line, write_atomically
from coordexp.data.image_sources import FoundImages, find_images
from coordexp.data.preparation import ImagePreparation
from coordexp.data.progress_bar import say
from coordexp.data.tiles import whole_of
from coordexp.errors import DataError
from coordexp.evaluation.answers import (
    CLASS_LIST,
    METRICS,
    PREDICTIONS,
    SETTINGS,
    ImageAnswer,
    answer_batches,
    from_line,
    is_of,
    to_line,
    write_answers,
)
from coordexp.evaluation.coco_results import write_coco
from coordexp.evaluation.confidence import at_least
from coordexp.evaluation.drawing import save_drawings
from coordexp.evaluation.join_tiles import merge_tiles
from coordexp.evaluation.several_answers import merge_all
from coordexp.inference.asking import ONE_ANSWER, Asking
from coordexp.inference.session import checked_model, size_note
from coordexp.printable import printable
from coordexp.records import ImageRecord, read_lines

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
    min_confidence: float | None = None,
    overwrite: bool = False,
    asking: Asking = ONE_ANSWER,
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
        min_confidence: leave objects below out of everything but ``predictions.jsonl``.
        overwrite: delete the answers in ``output`` first.
        fix: what to do about answers of other settings in ``output``, for the error.

    Raises:
        ConfigError: as :meth:`Asking.checked`.
        DataError: ``output`` has answers of other settings or for other images, or an image cannot be read.
    """
    config = asking.checked(config)
    sources = [source] if isinstance(source, Path) else list(source)
    images = find_images(sources, limit=limit, skip_broken=skip_broken)
    records, samples = images.records, asking.samples(images.records)
    path = checked_model(config, model)
    card = read_card(path)
    _note(console, images, samples, card.preparation)
    listed = tuple(choose_list(checkpoint=card.classes, class_names=asking.classes))
    settings = _settings(config, path, card, sources, score, asking) | {CLASS_LIST: list(listed)}
    folder = AnswerFolder(output)
    distributed.join(use_cpu=config.use_cpu)
    with distributed.raise_on_all_ranks("coordexp predict"):
        if distributed.is_main():
            folder.claim(settings, [*records, *samples], overwrite, fix)
    with distributed.raise_on_all_ranks("coordexp predict"):  # after the first rank has deleted what is replaced
        known = folder.answers()
        resumed = sum(record.sample_id in known for record in records)
        todo = [at for at, one in enumerate(samples) if known.keys().isdisjoint((one.sample_id, whole_of(one)))]
    if todo:  # with all answers there, the model is not loaded
        with (
            asking.loaded(samples, config, path, "file", console, f"predicting with {path}") as (session, how),
            distributed.raise_on_all_ranks("coordexp predict"),
        ):
            scorer = session.scorer if isinstance(score, str) else None
            if scorer is not None and score == "confidence":
                scorer = replace(scorer, calibration=None)  # fitted on annotations that count as complete
            # Seeded by the images' positions in the source: an interrupted run answers as a whole one does.
            for batch in answer_batches(**how, positions=todo, scorer=scorer):
                merged = merge_all(batch, asking.answers)
                folder.append(_finished(answer, score, images.annotated) for answer in merged)
    distributed.barrier()
    if not distributed.is_main():
        return PredictionResult(len(records), resumed, (), images.skipped)
    whole = _in_order(folder.answers(), records, asking, images.annotated)
    files = [folder.join(whole)]
    whole, left_out = (whole, 0) if min_confidence is None else at_least(whole, min_confidence)
    has_polygons = any(obj.kind == "poly" for answer in whole for obj in answer.pred)
    files += write_coco(whole, output, segm=has_polygons, classes=listed)
    if save_images:
        files += save_drawings(whole, output / DRAWINGS)
    return PredictionResult(len(records), resumed, tuple(files), images.skipped, tuple(whole), left_out)


def _settings(
    config: AnswerConfig, model: Path, card: Card, sources: Sequence[Path], score: Score, asking: Asking
) -> dict[str, Any]:
    # Everything that an answer depends on.
    resize = card.preparation.resize
    calibration = card.calibration if score == "token_probability" else None
    return {
        "model": str(model.resolve()),
        "fingerprint": fingerprint(model),
        "source": str(sources[0].resolve()) if len(sources) == 1 else [str(one.resolve()) for one in sources],
        **asking.settings(config),
        "score": score,
        "resize": None if resize is None else asdict(resize),
        "calibration": None if calibration is None else asdict(calibration),
    }


def _finished(answer: ImageAnswer, score: Score, annotated: Collection[str]) -> ImageAnswer:
    # With the chosen scores, and without annotations that the source does not have.
    pred = answer.pred
    if score == "confidence":
        pred = tuple(replace(obj, score=obj.confidence) for obj in pred)
    elif not isinstance(score, str):
        pred = tuple(replace(obj, score=score) for obj in pred)
    return replace(answer, pred=pred, gt=answer.gt if answer.sample_id in annotated else None)


def _note(console: Console, images: FoundImages, asked: Sequence[ImageRecord], preparation: ImagePreparation) -> None:
    size = size_note(asked, preparation)
    lines = [f"note: {note}" for note in (*filter(None, [size]), *images.passed_over)]
    lines += [printable(f"skipped {image}: {reason}") for image, reason in images.skipped]
    for line in lines:
        say(console, line)


def _in_order(
    answered: dict[str, ImageAnswer], records: Sequence[ImageRecord], asking: Asking, annotated: Collection[str]
) -> list[ImageAnswer]:
    # An answer for each record, with the annotations of now: an earlier run's answers depend on the pictures alone.
    answers = []
    for record in records:
        answer = answered.get(record.sample_id)
        if answer is None and asking.tiling is not None:
            tiles = [answered[tile.sample_id] for tile in asking.samples([record])]
            answer = merge_tiles(record, asking.tiling, tiles)
        assert answer is not None, f"{record.sample_id} has no answer"
        answers.append(replace(answer, gt=record.objects if record.sample_id in annotated else None))
    return answers


@dataclass(frozen=True, slots=True)
class AnswerFolder:
    """``predictions.jsonl``, ``predictions.rank*.jsonl`` of further ranks until :meth:`join`, and the settings that
    all of them share."""

    path: Path

    def claim(self, settings: dict[str, Any], records: Sequence[ImageRecord], overwrite: bool, fix: str) -> None:
        """Make the folder that of ``settings`` and ``records``; ``overwrite`` deletes its answers first, also those of
        an evaluation. Raises DataError, with ``fix``, if it has answers of other settings, or for other pictures; and
        if its drawings would replace pictures of ``records``."""
        self.path.mkdir(parents=True, exist_ok=True)
        path, drawings = self.path / SETTINGS, (self.path / DRAWINGS).resolve()
        if not overwrite and not path.is_file() and any(self.path.iterdir()):
            raise DataError(f"the folder is not empty and has no {SETTINGS}; {fix}", path=self.path)
        if any(one.resolve().is_relative_to(drawings) for one in {record.image.parent for record in records}):
            detail = f"its folder {DRAWINGS} is for drawings, which would replace the images to answer in it"
            raise DataError(f"{detail}; name another folder", path=self.path)
        if overwrite:
            if path.is_file():
                shutil.rmtree(self.path / DRAWINGS, ignore_errors=True)
            figures = [self.path / METRICS] if (self.path / PREDICTIONS).is_file() else []  # of these answers
            for old in (*figures, *self._parts(), path):
                old.unlink(missing_ok=True)
        if path.is_file():
            self._check_settings(settings, fix)
            self._check_pictures(records, fix)
            path.touch()  # pictures that are answered from now on may be newer than the first ones
        else:
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        times = [path.stat().st_mtime_ns, *(one.image.stat().st_mtime_ns for one in records if one.image.is_file())]
        os.utime(path, ns=(max(times), max(times)))  # pictures may be of another clock, or another time zone

    def _check_settings(self, settings: dict[str, Any], fix: str) -> None:
        earlier = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
        other = sorted(name for name in settings.keys() | earlier.keys() if settings.get(name) != earlier.get(name))
        if other:
            raise DataError(
                f"has answers made with another {', '.join(other)} ({earlier.get(other[0])!r}, now "
                f"{settings.get(other[0])!r}); {fix}",
                path=self.path,
            )

    def _check_pictures(self, records: Sequence[ImageRecord], fix: str) -> None:
        claimed = (self.path / SETTINGS).stat().st_mtime
        answered = self.answers()
        for record in records:
            if (answer := answered.get(record.sample_id)) is None:
                continue
            is_tile = whole_of(record) != record.sample_id  # its picture was a temporary file
            # Images in shards have no time of their own.
            is_newer = record.image.is_file() and record.image.stat().st_mtime > claimed
            if is_newer or not (is_tile or is_of(answer, record)):
                other = f"another picture now ({record.image}), or a newer one, than was answered"
                raise DataError(f"{record.sample_id} is {other}; {fix}", path=self.path)
        if lost := answered.keys() - {record.sample_id for record in records}:
            asked = len({whole_of(record) for record in records})
            raise DataError(
                f"has answers for {len(lost)} images that are not among these {asked}, such as {min(lost)}; {fix}",
                path=self.path,
            )

    def answers(self) -> dict[str, ImageAnswer]:
        """The answers so far, of all ranks, by sample."""
        # Text after the last line break is a line that a kill left unfinished.
        lines = ((part, number, line) for part in self._parts() for number, line in read_lines(part, whole=True))
        answers = [from_line(line, path=part, line=number) for part, number, line in lines]
        return {answer.sample_id: answer for answer in answers}

    def append(self, answers: Iterable[ImageAnswer]) -> None:
        """Add answers of this rank, in one piece."""
        name = PREDICTIONS if distributed.is_main() else f"predictions.rank{distributed.rank()}.jsonl"
        if lines := "".join(to_line(answer) + "\n" for answer in answers):
            append_line(self.path / name, lines.encode("utf-8"))

    def join(self, answers: Sequence[ImageAnswer]) -> Path:
        """Make ``answers``, in this order, the folder's only ones. Returns their file."""
        whole = self.path / PREDICTIONS
        write_answers(answers, whole)
        for part in set(self._parts()) - {whole}:
            part.unlink()
        return whole

    def _parts(self) -> list[Path]:
        parts = (self.path / PREDICTIONS, *sorted(self.path.glob("predictions.rank*.jsonl")))
        return [part for part in parts if part.is_file()]
