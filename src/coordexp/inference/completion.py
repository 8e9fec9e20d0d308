"""``coordexp data complete``: add what a model finds and the annotations lack, as soft objects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from coordexp import distributed
from coordexp.checkpoints.card import with_own_template
from coordexp.checkpoints.fetch import with_model_here
from coordexp.config import load_config
from coordexp.config.resolved import AnswerConfig
from coordexp.data.completed import COMPLETION
from coordexp.data.files import check_new_file, check_picture, is_same_file, write_atomically
from coordexp.data.jsonl import clean_desc, read_jsonl, write_jsonl
from coordexp.data.polygons import shape_area
from coordexp.data.tiles import Tiling
from coordexp.errors import ConfigError, DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, is_of, read_answers
from coordexp.evaluation.drawing import draw_contact_sheet
from coordexp.geometry import aabb, mask_iou
from coordexp.inference.session import inference_config
from coordexp.matching import MAX_OVERLAP_OF_OTHERS, MatchingConfig, match_objects
from coordexp.records import NUM_BINS, GTObject, ImageRecord


class PredictionOutcome(StrEnum):
    """The outcome of a prediction: the first of these that applies."""

    MATCHED = "matched"  # one to one with an object of the dataset, by mask IoU
    BELOW_THRESHOLD = "below_threshold"
    TOO_SMALL = "too_small"
    REFUSED_DESC = "refused_desc"  # a description that no dataset may contain
    UNKNOWN_DESC = "unknown_desc"  # annotated nowhere in the dataset; only with ``known_descs``
    OVERLAPS_ANNOTATED = "overlaps_annotated"  # an annotated object that is matched with another prediction
    OVERLAPS_SOFT = "overlaps_soft"  # an object of an earlier completion
    OVERLAPS_ADDED = "overlaps_added"  # a prediction of higher confidence that was added
    ADDED = "added"


@dataclass(frozen=True, slots=True)
class CompletionRules:
    """When an object is added, and with which weight.

    Args:
        threshold: least confidence, 0.001 to 1.
        max_overlap: highest mask IoU with any other object, 0 to 1.
        min_size: percent: square root of the bounding box's share of the image.
        weight: of every added object, 0.001 to 1; None means its confidence.
        known_descs: add only descriptions that are annotated somewhere in the dataset.

    Raises:
        DataError: a number outside of its range.
    """

    threshold: float = 0.5
    max_overlap: float = MAX_OVERLAP_OF_OTHERS
    min_size: float = 1.0
    weight: float | None = None
    known_descs: bool = False

    def __post_init__(self) -> None:
        ranges = {"threshold": (0.001, 1), "max_overlap": (0, 1), "min_size": (0, 100), "weight": (0.001, 1)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if name == "weight" and value is None:
                continue
            if not isinstance(value, int | float) or not low <= value <= high:
                raise DataError(f"{name} is {value!r}; expected {low} to {high}")


@dataclass(frozen=True, slots=True)
class Completed:
    """A record with its soft objects; ``outcomes`` by prediction; ``scores`` of the added objects, which are the last
    ones of the record, in this order."""

    record: ImageRecord
    outcomes: tuple[PredictionOutcome, ...]
    scores: tuple[float, ...]

    @property
    def added(self) -> tuple[GTObject, ...]:
        return self.record.objects[len(self.record.objects) - len(self.scores) :]


@dataclass(frozen=True, slots=True)
class CompletionCounts:
    """Counts of a completion, with the names of its JSON. ``annotated``, ``soft_before``: objects before it;
    ``outcomes``: of the ``predicted`` objects, every outcome is named; ``dropped_entries``: those that the parser
    refused, by reason."""

    images: int = 0
    images_with_predictions: int = 0
    truncated_answers: int = 0
    annotated: int = 0
    soft_before: int = 0
    predicted: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    added_by_class: dict[str, int] = field(default_factory=dict)
    dropped_entries: dict[str, int] = field(default_factory=dict)


def completion_config(
    model: Path | None,
    *,
    config: Path | None,
    prompt: str | None,
    batch_size: int | None,
    arguments: Sequence[str] = (),
) -> AnswerConfig:
    """The configuration of ``config`` if given; else that of ``model``'s own run, with transformers as the backend.
    Greedy. ``arguments`` (``key.path=value``) are put on top. Raises ConfigError if neither is named, and as
    :func:`inference_config`."""
    if config is not None:
        values: dict[str, Any] = {} if model is None else {"model.model": str(model)}
        if prompt is not None:
            values |= {"template.prompt": prompt, "template.allow_prompt_change": True}
        run = load_config(config, values, arguments)
        if run.rollout_matching is not None:
            values["rollout_matching.decoding.temperature"] = 0.0
            values |= {} if batch_size is None else {"rollout_matching.decode_batch_size": batch_size}
            run = load_config(config, values, arguments)
        return AnswerConfig.of_run(with_own_template(with_model_here(run)))
    if model is None:
        raise ConfigError("name the checkpoint that answers with --model, or a run's YAML")
    return inference_config(model, arguments, batch_size=batch_size, prompt=prompt)


def check_files(source: Path, out: Path, sheet: Path | None, sheet_images: int, overwrite: bool) -> None:
    """Check what a completion writes, before anything is answered. Raises DataError or ConfigError: ``out`` is there
    and not to be replaced, is a folder, or is ``source``; ``sheet`` is not a picture, is one of the others, or shows no
    image."""
    if is_same_file(out, source):
        raise ConfigError(f"{out}: is the dataset to complete; name another file for the new one")
    check_new_file(out, overwrite)
    if sheet is not None:
        check_picture(sheet)
        if is_same_file(sheet, source) or is_same_file(sheet, out):
            raise ConfigError(f"{sheet}: is a dataset of this completion; name another file for the sheet")
    if sheet_images < 1:
        raise ConfigError(f"sheet_images: {sheet_images}; give at least 1")


def answers_folder(out: Path) -> Path:
    """Where the answers of a completion are that writes ``out``."""
    return out.with_name(f"{out.stem}.answers")


def run_completion(
    run: AnswerConfig,
    console: Console,
    *,
    source: Path,
    out: Path,
    rules: CompletionRules,
    sheet: Path | None = None,
    sheet_images: int = 12,
    tiling: Tiling | None = None,
) -> tuple[CompletionCounts, list[Path]] | None:
    """Answer every image of ``source`` with ``run.model``, and write the completed dataset to ``out``.

    Answers are written to ``STEM.answers`` next to it as they arrive: the same call again continues where it stopped,
    and other rules reuse the answers. ``STEM.completion.json`` has the counts. ``sheet``: a picture of the
    ``sheet_images`` images with the most likely missed objects. ``tiling``: answer tiles of each image;
    ``rules.min_size`` is then of a tile. Returns the counts and the files written; None on ranks other than the first.
    Raises as :func:`~coordexp.inference.prediction.run_prediction` and
    :func:`complete_records`.
    """
    from coordexp.inference.asking import Asking  # imports torch
    from coordexp.inference.prediction import run_prediction

    folder = answers_folder(out)
    run_prediction(
        run, console, source=source, output=folder, score="confidence", asking=Asking(tiling=tiling),
        fix="delete that folder of answers, or name another file with --out",
    )  # fmt: skip
    result = None
    with distributed.raise_on_all_ranks("coordexp data complete"):
        if distributed.is_main():
            from coordexp.checkpoints.fingerprints import fingerprint
            from coordexp.modeling.load import load_vocab

            model = Path(run.model.model)
            origin = {"model": str(model), "fingerprint": fingerprint(model)}
            answer_of = {answer.sample_id: answer for answer in read_answers(folder)}
            done, counts = complete_records(read_jsonl(source), answer_of, rules, origin)
            write_jsonl([item.record for item in done], out)
            about = {"source": str(source), **origin, "prompt": run.template.prompt, "rules": asdict(rules)}
            about |= {} if tiling is None else {"tiles": asdict(tiling)}
            summary = out.with_name(f"{out.stem}.completion.json")
            write_atomically(summary, json.dumps(about | asdict(counts), indent=2, ensure_ascii=False) + "\n")
            files = [out, summary]
            if sheet is not None and (shown := most_likely_missed(done, sheet_images)):
                files.append(draw_contact_sheet(shown, load_vocab(model), sheet))
            result = counts, files
    return result


def complete_records(
    records: Sequence[ImageRecord],
    answers: Mapping[str, ImageAnswer],
    rules: CompletionRules,
    origin: Mapping[str, str],
) -> tuple[list[Completed], CompletionCounts]:
    """Add the predictions of ``answers`` (by sample id, with confidences as scores) that ``records`` lack. ``origin``
    names the checkpoint, for the provenance of each record. Raises DataError for an image without an answer, an answer
    for another image, or metadata that is in the way."""
    known = {obj.desc for record in records for obj in record.objects if obj.soft is None}
    used = []
    for record in records:
        answer = answers.get(record.sample_id)
        if answer is None:
            raise DataError(f"{record.sample_id}: has no answer; answer every image of the dataset first")
        if not is_of(answer, record):
            raise DataError(
                f"{record.sample_id}: is {record.image} now, but the answer is for {answer.image}; remove the saved "
                "answers, so that the dataset as it is now is answered"
            )
        used.append(answer)
    done = [_complete(record, answer, rules, origin, known) for record, answer in zip(records, used, strict=True)]
    objects = [obj for record in records for obj in record.objects]
    soft = sum(obj.soft is not None for obj in objects)
    outcomes = Counter(outcome for item in done for outcome in item.outcomes)
    counts = CompletionCounts(
        images=len(records),
        images_with_predictions=sum(bool(answer.pred) for answer in used),
        truncated_answers=sum(answer.truncated for answer in used),
        annotated=len(objects) - soft,
        soft_before=soft,
        predicted=sum(len(answer.pred) for answer in used),
        outcomes={outcome.value: outcomes[outcome] for outcome in PredictionOutcome},
        added_by_class=dict(Counter(obj.desc for item in done for obj in item.added).most_common()),
        dropped_entries=dict(sum((Counter(dict(answer.dropped)) for answer in used), Counter())),
    )
    assert outcomes.total() == counts.predicted, "a prediction went uncounted"
    return done, counts


def _complete(
    record: ImageRecord, answer: ImageAnswer, rules: CompletionRules, origin: Mapping[str, str], known: set[str]
) -> Completed:
    earlier = record.metadata.get(COMPLETION, [])
    if not isinstance(earlier, list):
        raise DataError(f"{record.sample_id}: metadata.{COMPLETION} is not a list of completions; rename that field")
    scores = [obj.score for obj in answer.pred if obj.score is not None]
    if len(scores) != len(answer.pred):
        raise DataError(f"{answer.sample_id}: a prediction has no score, so its confidence is unknown")
    pred = answer.pred
    if answer.tiling is not None:  # as they are added: fractions of bins are rounded, still compared exactly
        pred = tuple(replace(obj, bins=tuple(float(round(k)) for k in obj.bins)) for obj in pred)
    outcomes: dict[int, PredictionOutcome] = {}
    # A pair above the allowed overlap is one object. A pair exactly at a gate passes it, so take the next number.
    gate = min(1.0, float(np.nextafter(rules.max_overlap, 2.0)))
    for pair in match_objects(pred, record.objects, MatchingConfig(maskiou_gate=gate)).pairs:
        outcomes[pair.pred_idx] = PredictionOutcome.MATCHED
    others: dict[PredictionOutcome, list[GTObject | ScoredObject]] = {
        PredictionOutcome.OVERLAPS_ANNOTATED: [obj for obj in record.objects if obj.soft is None],
        PredictionOutcome.OVERLAPS_SOFT: [obj for obj in record.objects if obj.soft is not None],
        PredictionOutcome.OVERLAPS_ADDED: [],
    }
    percent = 100.0
    if answer.tiling is not None:  # of the tile, which is what the model saw
        _, _, width, height = answer.tiling.windows(answer.width, answer.height)[0]
        percent *= (answer.width * answer.height / (width * height)) ** 0.5
    for i in sorted(range(len(pred)), key=lambda i: -scores[i]):  # stable: equal ones in the answer's order
        if i in outcomes:
            continue
        obj = pred[i]
        x1, y1, x2, y2 = aabb(answer.pred[i])
        size = percent * ((x2 - x1) * (y2 - y1)) ** 0.5 / (NUM_BINS - 1)
        try:
            desc = clean_desc(obj.desc)
        except ValueError:
            desc = None
        if scores[i] < rules.threshold:
            outcomes[i] = PredictionOutcome.BELOW_THRESHOLD
        elif shape_area(obj.kind, obj.bins) == 0 or size < rules.min_size:
            outcomes[i] = PredictionOutcome.TOO_SMALL
        elif desc is None:
            outcomes[i] = PredictionOutcome.REFUSED_DESC
        elif rules.known_descs and desc not in known:
            outcomes[i] = PredictionOutcome.UNKNOWN_DESC
        else:
            overlaps = (
                outcome
                for outcome, objects in others.items()
                if any(mask_iou(obj, other) > rules.max_overlap for other in objects)
            )
            outcomes[i] = next(overlaps, PredictionOutcome.ADDED)
        if outcomes[i] is PredictionOutcome.ADDED:
            others[PredictionOutcome.OVERLAPS_ADDED].append(obj)
    new, kept = [], []
    refused: Counter[str] = Counter()
    for i, obj in enumerate(pred):
        if outcomes[i] is PredictionOutcome.ADDED:
            weight = min(1.0, round(scores[i], 4)) if rules.weight is None else rules.weight
            new.append(GTObject(clean_desc(obj.desc), obj.kind, tuple(map(int, obj.bins)), weight))
            kept.append(round(scores[i], 4))
        elif outcomes[i] is not PredictionOutcome.MATCHED:
            refused[outcomes[i].value] += 1
    entry = {
        **origin,
        "threshold": rules.threshold,
        "max_overlap": rules.max_overlap,
        "added": [{"object": len(record.objects) + k, "score": score} for k, score in enumerate(kept)],
        "refused": dict(refused),
    }
    metadata = {**record.metadata, COMPLETION: [*earlier, entry]}
    completed = replace(record, objects=(*record.objects, *new), metadata=metadata)
    return Completed(completed, tuple(outcomes[i] for i in range(len(pred))), tuple(kept))


def most_likely_missed(done: Sequence[Completed], count: int) -> list[ImageRecord]:
    """The records of the most confident added objects, each once; added objects show their confidence in the
    description, for a picture."""
    completed = sorted((item for item in done if item.scores), key=lambda item: -max(item.scores))
    shown = []
    for item in completed[:count]:
        named = [replace(o, desc=f"{o.desc} {score:.2f}") for o, score in zip(item.added, item.scores, strict=True)]
        before = item.record.objects[: len(item.record.objects) - len(named)]
        shown.append(replace(item.record, objects=(*before, *named)))
    return shown
