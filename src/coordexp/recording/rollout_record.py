"""Rollout records: one JSON line per sample with the answer, its parse, its match and its target. Torch-free.

A line has everything needed to look at a sample and to rebuild its target (:func:`replay`), except image and prompt,
which it only names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

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
    from_json,
    read_lines,
)
from coordexp.targets import (
    SampleOutcome,
    SupervisionWeights,
    TargetPolicy,
    TransportConfig,
    build_target,
    empty_target,
)

SCHEMA_VERSION = 3


@dataclass(frozen=True, slots=True)
class WhereInTraining:
    """When and where a sample was answered. ``global_step``: optimizer steps finished before, also the step of the
    rollout's seed; ``sample_idx``: index among the ``num_samples`` of this rank's step, of which only the first may
    have been recorded."""

    global_step: int
    micro_step: int
    rank: int
    sample_idx: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of matching and target building; in a record, with the target policy of its own step."""

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
    """:class:`ParsedRollout` without its prefix of ``prefix_len`` tokens: the target starts with them, unless it was
    rewritten."""

    objects: tuple[PredictedObject, ...]
    dropped: dict[DropReason, int]
    prefix_len: int
    num_replaced_tail: int
    max_object_index: int | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """:class:`TrainingTarget`, its roles and the weights of each loss term as runs of (value, number of tokens)."""

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

    ``loss_by_role`` (mean by role name) and ``token_loss`` (position in the target, loss in nats) are null in the file,
    because a line is written before the forward pass. :func:`read_records` fills them from the :class:`LossRecord`.
    """

    schema_version: Literal[3]
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
    """A line of ``losses_rank{r}.jsonl``: the losses of one recorded sample's tokens when it was trained on.

    ``answered_at`` and ``sample_idx`` identify the record; ``trained_at``: optimizer steps finished before the one that
    trained on it.
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
        cls, segment: Segment, where: WhereInTraining, trained_at: int, token_loss: Sequence[tuple[int, float]]
    ) -> LossRecord:
        """``token_loss``: (position in the target, loss in nats)."""
        by_role: dict[str, list[float]] = {}
        for position, loss in token_loss:
            by_role.setdefault(TokenRole(int(segment.target.roles_T[position])).name, []).append(loss)
        means = {role: round(sum(losses) / len(losses), 4) for role, losses in by_role.items()}
        return cls(1, segment.sample_id, where.global_step, where.sample_idx, trained_at, means, tuple(token_loss))


