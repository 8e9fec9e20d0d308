"""The files of a run → what the viewer shows: answers with their matches, tokens with their roles, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from coordexp.coords import CoordVocab
from coordexp.data.files import read_json
from coordexp.errors import DataError
from coordexp.evaluation.answers import PREDICTIONS, ImageAnswer, read_answers
from coordexp.evaluation.detection import match_answer
from coordexp.records import GTObject, TokenRole

if TYPE_CHECKING:
    from coordexp.recording.rollout_record import RolloutRecord

BEHIND_CUT = "BEHIND_CUT"  # tokens of the answer that are not part of the target
_RECORDS, _RESOLVED_CONFIG = "rollout_records", "resolved_config.yaml"


@dataclass(frozen=True, slots=True)
class ViewShape:
    """An object to draw. ``partner``: index of its match on the other side, or None. ``soft``: its weight, if a model
    added it."""

    desc: str
    kind: str
    bins: tuple[int, ...]
    partner: int | None
    iou: float | None = None
    score: float | None = None
    name: str = ""
    soft: float | None = None


@dataclass(frozen=True, slots=True)
class ViewTokens:
    """Tokens with runs of (role, count), and losses of some positions in nats."""

    pieces: tuple[str, ...]
    roles: tuple[tuple[str, int], ...]
    loss: tuple[tuple[int, float], ...] = ()


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


@dataclass(frozen=True, slots=True)
class ViewData:
    """Everything on the page. ``curves``: metric → (step, value) points; ``notes`` explain what is not shown."""

    title: str
    records: tuple[ViewRecord, ...]
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def collect(source: Path, vocab: CoordVocab | None = None, max_records: int = 1000) -> ViewData:
    """Read a run's folder, a folder or file of rollout records, or predictions.

    Args:
        vocab: of the tokenizer that wrote the answers; without it tokens are not shown.
        max_records: further ones are left out, evenly over the run, with a note.

    Raises:
        DataError: nothing there that can be shown.
    """
    records = [*_rollout_records(source, vocab), *_predictions(source)]
    curves = _curves(source)
    if not records and not curves:
        raise DataError(
            "nothing to show: no rollout records (rollout_matching.monitor_dump), no predictions.jsonl and no "
            "trainer_state.json; let its model answer first: coordexp evaluate RUN.yaml --model FOLDER",
            path=source,
        )
    notes = []
    if not records:
        notes.append(_no_records(source))
    if len(records) > max_records:
        notes.append(f"{len(records)} records; shown are {max_records}, evenly over all of them (--max-records)")
        records = [records[i * len(records) // max_records] for i in range(max_records)]
    if vocab is None and any(record.step is not None for record in records):
        notes.append("no tokenizer was found, so tokens are not shown; name the checkpoint with --model")
    return ViewData(str(source), tuple(records), curves, tuple(notes))


def _no_records(source: Path) -> str:
    """Advice for a run with curves and no answers."""
    resolved = source / _RESOLVED_CONFIG
    if _section(resolved, "custom").get("trainer_variant") is not None:
        return (
            "this run recorded no rollouts: set rollout_matching.monitor_dump.enabled: true and go on, or let its "
            f"model answer: coordexp evaluate {resolved} --model {source}"
        )
    return (
        "stage 1 writes no answers while it trains, so only curves are shown; let its model answer, then look again: "
        f"coordexp evaluate {resolved if resolved.is_file() else 'RUN.yaml'} --model {source}"
    )


def find_checkpoint(source: Path) -> Path | None:
    """The checkpoint whose tokenizer wrote the records: the run's own, or the one that it started from."""
    for folder in (source, source.parent, source.parent.parent) if source.is_dir() else source.parents[:3]:
        if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file():
            return folder
        model = _section(folder / _RESOLVED_CONFIG, "model").get("model")
        if model is not None and (Path(str(model)) / "tokenizer.json").is_file():
            return Path(str(model))
    return None


def _section(resolved: Path, name: str) -> Mapping[str, object]:
    if not resolved.is_file():
        return {}
    import yaml

    try:
        content = yaml.safe_load(resolved.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"is not YAML: {error}; name the checkpoint with --model", path=resolved) from error
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


def has_rollout_records(source: Path) -> bool:
    return source.name.startswith("rollouts_") or _records_folder(source) is not None


def _records_folder(source: Path) -> Path | None:
    for folder in (source / _RECORDS, source):
        if folder.is_dir() and any(folder.glob("rollouts_rank*.jsonl")):
            return folder
    return None


def _rollout_records(source: Path, vocab: CoordVocab | None) -> list[ViewRecord]:
    from_file = source.is_file() and source.name.startswith("rollouts_")
    place = source if from_file else _records_folder(source)
    if place is None:
        return []
    from coordexp.recording.rollout_record import read_records  # answers are shown without it

    records = read_records(place)
    records.sort(key=lambda record: (record.where.global_step, record.where.rank, record.where.sample_idx))
    return [_from_record(record, vocab) for record in records]


