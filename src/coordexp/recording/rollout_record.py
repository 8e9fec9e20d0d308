"""One JSON line per sample: what the model answered, how it was read and matched, and what it was taught.

A line holds everything needed to look at a sample and to compute its target again (:func:`replay`), but for image and
prompt, which it refers to. Files are appended to, also by a run that resumes: a line of step s replaces every earlier
line of a later step in the same file, because those steps were taken back, and the earlier line of the same sample of
the same step (:func:`read_records`). Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coordexp.coords import CoordVocab, FieldOrder
from coordexp.errors import AppendError, DataError
from coordexp.matching import MatchingConfig, match_objects
from coordexp.parsing import parse_rollout
from coordexp.records import (
    DropReason,
    GTObject,
    ImageRecord,
    MatchResult,
    ParsedRollout,
    PredictedObject,
    Segment,
    SupervisionContext,
    TokenRole,
    TrainingTarget,
)
from coordexp.records_json import from_json, read_lines
from coordexp.targets import (
    SampleOutcome,
    SupervisionWeights,
    TargetPolicy,
    TransportConfig,
    build_target,
    empty_target,
)

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class WhereInTraining:
    """When and where a sample was answered.

    ``global_step``: optimizer steps taken before, which is also the step of the rollout's seed; ``sample_idx``: the
    sample's place among the ``num_samples`` of this rank's step, of which only the first few may have been recorded.
    """

    global_step: int
    micro_step: int
    rank: int
    sample_idx: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What matching and target building were configured with; in a record, the target policy of its own step."""

    matching: MatchingConfig
    transport: TransportConfig
    field_order: FieldOrder
    target: TargetPolicy = field(default_factory=TargetPolicy)
    weights: SupervisionWeights = field(default_factory=SupervisionWeights)


