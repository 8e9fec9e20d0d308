"""The frozen records that pass between stages, and the JSON of records on the disk. Torch-free; arrays are NumPy.

Coordinates are *bins*: integers 0..999 in norm1000 space. On a side of W pixels bin k is at k/999 · W, from the first
pixel's outer edge to the last one's.
Token positions are 0-based. "Target" positions count from the first assistant token, never from the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from coordexp.errors import CoordExpError, DataError
from coordexp.reading import read_bytes

if TYPE_CHECKING:
    import numpy as np

Record = TypeVar("Record")
GeometryKind = Literal["bbox_2d", "poly"]
GEOMETRY_KINDS: tuple[GeometryKind, ...] = ("bbox_2d", "poly")
NUM_BINS = 1000

BIN_RULE = "bin_rule"  # key of earlier versions' datasets, cards and answers


def check_bin_rule(written: object) -> None:
    """Raises DataError for bins by another rule than :mod:`coordexp.records`, as earlier versions wrote them. None, no
    mark: they are read by that rule."""
    if written not in (None, "pixel_edges"):
        raise DataError(
            f"{BIN_RULE} is {written!r}, but bins go from edge to edge of the image now: convert or train again, or "
            f"delete {BIN_RULE} and accept boxes that are up to a pixel too far right and down"
        )


@dataclass(frozen=True, slots=True)
class GTObject:
    """One object of the ground truth. ``bins``: ``(x1, y1, x2, y2)`` with x1 <= x2 and y1 <= y2 for ``bbox_2d``; a flat
    ``(x, y, x, y, …)`` ring of at least three vertices for ``poly``. ``soft``: None for an annotated object;
    for one that a model added, its confidence in (0, 1]: its text is trained with this weight, its coordinates not."""

    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]
    soft: float | None = None


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One line of a JSONL dataset. ``sample_id`` is ``file.jsonl:line``; ``image`` is an absolute path."""

    sample_id: str
    image: Path
    width: int
    height: int
    objects: tuple[GTObject, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A prompt to answer. ``model_inputs`` holds the encoder's tensors by their Hugging Face names (no batch axis for
    token rows); backends that talk to a server use ``messages`` and ``image`` instead. ``prompt_token_ids`` are the
    trainer's; those that a backend reports must be equal."""

    sample_id: str
    image: Path
    messages: tuple[Mapping[str, Any], ...]
    prompt_token_ids: tuple[int, ...]
    model_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer. ``response_token_ids`` is stop-trimmed; ``truncated`` means that no stop token was reached;
    ``weight_version`` is the trainer's version that generated it."""

    sample_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    text: str
    truncated: bool
    repeat_terminated: bool = False
    weight_version: int = 0


class DropReason(StrEnum):
    """Why an entry of a rollout is not a usable object. A closed list: every entry seen is valid or counted here."""

    TRUNCATED = "truncated"  # the answer ended inside this entry
    MALFORMED = "malformed"  # JSON structure breaks inside this entry; the prefix ends before it
    AFTER_BREAK = "after_break"  # after a structural break, so not part of the prefix
    AFTER_ROOT = "after_root"  # after the closing brace of the first root object
    PREAMBLE = "preamble"  # text before the first "{": the whole answer is unusable as a prefix
    WRONG_ROOT = "wrong_root"  # the answer is a list and not an object; counted once if it is empty
    UNKEYED = "unkeyed"  # an object in place of an "object_{n}" key
    PROSE = "prose"  # text without JSON and without entries: counted once per answer
    UNCUTTABLE = "uncuttable"  # no tokenisation realises a cut after this entry
    KEY_INVALID = "key_invalid"  # key is not object_{n}
    NOT_AN_OBJECT = "not_an_object"  # value is not a JSON object
    MISSING_DESC = "missing_desc"  # no desc, empty desc, or desc that is not a string
    MISSING_GEOMETRY = "missing_geometry"  # neither bbox_2d nor poly
    MULTIPLE_GEOMETRIES = "multiple_geometries"  # both, or one of them twice
    UNKNOWN_FIELD = "unknown_field"  # any key other than desc and one geometry
    NON_COORD_TOKEN = "non_coord_token"  # something other than coordinate tokens in the geometry array
    WRONG_ARITY = "wrong_arity"  # bbox_2d without 4, or poly with odd or fewer than 6 coordinates
    BOX_INVERTED = "box_inverted"  # x2 < x1 or y2 < y1
    AMBIGUOUS_COORDS = "ambiguous_coords"  # coordinates read from text cannot be aligned with single tokens