def prompt_sha256(prompt_token_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of the ids as decimal numbers joined by commas."""
    return hashlib.sha256(",".join(map(str, prompt_token_ids)).encode()).hexdigest()


def make_record(
    image: ImageRecord, outcome: SampleOutcome, where: WhereInTraining, settings: Settings
) -> RolloutRecord:
    """The record of one sample, from its answer to its target."""
    rollout = outcome.rollout
    same = ("response_token_ids", "text", "truncated", "repeat_terminated", "weight_version")
    return RolloutRecord(
        schema_version=SCHEMA_VERSION,
        sample_id=image.sample_id,
        image=str(image.image),
        width=image.width,
        height=image.height,
        ground_truth=image.objects,
        where=where,
        prompt=PromptRef(len(rollout.prompt_token_ids), prompt_sha256(rollout.prompt_token_ids)),
        **{name: getattr(rollout, name) for name in same},
        parse=_parse_record(outcome.parsed),
        match=outcome.match,
        target=_target_record(outcome.target),
        settings=replace(settings, target=outcome.policy),
        taken_as_complete=outcome.taken_as_complete,
    )


def _parse_record(parsed: ParsedRollout) -> ParseRecord:
    same = {one.name: getattr(parsed, one.name) for one in fields(ParseRecord) if one.name != "prefix_len"}
    return ParseRecord(**same, prefix_len=len(parsed.prefix_token_ids))


def _target_record(target: TrainingTarget) -> TargetRecord:
    arrays = {
        "roles": tuple((TokenRole(role).name, count) for role, count in token_runs(target.roles_T.tolist())),
        "coord_pos": tuple(target.coord_pos_K.tolist()),
        "coord_bin": tuple(target.coord_bin_K.tolist()),
        "box_pos": tuple(map(tuple, target.box_pos_M4.tolist())),
        "box_bin": tuple(map(tuple, target.box_bin_M4.tolist())),
        "weights": {term: token_runs(weight_T.tolist()) for term, weight_T in target.weights.items()},
    }
    same = {one.name: getattr(target, one.name) for one in fields(TargetRecord) if one.name not in arrays}
    return TargetRecord(**same, **arrays)


def token_runs(values_T: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
    """Runs of equal values: (value, number of tokens)."""
    return tuple((value, len(list(run))) for value, run in groupby(values_T))


def loss_path(records: Path) -> Path:
    """The file of losses next to a file of records."""
    return records.with_name(records.name.replace("rollouts_", "losses_", 1))


def read_records(path: str | Path) -> list[RolloutRecord]:
    """All records of a file, or of every ``rollouts_rank*.jsonl`` of a folder, by rank and then in order of writing,
    with the losses that are known. Text after the last line break, which is still being written, is ignored. Raises
    DataError for no such file, or a line that is not a record; with its number."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("rollouts_rank*.jsonl"), key=lambda file: (len(file.name), file.name))
        if not files:
            raise DataError("has no rollouts_rank*.jsonl; is it a run's rollout_records folder?", path=path)
        return [record for file in files for record in read_records(file)]

    def place(record: RolloutRecord) -> tuple[int, int]:
        return record.where.global_step, record.where.sample_idx

    kept: dict[tuple[int, int], RolloutRecord] = {}
    what = f"a rollout record of schema version {SCHEMA_VERSION}"
    for number, line in read_lines(path, whole=True):
        record = from_json(RolloutRecord, line, what, path=path, line=number)
        # A run that resumes appends, and repeats steps: drop earlier lines of later steps and of the same sample.
        while kept and next(reversed(kept))[0] > record.where.global_step:
            kept.popitem()
        kept.pop(place(record), None)
        kept[place(record)] = record
    losses: dict[tuple[int, int, str], LossRecord] = {}  # the last line of each sample counts
    loss_file = loss_path(path)
    if path.name.startswith("rollouts_") and loss_file.is_file():
        for number, line in read_lines(loss_file, whole=True):
            loss = from_json(LossRecord, line, "a line of losses", path=loss_file, line=number)
            losses[loss.answered_at, loss.sample_idx, loss.sample_id] = loss
    for at, record in kept.items():
        loss = losses.get((*at, record.sample_id))
        if loss is not None:
            kept[at] = replace(record, loss_by_role=loss.loss_by_role, token_loss=loss.token_loss)
    return list(kept.values())


def rebuild(record: RolloutRecord, vocab: CoordVocab) -> tuple[ParsedRollout, MatchResult, TrainingTarget]:
    """Parse, match and build again from the recorded response. ``vocab`` must be that of the run's tokenizer. Raises
    AppendError if the recorded target has tokens, but nothing can be appended to the answer now."""
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
        target = empty_target(record.sample_id)  # two-channel training skips such an answer
    return parsed, match, target


def replay(record: RolloutRecord, vocab: CoordVocab) -> tuple[str, ...]:
    """The fields that :func:`rebuild` computes differently from the record, maybe with a later version of the code, as
    ``stage.field: recorded …, now …``."""
    parsed, match, target = rebuild(record, vocab)
    stages: dict[str, tuple[Any, Any]] = {
        "parse": (record.parse, _parse_record(parsed)),
        "match": (record.match, match),
        "target": (record.target, _target_record(target)),
    }
    differences = []
    for stage, (recorded, now) in stages.items():
        recorded, now = asdict(recorded), asdict(now)
        for name in recorded:
            if recorded[name] != now[name]:
                texts = [repr(values[name]) for values in (recorded, now)]
                was, comes = (text if len(text) <= 120 else text[:117] + "…" for text in texts)
                differences.append(f"{stage}.{name}: recorded {was}, now {comes}")
    return tuple(differences)
