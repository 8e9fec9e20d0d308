"""The files of a run → what the viewer shows: answers with their matches, tokens with their roles, curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.checkpoints.folder import RESOLVED_CONFIG
from coordexp.checkpoints.run_folder import LAST_EVALUATION, checkpoints_in
from coordexp.config.source import read_document
from coordexp.coords import CoordVocab
from coordexp.errors import DataError
from coordexp.evaluation.answers import (
    PREDICTIONS,
    ImageAnswer,
    ScoredObject,
    picture_of,
    read_answers,
)
from coordexp.evaluation.detection import IOU_THRESHOLD, assigner, match_answer
from coordexp.reading import read_json
from coordexp.records import GTObject, PredictedObject, TokenRole
from coordexp.rollouts.answer_state import AnswerGrammar, forced_positions

if TYPE_CHECKING:
    from coordexp.recording.rollout_record import RolloutRecord

BEHIND_CUT = "BEHIND_CUT"  # tokens of the answer that are not part of the target
_RECORDS = "rollout_records"


@dataclass(frozen=True, slots=True)
class ViewShape:
    """An object to draw. ``partner``: index of its match on the other side, or None. ``renamed``: index of the object
    there that it covers under another name. ``soft``: its weight, if a model added it. ``score``: its
    confidence, or the raw score if it has none."""

    desc: str
    kind: str
    bins: tuple[float, ...]
    partner: int | None
    iou: float | None = None
    score: float | None = None
    name: str = ""
    soft: float | None = None
    renamed: int | None = None


@dataclass(frozen=True, slots=True)
class ViewTokens:
    """Tokens with runs of (role, count), and losses of some positions in nats. ``forced``: runs of (first position,
    count) that JSON leaves no choice about."""

    pieces: tuple[str, ...]
    roles: tuple[tuple[str, int], ...]
    loss: tuple[tuple[int, float], ...] = ()
    forced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ViewRecord:
    """One answer. ``loss``: mean over its supervised tokens. ``step``: from 1, as logs and TensorBoard count."""

    sample_id: str
    step: int | None
    image: str
    width: int
    height: int
    gt: tuple[ViewShape, ...]
    pred: tuple[ViewShape, ...]
    annotated: bool
    dropped: Mapping[str, int]
    truncated: bool
    repeat_terminated: bool
    text: str
    loss: float | None = None
    loss_by_role: Mapping[str, float] | None = None
    rollout: ViewTokens | None = None
    target: ViewTokens | None = None
    other: ViewRecord | None = None  # the second run's answer to the same image


@dataclass(frozen=True, slots=True)
class ViewData:
    """Everything on the page. ``curves``: metric → (step, value) points; ``notes`` explain what is not shown; ``runs``:
    names of the two runs, if two are compared."""

    title: str
    records: tuple[ViewRecord, ...]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


def collect(source: Path, vocab: CoordVocab | None = None, max_records: int = 1000) -> ViewData:
    """Read a run's folder, a folder or file of rollout records, or predictions. ``vocab``: of the tokenizer that wrote
    the answers; without it tokens are not shown. More than ``max_records`` are thinned out evenly over the run, with
    a note. Raises DataError if nothing there can be shown."""
    records: list[ViewRecord] = []
    notes: list[str] = []
    if not source.exists():
        raise DataError("no such file or folder", path=source)
    recorded = rollout_records_at(source)
    if recorded is not None:
        from coordexp.recording.rollout_record import read_records  # answers are shown without it

        rollouts = read_records(recorded)
        rollouts.sort(key=lambda record: (record.where.global_step, record.where.rank, record.where.sample_idx))
        grammar = None if vocab is None else AnswerGrammar(vocab)
        records += [_from_record(record, grammar) for record in rollouts]
    folders = (source, source / "evaluation")
    if any((folder / PREDICTIONS).is_file() for folder in folders) or not (recorded or source.is_dir()):
        records += [_from_answer(answer) for answer in read_answers(source)]
    if not records and (source / LAST_EVALUATION).is_file():
        records = [_from_answer(answer) for answer in read_answers(source / LAST_EVALUATION)]
        notes.append("these are the answers of the last evaluation while the run trained")
    curves = _curves(source)
    if not records:
        resolved = source / RESOLVED_CONFIG
        fix = (
            f"let its model answer: coordexp evaluate {resolved if resolved.is_file() else 'RUN.yaml'} --model {source}"
            "; stage 2 records its rollouts with rollout_matching.monitor_dump.enabled: true"
        )
        if not curves:
            missing = "no rollout records, no predictions.jsonl and no trainer_state.json"
            raise DataError(f"nothing to show: {missing}; {fix}", path=source)
        notes.append(f"no answers are recorded, so only curves are shown; {fix}")
    records = _thinned(records, max_records, notes)
    if vocab is None and any(record.step is not None for record in records):
        notes.append("no tokenizer was found, so tokens are not shown; name the checkpoint with --model")
    title = "/".join(source.absolute().parts[-2:]).lstrip("/")
    return ViewData(title, tuple(records), curves, tuple(notes))


def _thinned(records: list[ViewRecord], most: int, notes: list[str]) -> list[ViewRecord]:
    if len(records) <= most:
        return records
    notes.append(f"{len(records)} records; shown are {most}, evenly over all of them (--max-records)")
    return [records[i * len(records) // most] for i in range(most)]


def compare(first: ViewData, second: ViewData, max_records: int = 1000) -> ViewData:
    """Both runs' answers to the same image at the same step, as one record each; others are counted in a note. Raises
    DataError if the runs share no image."""
    others = {_picture_of(record): record for record in second.records}
    records = [
        replace(record, other=others[_picture_of(record)]) for record in first.records if _picture_of(record) in others
    ]
    if not records:
        raise DataError(f"{first.title} and {second.title}: no image is answered in both; let both answer one dataset")
    names = (first.title, second.title)
    if first.title == second.title:  # of folders whose last two parts are equal
        names = (f"{first.title} (first)", f"{second.title} (second)")
    notes = [note for data in (first, second) for note in data.notes]
    for name, data in zip(names, (first, second), strict=True):
        if left := len(data.records) - len(records):
            notes.append(f"{left} records of {name} are not shown: the other run has no answer to them")
    if first.curves:
        notes.append(f"the curves are those of {names[0]}")
    shown = tuple(_thinned(records, max_records, notes))
    return ViewData(" and ".join(names), shown, first.curves, tuple(notes), names)


def _picture_of(record: ViewRecord) -> tuple[object, ...]:
    return record.sample_id, record.step, *picture_of(record.image, record.width, record.height)


def find_checkpoint(source: Path) -> Path | None:
    """The checkpoint with the tokenizer of the records: the run's own, or the one that it started from."""
    for folder in (source, source.parent, source.parent.parent) if source.is_dir() else source.parents[:3]:
        if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file():
            return folder
        resolved = folder / RESOLVED_CONFIG
        section = read_document(resolved).data.get("model") if resolved.is_file() else None
        model = section.get("model") if isinstance(section, dict) else None
        if model is not None and (Path(str(model)) / "tokenizer.json").is_file():
            return Path(str(model))
    return None


