"""``coordexp predict``: images → answers with scores, written as they come; an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from coordexp import distributed
from coordexp.checkpoints.folder import checkpoint_fingerprint
from coordexp.config.schema import AnswerConfig
from coordexp.data.dataset import RecordDataset
from coordexp.data.files import append_line, whole_file, write_atomically
from coordexp.data.image_sources import FoundImages, find_images
from coordexp.data.preparation import ImagePreparation, read_preparation
from coordexp.data.progress_bar import reporting
from coordexp.errors import DataError
from coordexp.evaluation.answering import Scorer, answer_samples, counted_from, share_out
from coordexp.evaluation.answers import PREDICTIONS, ImageAnswer, from_line, read_answers, to_line
from coordexp.evaluation.coco import write_coco
from coordexp.evaluation.drawing import save_drawings
from coordexp.inference.session import checked_model, open_session
from coordexp.modeling.scores import ConfidenceScorer
from coordexp.records import ImageRecord
from coordexp.rollouts import DatasetSeeds, check_backend

SETTINGS = "prediction.json"
Score = Literal["token_probability", "confidence"] | float


@dataclass(frozen=True, slots=True)
class PredictionResult:
    """The folder of the answers, their number, and how many of them an earlier run made; (image, reason) of each that
    could not be read; the answers themselves, on the first rank (none elsewhere)."""

    folder: Path
    images: int
    resumed: int
    files: tuple[Path, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    answers: tuple[ImageAnswer, ...] = ()


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
) -> PredictionResult:
    """Answer every image of ``source`` (:func:`~coordexp.data.image_sources.find_images`) and write
    ``predictions.jsonl`` and COCO results to ``output``.

    Each batch is on the disk before the next one starts; run again with the same settings, it continues where it
    stopped. Under torchrun each rank writes its share into a file of its own, and the first rank joins them at the end.

    Args:
        model: None means ``model.model``.
        limit: at most so many images.
        score: of an object: the probability of its tokens (to rank), its confidence (to act on), or one number for all.
        skip_broken: leave out images that cannot be read.
        save_images: draw each image with its answer too.
        classes: the only descriptions that answers may contain; empty for any.

    Raises:
        DataError: ``output`` has the answers of other settings, or an image cannot be read.
    """
    from accelerate import PartialState

    check_backend(config.rollout_matching, bool(classes))
    sources = [source] if isinstance(source, Path) else list(source)
    images = find_images(sources, limit=limit, skip_broken=skip_broken)
    records, seed = images.records, config.seed
    path = checked_model(config, model)
    preparation = read_preparation(path)
    settings = _settings(config, path, sources, score, classes)
    if preparation.resize is not None:
        settings["resize"] = preparation.resize.to_metadata()
    _note(console, images, preparation)
    PartialState(cpu=config.use_cpu)  # joins the process group under torchrun: the next line needs it
    todo = _unanswered(records, output, settings)
    part = _part(output, distributed.rank())
    with (
        open_session(config, path, classes) as session,
        reporting(console, f"predicting with {path}", stays=True) as on_progress,
    ):
        batch_size = session.backend.batch_size
        batches = share_out(todo, distributed.world_size(), batch_size)[distributed.rank()]
        dataset = RecordDataset(records, session.encoder.encode, "file", seed)
        scorer: Scorer | None = None
        if isinstance(score, str):
            scorer = session.scorer if score == "token_probability" else ConfidenceScorer(session.scorer)
        done, total = 0, sum(len(batch) for batch in batches)
        with distributed.raise_on_all_ranks("coordexp predict"):
            if total:
                on_progress(0, total)
            for batch in batches:
                samples = [dataset[i] for i in batch]
                # Seeded by the images' positions in the source: an interrupted run answers as a whole one does.
                seeds, within = DatasetSeeds(seed, batch.start), counted_from(done, total, on_progress)
                answers = answer_samples(samples, session.backend, session.loaded.vocab, seeds, scorer, within)
                if answers:
                    lines = [to_line(_finished(answer, images.annotated, score)) for answer in answers]
                    append_line(part, "".join(f"{line}\n" for line in lines).encode("utf-8"))
                done += len(batch)
                on_progress(done, total)
    distributed.barrier()
    answers, files = _join_parts(output, records, save_images) if distributed.is_main() else ([], [])
    return PredictionResult(
        output, len(records), len(records) - len(todo), tuple(files), images.skipped, tuple(answers)
    )


def _finished(answer: ImageAnswer, annotated: frozenset[str], score: Score) -> ImageAnswer:
    """Without ground truth if the image came without annotations, and with the same score for all if one was given."""
    pred = answer.pred if isinstance(score, str) else tuple(replace(obj, score=score) for obj in answer.pred)
    return replace(answer, pred=pred, gt=answer.gt if answer.sample_id in annotated else None)


def _settings(
    config: AnswerConfig, model: Path, sources: Sequence[Path], score: Score, classes: Sequence[str]
) -> dict[str, Any]:
    """Everything that an answer depends on."""
    rollout = config.rollout_matching
    return {
        "model": str(model.resolve()),
        "fingerprint": checkpoint_fingerprint(model),
        "source": str(sources[0].resolve()) if len(sources) == 1 else [str(one.resolve()) for one in sources],
        "dtype": config.model.dtype,
        "prompt": config.template.prompt,
        "system": config.template.system,
        "seed": config.seed,
        "backend": rollout.rollout_backend,
        "max_new_tokens": rollout.max_new_tokens,
        "decoding": rollout.decoding.model_dump(mode="json"),
        "num_beams": rollout.num_beams,
        "repetition_penalty": rollout.repetition_penalty,
        "repeat_terminate": rollout.repeat_terminate.model_dump(mode="json"),
        "score": score,
        **({"classes": list(classes)} if classes else {}),
    }


def _note(console: Console, images: FoundImages, preparation: ImagePreparation) -> None:
    """Print what is unusual about the images before they are answered."""
    records = images.records
    unlike = [record for record in records if preparation.is_unlike_training(record.width, record.height)]
    if unlike and preparation.seen_pixels is not None:
        least, most = preparation.seen_pixels
        first = unlike[0]
        console.print(
            f"note: {len(unlike)} of {len(records)} images are far from the size that this model was trained at "
            f"({least:,} to {most:,} pixels), the first is {first.sample_id} ({first.width}x{first.height}); answers "
            "may be poor. Resize them, or train on what coordexp data convert made, whose rule travels in checkpoints",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    for image, reason in images.skipped:
        console.print(f"skipped {image}: {reason}", highlight=False, markup=False, soft_wrap=True)


def _unanswered(records: Sequence[ImageRecord], output: Path, settings: dict[str, Any]) -> list[int]:
    """Take the folder for answers of these settings. Returns: the places of the records that it lacks; a collective
    call, as all ranks must share out the same images before any of them writes."""
    with distributed.raise_on_all_ranks("coordexp predict"):
        if distributed.is_main():
            _claim(output, settings)
        known = {answer.sample_id for part in _parts(output) for answer in _read_part(part)}
        return [index for index, record in enumerate(records) if record.sample_id not in known]


def _claim(output: Path, settings: dict[str, Any]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    path = output / SETTINGS
    if not path.is_file():
        if any(output.iterdir()):
            raise DataError(f"the folder is not empty and holds no {SETTINGS}; name a new one", path=output)
        write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    other = sorted(name for name in settings.keys() | earlier.keys() if settings.get(name) != earlier.get(name))
    if other:
        raise DataError(
            f"holds answers made with another {', '.join(other)} ({earlier.get(other[0])!r}, now "
            f"{settings.get(other[0])!r}); name a new folder, or go on with the same settings",
            path=output,
        )


def _part(output: Path, rank: int) -> Path:
    return output / (PREDICTIONS if rank == 0 else f"predictions.rank{rank}.jsonl")


def _parts(output: Path) -> list[Path]:
    return [output / PREDICTIONS, *sorted(output.glob("predictions.rank*.jsonl"))]


def _read_part(path: Path) -> list[ImageAnswer]:
    """What stands behind the last line break is a line that a kill left unfinished."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [from_line(line, path=path, line=number) for number, line in enumerate(lines, start=1)]


def _join_parts(
    output: Path, records: Sequence[ImageRecord], save_images: bool
) -> tuple[list[ImageAnswer], list[Path]]:
    """One file in the order of the source, COCO's results from it, and with ``save_images`` the drawings."""
    by_id = {answer.sample_id: answer for part in _parts(output) for answer in _read_part(part)}
    answers = [by_id[record.sample_id] for record in records]
    whole = output / PREDICTIONS
    with whole_file(whole) as file:
        file.writelines(f"{to_line(answer)}\n" for answer in answers)
    for part in _parts(output)[1:]:
        part.unlink()
    assert len(read_answers(whole)) == len(records)
    paths = [whole, *write_coco(answers, output, "bbox", None)]
    if any(obj.kind == "poly" for answer in answers for obj in answer.pred):
        paths += write_coco(answers, output, "segm", None)
    if save_images:
        paths += save_drawings(answers, output / "images")
    return answers, list(dict.fromkeys(paths))