@dataclass(frozen=True, slots=True)
class PredictedObject:
    """A valid object of a rollout. Positions and half-open ranges count tokens of ``prefix_token_ids``.

    ``coord_token_idx[j]`` is the coordinate token that wrote ``bins[j]``. ``token_span``: the tokens that its entry,
    key included, touches. ``own_token_span``: those that lie wholly inside it; a token that also writes a separator,
    the root's brace or part of another entry is not among them. ``desc_token_span``: those that touch the desc's value,
    between its quotes, even if they also write something else.
    """

    index: int
    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]
    coord_token_idx: tuple[int, ...]
    token_span: tuple[int, int]
    own_token_span: tuple[int, int]
    desc_token_span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """A rollout, read strictly. ``objects`` are in order of appearance. ``prefix_token_ids`` are the rollout's own
    tokens up to an append-ready cut, but for the last ``num_replaced_tail`` of them, which re-tokenise the part of one
    fused token before the cut. ``max_object_index`` is the highest n of any ``object_{n}`` key kept in the prefix."""

    objects: tuple[PredictedObject, ...]
    dropped: Mapping[DropReason, int]
    prefix_token_ids: tuple[int, ...]
    prefix_text: str
    max_object_index: int | None
    truncated: bool
    num_replaced_tail: int = 0

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Match:
    """A predicted object (index into ``ParsedRollout.objects``) and the GT object it found, at mask IoU ``iou``."""

    pred_idx: int
    gt_idx: int
    iou: float


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Assignment of predictions to ground truth. Every index of either side is in exactly one field.
    ``num_gate_rejections`` counts candidate pairs with overlapping boxes and a mask IoU under the gate."""

    pairs: tuple[Match, ...]
    fn_gt_idx: tuple[int, ...]
    fp_pred_idx: tuple[int, ...]
    num_gate_rejections: int


class TokenRole(IntEnum):
    """The origin of a token of the assistant's target: the label that :mod:`coordexp.targets.weights` turns into
    weights of loss terms, and that records and the viewer show. Prompt tokens have none.

    MATCHED_COORD is the model's own in a kept prefix and in a rewritten answer. Other text of a matched object is
    MATCHED_STRUCT and MATCHED_DESC in a prefix, REWRITTEN_STRUCT and REWRITTEN_DESC in a rewritten answer. GT_* is an
    object that is written from the ground truth alone: every one in stage 1, a missed one after an answer.

    Which tokens belong to a matched object is decided strictly. MATCHED_STRUCT is wholly inside its entry: a fused
    ``},`` or `` "`` between two entries also decides that another entry follows, which the match says nothing about,
    and stays MASKED. A token that touches the desc's value is MATCHED_DESC, also where it is fused with structure or is
    a coordinate token written in the desc. Values are stored in checkpoints: add new ones at the end.
    """

    MASKED = 0  # no objective supervises these: separators, unmatched objects, invalid entries
    MATCHED_COORD = 1
    GT_STRUCT = 2
    GT_DESC = 3
    GT_COORD = 4
    CLOSE = 5  # the root's closing brace
    EOS = 6
    MATCHED_STRUCT = 7  # keys, quotes and brackets
    MATCHED_DESC = 8
    SOFT_COORD = 9  # a soft object's coordinate: context for later tokens, never trained
    REWRITTEN_STRUCT = 10  # keys, quotes, brackets and the separator before the object
    REWRITTEN_DESC = 11  # as the annotation has it


SupervisionContext = Literal["gt", "rollout"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTarget:
    """``Y_train`` of one sample with its supervision. T target tokens, K supervised coordinates, M supervised boxes.

    ``roles_T`` uint8 of :class:`TokenRole`; ``coord_pos_K`` int64 target positions, ascending; ``coord_bin_K`` float64
    target bins (fractional where a transport plan put them); ``box_pos_M4`` / ``box_bin_M4`` the same for whole boxes
    as (x1, y1, x2, y2). ``context`` is ``"gt"`` if the whole answer was written from ground truth.

    ``weights``: one (T,) float32 array per loss term (:data:`coordexp.targets.weights.TERMS`). A term is trained where
    its weight is not zero; a term that is not in the mapping is trained nowhere.

    Provenance: predicted object ``matched_pred_idx[i]`` was trained on ground-truth object ``matched_gt_idx[i]``, and
    ground-truth object ``appended_gt_idx[i]`` was appended as ``object_{appended_object_index[i]}``. A rewritten answer
    leaves the unmatched predicted objects ``left_out_pred_idx`` out.
    """

    sample_id: str
    token_ids: tuple[int, ...]
    roles_T: np.ndarray
    coord_pos_K: np.ndarray
    coord_bin_K: np.ndarray
    box_pos_M4: np.ndarray
    box_bin_M4: np.ndarray
    weights: Mapping[str, np.ndarray]
    context: SupervisionContext
    prefix_len: int
    matched_pred_idx: tuple[int, ...]
    matched_gt_idx: tuple[int, ...]
    appended_gt_idx: tuple[int, ...]
    appended_object_index: tuple[int, ...]
    left_out_pred_idx: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sample, ready for the forward pass and never split: prompt tokens, target, and the encoder's tensors.
    ``length`` is prompt plus target tokens."""

    sample_id: str
    prompt_token_ids: tuple[int, ...]
    target: TrainingTarget
    model_inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.target.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Segments laid end to end in one row of L tokens; segment i occupies ``[offsets[i], offsets[i + 1])``."""

    segments: tuple[Segment, ...]
    token_ids_L: np.ndarray
    offsets: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.offsets[-1]


def to_json(record: Any) -> bytes:
    """A frozen dataclass of plain fields, tuples, mappings, enums and dataclasses as one line of JSON, without a line
    break. Floats survive exactly; NumPy arrays become lists and paths texts. Raises UnicodeEncodeError for a text that
    UTF-8 cannot write, such as a lone surrogate in a file name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "tolist"):
            return value.tolist()
        raise NotImplementedError(f"{type(value).__name__} has no JSON form")

    return msgspec.json.encode(record, enc_hook=plain)


def from_json(
    kind: type[Record], data: bytes | str, what: str, *, path: Path | None = None, line: int | None = None
) -> Record:
    """The inverse of :func:`to_json`; coerces nothing and checks ranges. Unknown keys are ignored, so a format that
    must not be misread has a ``schema_version``. Raises DataError, in which ``what`` names the record."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, CoordExpError, ValueError, RecursionError) as error:
        if re.fullmatch(r"Invalid enum value .* - at `\$\.schema_version`", str(error)):
            reason = f"not {what}: another version of CoordExp wrote it; use that version, or write it again"
            raise DataError(reason, path=path, line=line) from error
        raise DataError(f"not {what}: {type(error).__name__}: {error}", path=path, line=line) from error


def read_lines(path: Path, *, whole: bool = False) -> Iterator[tuple[int, bytes]]:
    """Line numbers and non-empty lines. ``whole`` leaves out text after the last line break: an unfinished line."""
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1] if whole else lines, start=1):
        if line.strip():
            yield number, line