def rollout_records_at(source: Path) -> Path | None:
    """The file or folder of rollout records that ``source`` names or contains."""
    if source.is_file() and source.name.startswith("rollouts_"):
        return source
    folders = (source / _RECORDS, source)
    return next((folder for folder in folders if any(folder.glob("rollouts_rank*.jsonl"))), None)


def _from_record(record: RolloutRecord, grammar: AnswerGrammar | None) -> ViewRecord:
    losses = [loss for _, loss in record.token_loss or ()]
    rollout = target = None
    if grammar is not None:
        rollout = _rollout_tokens(record, grammar)
        target = ViewTokens(
            _pieces(record.target.token_ids, grammar.vocab), record.target.roles, record.token_loss or ()
        )
    gt, pred = _shapes(
        record.ground_truth,
        [(obj, f"object_{obj.index}", None) for obj in record.parse.objects],
        [(pair.pred_idx, pair.gt_idx, pair.iou) for pair in record.match.pairs],
    )
    return ViewRecord(
        **_same(record),
        step=record.where.global_step + 1,
        gt=gt,
        pred=pred,
        annotated=True,
        dropped={reason.value: count for reason, count in record.parse.dropped.items() if count},
        loss=round(sum(losses) / len(losses), 4) if losses else None,
        loss_by_role=record.loss_by_role,
        rollout=rollout,
        target=target,
    )


def _from_answer(answer: ImageAnswer) -> ViewRecord:
    named = [
        (obj, f"object {k}", obj.score if obj.confidence is None else obj.confidence)
        for k, obj in enumerate(answer.pred, start=1)
    ]
    gt, pred = _shapes(answer.gt or (), named, match_answer(answer))
    annotated = answer.gt is not None
    return ViewRecord(**_same(answer), step=None, gt=gt, pred=pred, annotated=annotated, dropped=answer.dropped)


