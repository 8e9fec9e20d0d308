"""What a model answered for an image: the record that evaluation, files, comparison and the viewer share.

A line of ``predictions.jsonl`` holds one :class:`ImageAnswer`; coordinates are norm1000 bins. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.records import GEOMETRY_KINDS, NUM_BINS, GeometryKind, GTObject, ImageRecord, ParsedRollout, Rollout

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True, slots=True)
class Detection:
    """A predicted object. ``score`` is None where nothing was scored."""

    desc: str
    kind: GeometryKind
    bins: tuple[int, ...]
    score: float | None = None


@dataclass(frozen=True, slots=True)
class OriginalImage:
    """The image that a converter prepared this one from: its file, as the source names it, and its size in pixels."""

    file: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """``gt`` is None where an image came without annotations; ``dropped`` counts unusable entries by reason;
    ``original`` is None where the image is the one that the user has."""

    sample_id: str
    image: str
    width: int
    height: int
    gt: tuple[GTObject, ...] | None
    pred: tuple[Detection, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: bool = False
    repeat_terminated: bool = False
    num_tokens: int = 0
    text: str = ""
    original: OriginalImage | None = None

    @property
    def num_dropped(self) -> int:
        """Entries of the answer that the strict parser refused, for whatever reason."""
        return sum(self.dropped.values())

    @property
    def truth(self) -> tuple[GTObject, ...]:
        """The annotations: ``gt`` without soft objects, which nobody annotated.

        Raises:
            DataError: there are none to compare with.
        """
        if self.gt is None:
            raise DataError(f"{self.sample_id}: has no annotations, so nothing can be measured; predict from a JSONL")
        return tuple(obj for obj in self.gt if obj.soft is None)


def make_answer(
    record: ImageRecord,
    rollout: Rollout,
    parsed: ParsedRollout,
    scores: Sequence[float] | None = None,
) -> ImageAnswer:
    """One answer; ``scores`` by object."""
    object_scores = scores if scores is not None else [None] * len(parsed.objects)
    return ImageAnswer(
        sample_id=record.sample_id,
        image=str(record.image),
        width=record.width,
        height=record.height,
        gt=record.objects,
        pred=tuple(Detection(o.desc, o.kind, o.bins, s) for o, s in zip(parsed.objects, object_scores, strict=True)),
        dropped={reason.value: count for reason, count in parsed.dropped.items() if count},
        truncated=rollout.truncated,
        repeat_terminated=rollout.repeat_terminated,
        num_tokens=len(rollout.response_token_ids),
        text=rollout.text,
        original=_original(record.metadata.get("source")),
    )


def to_line(answer: ImageAnswer) -> str:
    """The answer as one line of JSON, without its line break."""
    fields: dict[str, Any] = {
        "sample_id": answer.sample_id,
        "image": answer.image,
        "width": answer.width,
        "height": answer.height,
        "gt": None if answer.gt is None else [_annotation(obj) for obj in answer.gt],
        "pred": [{**_shape(obj), "score": obj.score} for obj in answer.pred],
        "dropped": dict(answer.dropped),
        "truncated": answer.truncated,
        "repeat_terminated": answer.repeat_terminated,
        "num_tokens": answer.num_tokens,
        "text": answer.text,
    }
    if answer.original is not None:
        fields["original"] = asdict(answer.original)
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def from_line(text: str | bytes, *, path: Path | None = None, line: int | None = None) -> ImageAnswer:
    """The inverse of :func:`to_line`.

    Raises:
        DataError: the line is no prediction; says what is wrong with it.
    """
    try:
        fields = json.loads(text)
        return ImageAnswer(
            sample_id=_typed(fields, "sample_id", str),
            image=_typed(fields, "image", str),
            width=_typed(fields, "width", int),
            height=_typed(fields, "height", int),
            gt=None if fields["gt"] is None else tuple(map(_read_annotation, fields["gt"])),
            pred=tuple(Detection(*_read_shape(obj), _score(obj.get("score"))) for obj in fields["pred"]),
            dropped={str(reason): int(count) for reason, count in fields.get("dropped", {}).items()},
            truncated=bool(fields.get("truncated", False)),
            repeat_terminated=bool(fields.get("repeat_terminated", False)),
            num_tokens=int(fields.get("num_tokens", 0)),
            text=str(fields.get("text", "")),
            original=_original(fields.get("original")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"no line of predictions: {type(error).__name__}: {error}", path=path, line=line) from error


def read_answers(path: str | Path) -> list[ImageAnswer]:
    """All answers of a file, or of the ``predictions.jsonl`` in a folder.

    Raises:
        DataError: no such file, no answers in it, or a line that is none; with its number.
    """
    file = _find(Path(path))
    answers = list(_lines(file))
    if not answers:
        raise DataError("holds no predictions", path=file)
    names = {answer.sample_id for answer in answers}
    if len(names) != len(answers):
        raise DataError(f"{len(answers) - len(names)} images are answered twice; keep one line of each", path=file)
    return answers


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    for candidate in (path / PREDICTIONS, path / "evaluation" / PREDICTIONS):
        if candidate.is_file():
            return candidate
    raise DataError(f"holds no {PREDICTIONS}; write one with: coordexp predict, or coordexp evaluate", path=path)


def _lines(path: Path) -> Iterator[ImageAnswer]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    for number, text in enumerate(data.split(b"\n"), start=1):
        if text.strip():
            yield from_line(text, path=path, line=number)


def write_answers(answers: Iterable[ImageAnswer], path: Path) -> None:
    """One line each, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(to_line(answer) + "\n" for answer in answers)


def _annotation(obj: GTObject) -> dict[str, Any]:
    return _shape(obj) if obj.soft is None else {**_shape(obj), "soft": obj.soft}


def _read_annotation(fields: Mapping[str, Any]) -> GTObject:
    return GTObject(*_read_shape(fields), _score(fields.get("soft")))


def _shape(obj: GTObject | Detection) -> dict[str, Any]:
    return {"desc": obj.desc, obj.kind: list(obj.bins)}


def _read_shape(fields: Mapping[str, Any]) -> tuple[str, GeometryKind, tuple[int, ...]]:
    kinds: list[GeometryKind] = [kind for kind in GEOMETRY_KINDS if kind in fields]
    if len(kinds) != 1 or not isinstance(fields["desc"], str):
        raise ValueError(f"an object needs a desc and one of {', '.join(GEOMETRY_KINDS)}, got {fields!r}")
    bins = tuple(fields[kinds[0]])
    enough = len(bins) == 4 if kinds[0] == "bbox_2d" else len(bins) >= 6 and len(bins) % 2 == 0
    if not enough or any(type(k) is not int or not 0 <= k < NUM_BINS for k in bins):
        raise ValueError(f"{kinds[0]} of {fields['desc']!r} is {list(bins)}; expected norm1000 bins 0..999")
    return fields["desc"], kinds[0], bins


def _score(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"score is {value!r}; expected a finite number or null")
    return float(value)


def _original(fields: Any) -> OriginalImage | None:
    """Of what converters write; metadata of another form says nothing about it."""
    if not isinstance(fields, Mapping):
        return None
    file, width, height = (fields.get(name) for name in ("file", "width", "height"))
    if not isinstance(file, str) or type(width) is not int or type(height) is not int or min(width, height) < 1:
        return None
    return OriginalImage(file, width, height)


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    if type(fields[name]) is not kind:
        raise TypeError(f"{name} is {fields[name]!r}; expected {kind.__name__}")
    return fields[name]