@dataclass(frozen=True, slots=True)
class PromptRef:
    """The prompt by its length in tokens and the SHA-256 of its ids (:func:`prompt_sha256`)."""

    num_tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ParseRecord:
    """:class:`ParsedRollout` without its prefix of ``prefix_len`` tokens, which begins the target unless that was
    rewritten."""

    objects: tuple[PredictedObject, ...]
    dropped: dict[DropReason, int]
    prefix_len: int
    num_replaced_tail: int
    max_object_index: int | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """:class:`TrainingTarget`, with roles as runs of (name of the role, number of tokens), and the weights of each loss
    term as runs of (weight, number of tokens)."""

    token_ids: tuple[int, ...]
    roles: tuple[tuple[str, int], ...]
    coord_pos: tuple[int, ...]
    coord_bin: tuple[float, ...]
    box_pos: tuple[tuple[int, int, int, int], ...]
    box_bin: tuple[tuple[float, float, float, float], ...]
    context: SupervisionContext
    prefix_len: int
    matched_pred_idx: tuple[int, ...]
    matched_gt_idx: tuple[int, ...]
    appended_gt_idx: tuple[int, ...]
    appended_object_index: tuple[int, ...]
    weights: dict[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    left_out_pred_idx: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A line of ``rollouts_rank{r}.jsonl``.

    ``loss_by_role`` (mean by name of the role) and ``token_loss`` (position in the target, loss in nats) are null in
    the file: a line is written when its target is built, before the forward pass, and a segment may wait in the carry
    buffer for steps. :func:`read_records` fills them from the :class:`LossRecord` beside it, where there is one.
    """

    schema_version: Literal[2]
    sample_id: str
    image: str
    width: int
    height: int
    ground_truth: tuple[GTObject, ...]
    where: WhereInTraining
    prompt: PromptRef
    response_token_ids: tuple[int, ...]
    text: str
    truncated: bool
    repeat_terminated: bool
    weight_version: int
    parse: ParseRecord
    match: MatchResult
    target: TargetRecord
    settings: Settings
    loss_by_role: dict[str, float] | None = None
    token_loss: tuple[tuple[int, float], ...] | None = None
    taken_as_complete: bool = False


@dataclass(frozen=True, slots=True)
class LossRecord:
    """A line of ``losses_rank{r}.jsonl``: what the tokens of one recorded sample cost when they were trained on.

    ``answered_at`` and ``sample_idx`` say which record it belongs to; ``trained_at``: optimizer steps taken before the
    one that trained on it.
    """

    schema_version: Literal[1]
    sample_id: str
    answered_at: int
    sample_idx: int
    trained_at: int
    loss_by_role: dict[str, float]
    token_loss: tuple[tuple[int, float], ...]

    @classmethod
    def from_segment(
        cls,
        segment: Segment,
        where: WhereInTraining,
        trained_at: int,
        position_P: Sequence[int],
        loss_P: Sequence[float],
    ) -> LossRecord:
        """What a segment's tokens cost in the step after ``trained_at`` finished ones: ``loss_P`` at positions
        ``position_P`` of its target."""
        by_role: dict[str, list[float]] = {}
        for position, loss in zip(position_P, loss_P, strict=True):
            by_role.setdefault(TokenRole(int(segment.target.roles_T[position])).name, []).append(loss)
        means = {role: round(sum(losses) / len(losses), 4) for role, losses in by_role.items()}
        pairs = tuple(zip(position_P, loss_P, strict=True))
        return cls(1, segment.sample_id, where.global_step, where.sample_idx, trained_at, means, pairs)


_RECORD = f"a rollout record of schema version {SCHEMA_VERSION}"


def prompt_sha256(prompt_token_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of the ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, prompt_token_ids)).encode()).hexdigest()


def make_record(
    image: ImageRecord, outcome: SampleOutcome, where: WhereInTraining, settings: Settings
) -> RolloutRecord:
    """Everything about one sample's way from answer to target."""
    rollout = outcome.rollout
    return RolloutRecord(
        schema_version=SCHEMA_VERSION,
        sample_id=image.sample_id,
        image=str(image.image),
        width=image.width,
        height=image.height,
        ground_truth=image.objects,
        where=where,
        prompt=PromptRef(len(rollout.prompt_token_ids), prompt_sha256(rollout.prompt_token_ids)),
        response_token_ids=rollout.response_token_ids,
        text=rollout.text,
        truncated=rollout.truncated,
        repeat_terminated=rollout.repeat_terminated,
        weight_version=rollout.weight_version,
        parse=_parse_record(outcome.parsed),
        match=outcome.match,
        target=_target_record(outcome.target),
        settings=replace(settings, target=outcome.policy),
        taken_as_complete=outcome.taken_as_complete,
    )


def _parse_record(parsed: ParsedRollout) -> ParseRecord:
    return ParseRecord(
        parsed.objects,
        dict(parsed.dropped),
        len(parsed.prefix_token_ids),
        parsed.num_replaced_tail,
        parsed.max_object_index,
        parsed.truncated,
    )


def _target_record(target: TrainingTarget) -> TargetRecord:
    return TargetRecord(
        token_ids=target.token_ids,
        roles=tuple((TokenRole(role).name, count) for role, count in _runs(target.roles_T)),
        coord_pos=tuple(target.coord_pos_K.tolist()),
        coord_bin=tuple(target.coord_bin_K.tolist()),
        box_pos=_rows_of_4(target.box_pos_M4),
        box_bin=_rows_of_4(target.box_bin_M4),
        context=target.context,
        prefix_len=target.prefix_len,
        matched_pred_idx=target.matched_pred_idx,
        matched_gt_idx=target.matched_gt_idx,
        appended_gt_idx=target.appended_gt_idx,
        appended_object_index=target.appended_object_index,
        weights={term: _runs(weight_T) for term, weight_T in target.weights.items()},
        left_out_pred_idx=target.left_out_pred_idx,
    )


def _runs(values_T: np.ndarray) -> tuple[tuple[Any, int], ...]:
    return tuple((value, sum(1 for _ in run)) for value, run in groupby(values_T.tolist()))


def _rows_of_4(array_M4: np.ndarray) -> tuple[Any, ...]:
    return tuple([tuple(row) for row in array_M4.tolist()])


def loss_path(records: Path) -> Path:
    """The file of losses next to a file of records."""
    return records.with_name(records.name.replace("rollouts_", "losses_", 1))


def read_records(path: str | Path) -> list[RolloutRecord]:
    """All records of a file, or of every ``rollouts_rank*.jsonl`` of a folder, by rank and then in order of writing,
    with the losses that are known.

    Lines that a resumed run replaced are left out (see the module), and so is text after the last line break, which is
    still being written.

    Raises:
        DataError: no such file, or a line that is not a record; with its number.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("rollouts_rank*.jsonl"), key=lambda file: (len(file.name), file.name))
        if not files:
            raise DataError("holds no rollouts_rank*.jsonl; is it a run's rollout_records folder?", path=path)
        return [record for file in files for record in read_records(file)]
    kept: list[RolloutRecord] = []
    for number, line in read_lines(path, whole=True):
        record = from_json(RolloutRecord, line, _RECORD, path=path, line=number)
        while kept and kept[-1].where.global_step > record.where.global_step:
            kept.pop()
        if kept and (record.where.global_step, record.where.sample_idx) <= _place_of(kept[-1]):
            kept = [old for old in kept if _place_of(old) != _place_of(record)]
        kept.append(record)
    losses = _read_losses(loss_path(path)) if path.name.startswith("rollouts_") else {}
    return [_with_loss(record, losses.get((*_place_of(record), record.sample_id))) for record in kept]


def _read_losses(path: Path) -> dict[tuple[int, int, str], LossRecord]:
    """By place and name of the sample; of a step that was taken back and again, the later line counts."""
    if not path.is_file():
        return {}
    losses: dict[tuple[int, int, str], LossRecord] = {}
    for number, line in read_lines(path, whole=True):
        loss = from_json(LossRecord, line, "a line of losses", path=path, line=number)
        losses[loss.answered_at, loss.sample_idx, loss.sample_id] = loss
    return losses


def _with_loss(record: RolloutRecord, loss: LossRecord | None) -> RolloutRecord:
    if loss is None:
        return record
    return replace(record, loss_by_role=loss.loss_by_role, token_loss=loss.token_loss)


def _place_of(record: RolloutRecord) -> tuple[int, int]:
    return record.where.global_step, record.where.sample_idx


def rebuild(record: RolloutRecord, vocab: CoordVocab) -> tuple[ParsedRollout, MatchResult, TrainingTarget]:
    """Parse, match and build again from the recorded response. ``vocab`` must be that of the run's tokenizer.

    Raises:
        AppendError: nothing can be written behind the answer, although something was when it was recorded.
    """
    parsed = parse_rollout(record.response_token_ids, vocab, ended=not record.truncated)
    match = match_objects(parsed.objects, record.ground_truth, record.settings.matching)
    try:
        target = build_target(
            parsed,
            match,
            record.ground_truth,
            vocab,
            sample_id=record.sample_id,
            field_order=record.settings.field_order,
            transport=record.settings.transport,
            policy=record.settings.target,
            weights=record.settings.weights,
        )
    except AppendError:
        if record.target.token_ids:
            raise
        target = empty_target(record.sample_id)  # two-channel training goes on without such an answer
    return parsed, match, target


def replay(record: RolloutRecord, vocab: CoordVocab) -> tuple[str, ...]:
    """What :func:`rebuild` makes differently from what was recorded, by name. Empty: nothing. The code may be a later
    version, which is what this is for."""
    parsed, match, target = rebuild(record, vocab)
    pairs: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("parse", asdict(record.parse), asdict(_parse_record(parsed))),
        ("match", asdict(record.match), asdict(match)),
        ("target", asdict(record.target), asdict(_target_record(target))),
    )
    return tuple(
        f"{stage}.{name}: recorded {_short(recorded[name])}, now {_short(now[name])}"
        for stage, recorded, now in pairs
        for name in recorded
        if recorded[name] != now[name]
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "…"