def _same(source: RolloutRecord | ImageAnswer) -> dict[str, Any]:
    names = ("sample_id", "image", "width", "height", "truncated", "repeat_terminated", "text")
    return {name: getattr(source, name) for name in names}


def _shapes(
    truth: Sequence[GTObject],
    predicted: Sequence[tuple[PredictedObject | ScoredObject, str, float | None]],
    matched: Sequence[tuple[int, int, float]],
) -> tuple[tuple[ViewShape, ...], tuple[ViewShape, ...]]:
    """Ground truth and predictions (object, name, score), each linked to its match (pred_idx, gt_idx, IoU)."""
    pred_of = {j: i for i, j, _ in matched}
    gt_of = {i: (j, round(iou, 4)) for i, j, iou in matched}
    # Among the rest, pairs that agree in everything but the name.
    left_pred = [i for i in range(len(predicted)) if i not in gt_of]
    left_gt = [j for j, obj in enumerate(truth) if j not in pred_of and obj.soft is None]
    same_place = assigner([predicted[i][0] for i in left_pred], [truth[j] for j in left_gt], IOU_THRESHOLD)(False)
    renamed_to = {left_pred[i]: left_gt[j] for i, j, _ in same_place}
    renamed_by = {j: i for i, j in renamed_to.items()}
    gt = (
        ViewShape(obj.desc, obj.kind, obj.bins, pred_of.get(j), soft=obj.soft, renamed=renamed_by.get(j))
        for j, obj in enumerate(truth)
    )
    pred = (
        ViewShape(obj.desc, obj.kind, obj.bins, *gt_of.get(i, (None, None)),
                  score=None if score is None else round(score, 4), name=name, renamed=renamed_to.get(i))
        for i, (obj, name, score) in enumerate(predicted)
    )  # fmt: skip
    return tuple(gt), tuple(pred)


def _rollout_tokens(record: RolloutRecord, grammar: AnswerGrammar) -> ViewTokens:
    # The answer's own tokens with the roles that the match gives them; tokens after the cut have none. In a rewritten
    # answer the target has other tokens, with the same roles for the same reasons.
    import numpy as np

    from coordexp.recording.rollout_record import token_runs
    from coordexp.targets import mark_matched

    kept = min(record.parse.prefix_len - record.parse.num_replaced_tail, len(record.response_token_ids))
    roles_T = np.full(record.parse.prefix_len, TokenRole.MASKED, dtype=np.uint8)
    if record.target.token_ids:
        pairs = record.match.pairs
        mark_matched(roles_T, [(record.parse.objects[p.pred_idx], record.ground_truth[p.gt_idx]) for p in pairs])
    roles = [TokenRole(role).name for role in roles_T.tolist()]
    own = [*roles[:kept], *[BEHIND_CUT] * (len(record.response_token_ids) - kept)]
    runs: list[tuple[int, int]] = []
    for at in forced_positions(grammar, record.response_token_ids):
        if runs and sum(runs[-1]) == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((at, 1))
    return ViewTokens(_pieces(record.response_token_ids, grammar.vocab), token_runs(own), forced=tuple(runs))


def _pieces(token_ids: Sequence[int], vocab: CoordVocab) -> tuple[str, ...]:
    return tuple(vocab.piece(i) if 0 <= i < len(vocab) else f"<id {i}>" for i in token_ids)


def _curves(source: Path) -> dict[str, list[tuple[float, float]]]:
    """Every finite number in the run's longest log with at least two points, by name."""
    states = [source / "trainer_state.json", source / "log_history.json"]
    # A finished run that was continued has its earlier end in its folder, and its newest checkpoint knows more.
    states += [state for one in checkpoints_in(source) if (state := one / "trainer_state.json").is_file()][:1]
    logs = [_log_of(state) for state in states if state.is_file()]
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in max(logs, key=lambda log: log[-1].get("step", 0) if log else 0, default=[]):
        numbers = {name: value for name, value in line.items() if type(value) in (int, float) and math.isfinite(value)}
        for name, value in numbers.items():
            if name not in ("step", "epoch"):
                curves.setdefault(name, []).append((numbers.get("step", 0), value))
    return {name: points for name, points in curves.items() if len(points) > 1}


def _log_of(state: Path) -> list[dict[str, Any]]:
    content = read_json(state)
    lines = content.get("log_history", []) if isinstance(content, dict) else content
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise DataError("is not a run's log: expected its lines as a list of objects; restore the file", path=state)
    return lines