def _from_record(record: RolloutRecord, vocab: CoordVocab | None) -> ViewRecord:
    pair_of_pred = {pair.pred_idx: pair for pair in record.match.pairs}
    pred_of_gt = {pair.gt_idx: pair.pred_idx for pair in record.match.pairs}
    losses = [loss for _, loss in record.token_loss or ()]
    return ViewRecord(
        sample_id=record.sample_id,
        step=record.where.global_step + 1,
        image=record.image,
        width=record.width,
        height=record.height,
        gt=_ground_truth(record.ground_truth, pred_of_gt),
        pred=tuple(
            ViewShape(o.desc, o.kind, o.bins, pair.gt_idx if pair else None, round(pair.iou, 4) if pair else None,
                      name=f"object_{o.index}")
            for o, pair in ((o, pair_of_pred.get(i)) for i, o in enumerate(record.parse.objects))
        ),
        annotated=True,
        dropped={reason.value: count for reason, count in record.parse.dropped.items() if count},
        truncated=record.truncated,
        repeat_terminated=record.repeat_terminated,
        text=record.text,
        loss=round(sum(losses) / len(losses), 4) if losses else None,
        loss_by_role=record.loss_by_role,
        rollout=None if vocab is None else _rollout_tokens(record, vocab),
        target=None
        if vocab is None
        else ViewTokens(_pieces(record.target.token_ids, vocab), record.target.roles, record.token_loss or ()),
    )  # fmt: skip


def _ground_truth(objects: Sequence[GTObject], pred_of_gt: Mapping[int, int]) -> tuple[ViewShape, ...]:
    return tuple(ViewShape(o.desc, o.kind, o.bins, pred_of_gt.get(i), soft=o.soft) for i, o in enumerate(objects))


def _rollout_tokens(record: RolloutRecord, vocab: CoordVocab) -> ViewTokens:
    """The answer's own tokens with the roles that the match gives them; tokens after the cut have none. In a rewritten
    answer the target has other tokens, with the same roles for the same reasons."""
    import numpy as np

    from coordexp.targets import mark_matched

    kept = min(record.parse.prefix_len - record.parse.num_replaced_tail, len(record.response_token_ids))
    roles_T = np.full(record.parse.prefix_len, TokenRole.PREFIX_MASKED, dtype=np.uint8)
    if record.target.token_ids:
        pairs = record.match.pairs
        mark_matched(roles_T, [(record.parse.objects[p.pred_idx], record.ground_truth[p.gt_idx]) for p in pairs])
    roles = [TokenRole(role).name for role in roles_T.tolist()]
    own = [*roles[:kept], *[BEHIND_CUT] * (len(record.response_token_ids) - kept)]
    runs = tuple((role, sum(1 for _ in run)) for role, run in groupby(own))
    return ViewTokens(_pieces(record.response_token_ids, vocab), runs)


def _pieces(token_ids: Sequence[int], vocab: CoordVocab) -> tuple[str, ...]:
    return tuple(vocab.piece(i) if 0 <= i < len(vocab) else f"<id {i}>" for i in token_ids)


def _predictions(source: Path) -> list[ViewRecord]:
    if source.is_dir():
        if not any((folder / PREDICTIONS).is_file() for folder in (source, source / "evaluation")):
            return []
    elif source.name.startswith("rollouts_"):
        return []
    return [_from_answer(answer) for answer in read_answers(source)]


def _from_answer(answer: ImageAnswer) -> ViewRecord:
    matched = match_answer(answer)
    gt_of_pred = {i: (j, iou) for i, j, iou in matched}
    pred_of_gt = {j: i for i, j, _ in matched}
    return ViewRecord(
        sample_id=answer.sample_id,
        step=None,
        image=answer.image,
        width=answer.width,
        height=answer.height,
        gt=_ground_truth(answer.gt or (), pred_of_gt),
        pred=tuple(
            ViewShape(o.desc, o.kind, o.bins, match[0] if match else None, round(match[1], 4) if match else None,
                      None if o.score is None else round(o.score, 4), f"object {i + 1}")
            for i, (o, match) in enumerate((o, gt_of_pred.get(i)) for i, o in enumerate(answer.pred))
        ),
        annotated=answer.gt is not None,
        dropped=answer.dropped,
        truncated=answer.truncated,
        repeat_terminated=answer.repeat_terminated,
        text=answer.text,
    )  # fmt: skip


def _curves(source: Path) -> dict[str, list[tuple[float, float]]]:
    """Every number in the run's latest log with at least two points, by name."""
    if not source.is_dir():
        return {}
    states = [source / "trainer_state.json", source / "log_history.json"]
    states += sorted(source.glob("checkpoint-*/trainer_state.json"), key=lambda path: -_step_of(path.parent))
    state = next((path for path in states if path.is_file()), None)
    if state is None:
        return {}
    content = read_json(state)
    lines = content if isinstance(content, list) else content.get("log_history", [])
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "epoch") and type(value) in (int, float) and value == value:
                curves.setdefault(name, []).append((line.get("step", 0), value))
    return {name: points for name, points in curves.items() if len(points) > 1}


def _step_of(folder: Path) -> int:
    tail = folder.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
