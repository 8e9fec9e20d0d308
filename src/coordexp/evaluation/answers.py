"""A model's answers: their record and file, and how a backend gives them for a dataset. Torch-free until then.

A line of ``predictions.jsonl`` is one :class:`ImageAnswer`; coordinates are norm1000 bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from coordexp import distributed
from coordexp.checkpoints.card import read_card
from coordexp.coords import CoordVocab
from coordexp.data.class_list import as_written
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.data.files import whole_file
from coordexp.data.preparation import OriginalImage, Side, original_image
from coordexp.data.tiles import Tiling
from coordexp.errors import DataError
from coordexp.parsing import parse_rollout
from coordexp.printable import has_half_characters
from coordexp.reading import read_bytes, read_json
from coordexp.records import (
    GEOMETRY_KINDS,
    NUM_BINS,
    GeometryKind,
    GTObject,
    ImageRecord,
    ParsedRollout,
    Rollout,
    check_bin_rule,
    from_json,
    read_lines,
    to_json,
)
from coordexp.rollouts.backend import DatasetSeeds, RolloutBackend, RolloutRound, Seeds

if TYPE_CHECKING:
    from coordexp.modeling.scores import ObjectScore, TokenScorer

PREDICTIONS = "predictions.jsonl"
SETTINGS, METRICS = "prediction.json", "metrics.json"  # next to it: of coordexp predict, of coordexp evaluate
CLASS_LIST = "class_list"  # their key with the class list of the checkpoint that answered
_SHOWN = 60  # characters of an answer that is not JSON


@dataclass(frozen=True, slots=True)
class ScoredObject:
    """A predicted object. ``score`` (to rank) and ``confidence`` (the probability that it is right) are None
    if it was not scored. ``answers``: number of the image's answers that contain it, None for a single answer.
    ``bins`` are whole numbers, and of merged tiles fractions."""

    desc: str
    kind: GeometryKind
    bins: tuple[float, ...]
    score: float | None = None
    confidence: float | None = None
    answers: int | None = None


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """``gt`` is None for an image without annotations; ``dropped`` counts unusable entries by reason; ``original`` is
    None if the image is the user's own. ``further_texts``: of the other answers, if several are merged
    (:func:`~coordexp.evaluation.several_answers.merge_answers`). ``tiling``: the tiles whose answers are merged
    (:func:`~coordexp.evaluation.join_tiles.merge_tiles`), None for an image answered whole. ``valid``: usable entries
    of all answers that are merged, of which several may be one object; None for a single one, whose are ``pred``."""

    sample_id: str
    image: str
    width: int
    height: int
    gt: tuple[GTObject, ...] | None
    pred: tuple[ScoredObject, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    truncated: bool = False
    repeat_terminated: bool = False
    num_tokens: int = 0
    text: str = ""
    original: OriginalImage | None = None
    further_texts: tuple[str, ...] = ()
    tiling: Tiling | None = None
    valid: int | None = None

    @classmethod
    def of(cls, record: ImageRecord, pred: Iterable[ScoredObject], **answered: Any) -> ImageAnswer:
        """An answer for the image of ``record``; ``answered``: the fields that are not the record's."""
        return cls(
            record.sample_id, str(record.image), record.width, record.height, record.objects, tuple(pred),
            original=original_image(record), **answered,
        )  # fmt: skip

    @property
    def users_image(self) -> OriginalImage:
        """The user's own image: the one that a converter prepared this one from, or this one."""
        return self.original or OriginalImage(self.image, self.width, self.height)

    @property
    def num_answers(self) -> int:
        return 1 + len(self.further_texts)

    @property
    def num_valid(self) -> int:
        return sum(obj.answers or 1 for obj in self.pred) if self.valid is None else self.valid

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def problem(self) -> str | None:
        """Why the answer may lack objects, in a few words; None for a complete and sound one."""
        several = self._several()
        if self.repeat_terminated:
            end = f"at least one of {several} was stopped" if several else f"stopped after {self.num_tokens} tokens"
            return f"{end} because it repeated itself"
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        text = self.text.strip()
        # Also if it was cut off: more of it is no JSON either.
        if self.dropped and not (several or self.pred or text.startswith("{")):
            return f"not JSON ({reasons}): {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'!r}"
        if self.truncated:
            length = f" after {self.num_tokens} tokens" if self.num_tokens else ""  # unknown of a server's text
            end = f"at least one of {several} was cut off" if several else f"cut off{length}"
            return f"{end}; allow more with --max-new-tokens, max_new_tokens= or a server's max_tokens"
        entries = f"{self.num_dropped} entries of {several}" if several else f"{self.num_dropped} entries"
        return f"{entries} could not be read ({reasons})" if self.dropped else None

    def _several(self) -> str:
        # The answers of which this one was merged; empty for a single one.
        if self.tiling is None:
            return f"{self.num_answers} answers" if self.num_answers > 1 else ""
        count = len(self.tiling.windows(self.width, self.height))
        tiles = f"{count} tile{'s' * (count != 1)}"
        return f"the answers to {tiles}" if self.num_answers == 1 else f"{self.num_answers} answers to each of {tiles}"

    @property
    def truth(self) -> tuple[GTObject, ...]:
        """The annotations: ``gt`` without soft objects, which a model added. Raises DataError if ``gt`` is None."""
        if self.gt is None:
            raise DataError(f"{self.sample_id}: has no annotations to compare with; predict from a JSONL")
        return tuple(obj for obj in self.gt if obj.soft is None)


def make_answer(
    record: ImageRecord,
    rollout: Rollout,
    parsed: ParsedRollout,
    scores: Sequence[ObjectScore] | None = None,
) -> ImageAnswer:
    """The answer ``rollout``, of which the objects are ``parsed``, with their ``scores``."""
    pred = [ScoredObject(as_written(obj.desc), obj.kind, obj.bins) for obj in parsed.objects]
    if scores is not None:
        pred = [replace(o, score=s.score, confidence=s.confidence) for o, s in zip(pred, scores, strict=True)]
    return ImageAnswer.of(
        record,
        pred,
        dropped={reason.value: count for reason, count in parsed.dropped.items() if count},
        truncated=rollout.truncated,
        repeat_terminated=rollout.repeat_terminated,
        num_tokens=len(rollout.response_token_ids),
        text=rollout.text,
    )


def each_changed(answers: Iterable[ImageAnswer], change: Callable[[ScoredObject], ScoredObject]) -> list[ImageAnswer]:
    """The answers with every prediction as ``change`` returns it."""
    return [replace(answer, pred=tuple(change(obj) for obj in answer.pred)) for answer in answers]


def merged_counts(answers: Sequence[ImageAnswer]) -> dict[str, Any]:
    """The fields of one answer for several that count or say what happened to any of them."""
    dropped: Counter[str] = Counter()
    for answer in answers:
        dropped.update(answer.dropped)
    return {
        "dropped": dict(dropped),
        "truncated": any(answer.truncated for answer in answers),
        "repeat_terminated": any(answer.repeat_terminated for answer in answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "valid": sum(answer.num_valid for answer in answers),
    }


_Bin = Annotated[int, msgspec.Meta(ge=0, lt=NUM_BINS)] | Annotated[float, msgspec.Meta(ge=0, le=NUM_BINS - 1)]
_Bins = tuple[_Bin, ...]


class _Object(msgspec.Struct):
    """An object in the file: its kind is a key, as in datasets. ``soft`` of annotations, the numbers after it of
    predictions."""

    desc: str
    bbox_2d: Annotated[_Bins, msgspec.Meta(min_length=4, max_length=4)] | UnsetType = UNSET
    poly: Annotated[_Bins, msgspec.Meta(min_length=6)] | UnsetType = UNSET
    soft: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    score: float | None = None
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    answers: int | None = None

    def shape(self) -> tuple[GeometryKind, _Bins]:
        if (self.bbox_2d is UNSET) == (self.poly is UNSET):
            raise ValueError(f"{self.desc!r} needs one of {', '.join(GEOMETRY_KINDS)}")
        if isinstance(self.bbox_2d, tuple):
            x1, y1, x2, y2 = self.bbox_2d
            if x1 > x2 or y1 > y2:
                raise ValueError(
                    f"{self.desc!r}: bbox_2d {list(self.bbox_2d)} is not x1, y1, x2, y2 with x1 <= x2, y1 <= y2"
                )
            return "bbox_2d", self.bbox_2d
        assert isinstance(self.poly, tuple)
        if len(self.poly) % 2:
            raise ValueError(f"{self.desc!r}: poly has an odd number of coordinates")
        return "poly", self.poly


def _whole(obj: _Object) -> tuple[GeometryKind, tuple[int, ...]]:
    kind, bins = obj.shape()
    whole = tuple(k for k in bins if isinstance(k, int))
    if len(whole) != len(bins):
        raise ValueError(f"{obj.desc!r} is annotated with fractions of bins")
    return kind, whole


@dataclass(frozen=True, slots=True)
class _Line(ImageAnswer):
    width: Side
    height: Side
    gt: tuple[_Object, ...] | None  # pyright: ignore[reportIncompatibleVariableOverride]
    pred: tuple[_Object, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    bin_rule: str | None = None

    def __post_init__(self) -> None:
        check_bin_rule(self.bin_rule)


def picture_of(image: str, width: int, height: int) -> tuple[str, int, int]:
    """A key that answers on one picture share, also if their datasets are in different folders or on different
    machines: its file's name and its size."""
    return Path(image).name, width, height


def is_of(answer: ImageAnswer, record: ImageRecord) -> bool:
    """Whether ``answer`` is for the picture that ``record`` names now, by its path and size."""
    return (answer.image, answer.width, answer.height) == (str(record.image), record.width, record.height)


def to_line(answer: ImageAnswer) -> str:
    """The answer as one line of JSON, without its line break."""
    line = {one.name: getattr(answer, one.name) for one in fields(ImageAnswer)}
    if answer.gt is not None:
        line["gt"] = [
            {"desc": obj.desc, obj.kind: obj.bins, **({} if obj.soft is None else {"soft": obj.soft})}
            for obj in answer.gt
        ]
    line["pred"] = [
        {"desc": obj.desc, obj.kind: obj.bins, "score": obj.score}
        | ({} if obj.confidence is None else {"confidence": obj.confidence})
        | ({} if obj.answers is None else {"answers": obj.answers})
        for obj in answer.pred
    ]
    for name in ("original", "further_texts", "tiling", "valid"):
        if line[name] in (None, ()):
            del line[name]
    return to_json(line).decode()


def from_line(text: str | bytes, *, path: Path | None = None, line: int | None = None) -> ImageAnswer:
    """The inverse of :func:`to_line`, with names as datasets contain them. Raises DataError, with the reason, for a
    line that is not a prediction."""
    read = from_json(_Line, text, "a line of predictions", path=path, line=line)
    try:
        gt = None if read.gt is None else tuple(GTObject(as_written(o.desc), *_whole(o), o.soft) for o in read.gt)
        pred = tuple(ScoredObject(as_written(o.desc), *o.shape(), o.score, o.confidence, o.answers) for o in read.pred)
    except ValueError as error:
        raise DataError(f"not a line of predictions: {error}", path=path, line=line) from error
    same = {one.name: getattr(read, one.name) for one in fields(ImageAnswer)}
    return ImageAnswer(**same | {"gt": gt, "pred": pred})


def read_answers(path: str | Path) -> list[ImageAnswer]:
    """All answers of a file, or of the ``predictions.jsonl`` in a folder. Raises DataError for no such file, an empty
    one, or a line that is not an answer; with its number."""
    path = _file_of(Path(path))
    lines = list(read_lines(path))
    try:
        answers = [from_line(text, path=path, line=number) for number, text in lines]
    except DataError as error:
        is_json = isinstance(error.__cause__, msgspec.ValidationError)
        if error.line == lines[-1][0] and not is_json and not read_bytes(path).endswith(b"\n"):
            raise DataError(
                "ends in the middle of a line: it is being written, or was interrupted; wait, or repeat the command "
                "that writes it, which continues",
                path=path,
                line=error.line,
            ) from error
        raise
    if not answers:
        raise DataError("has no predictions", path=path)
    names = {answer.sample_id for answer in answers}
    if len(names) != len(answers):
        raise DataError(f"{len(answers) - len(names)} images are answered twice; keep one line of each", path=path)
    return answers


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    candidates = (path / PREDICTIONS, path / "evaluation" / PREDICTIONS)
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise DataError(f"has no {PREDICTIONS}; write one with: coordexp predict, or coordexp evaluate", path=path)
    return file


def class_list_of(predictions: Path) -> tuple[str, ...]:
    """The class list of the checkpoint that made the answers which :func:`read_answers` reads: the one that is kept
    next to them, else that of the card next to them, as in the folder of a run; empty without any."""
    file = _file_of(predictions)
    kept = next((one for name in (SETTINGS, METRICS) if (one := file.with_name(name)).is_file()), None)
    if kept is None:
        return read_card(file.parent).classes
    content = read_json(kept)
    listed = content.get(CLASS_LIST, []) if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, str) and not has_half_characters(one) for one in listed):
        raise DataError(f"{CLASS_LIST} is not a list of names", path=kept)
    return tuple(listed)


def write_answers(answers: Iterable[ImageAnswer], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.writelines(to_line(answer) + "\n" for answer in answers)


def answer_samples(
    samples: Sequence[Sample],
    backend: RolloutBackend,
    vocab: CoordVocab,
    seeds: Seeds,
    scorer: TokenScorer | None = None,
    on_answer: Callable[[int], None] | None = None,
    count: int = 1,
) -> list[ImageAnswer]:
    """Generate, parse and, with a ``scorer``, score, in the order of ``samples``. ``on_answer`` is called with the
    number of answered samples so far, except for the last one, which is finished when this returns. ``count``: answers
    per sample, which follow each other; the first of several is greedy, the others are sampled, each from a request of
    its own. Raises AlignmentError if the backend answered another prompt than ours, e.g. to an image of another size,
    and the backend's RolloutError."""
    from coordexp.modeling.inputs import check_prompt  # imports torch, which saved answers do without

    before_last = None if on_answer is None else lambda n: on_answer(min(n // count, len(samples) - 1))
    requests = tuple(sample.request for sample in samples)
    if count == 1:
        rollouts = backend.generate(requests, seeds, on_answer=before_last)
    else:
        assert isinstance(seeds, DatasetSeeds), "several answers have seeds of their own only outside of training"
        rounds = [
            RolloutRound(requests, replace(seeds, answer=k, micro_step_idx=k), greedy=k == 0) for k in range(count)
        ]
        found: dict[tuple[int, int], Rollout] = {}
        for one in backend.generate_rounds(rounds):
            found[one.index, one.round_idx] = one.rollout
            if before_last is not None:
                before_last(len(found))
        rollouts = [found[place] for place in sorted(found)]
    asked = [sample for sample in samples for _ in range(count)]
    parsed = []
    for sample, rollout in zip(asked, rollouts, strict=True):
        check_prompt(sample.record.sample_id, sample.request.prompt_token_ids, rollout.prompt_token_ids, vocab.decode)
        parsed.append(parse_rollout(rollout.response_token_ids, vocab, ended=not rollout.truncated))
    if scorer is None:
        scores = [None] * len(asked)
    else:
        scores = scorer.score([sample.request for sample in asked], rollouts, parsed)
    return [
        make_answer(sample.record, rollout, found, scored)
        for sample, rollout, found, scored in zip(asked, rollouts, parsed, scores, strict=True)
    ]


def share_out(positions: Sequence[int], world_size: int, batch_size: int) -> list[list[range]]:
    """The batches of each rank, from samples' ascending ``positions`` in a dataset.

    A batch contains at most ``batch_size`` consecutive positions, because a sample's seed depends on its position.
    Batches are assigned to ranks in turn. Every rank gets the same number, some perhaps empty, because ranks that share
    an engine must call it together.
    """
    size = max(1, min(batch_size, -(-len(positions) // world_size)))  # a small set is spread over all ranks too
    batches: list[range] = []
    for position in positions:
        last = batches[-1] if batches else range(0)
        if len(last) and position == last.stop and len(last) < size:
            batches[-1] = range(last.start, position + 1)
        else:
            batches.append(range(position, position + 1))
    batches += [range(0)] * (-len(batches) % world_size)
    return [batches[rank::world_size] for rank in range(world_size)]


def answer_batches(
    dataset: RecordDataset,
    positions: Sequence[int],
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    seed: int,
    scorer: TokenScorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
    count: int = 1,
) -> Iterator[list[ImageAnswer]]:
    """This rank's answers for ``positions`` of ``dataset``, batch by batch: only one batch's images are in memory.
    With ``count`` answers per sample, which follow each other, a batch has that many times fewer samples.

    Sampling depends on ``seed`` and a sample's position, not on ranks, batches or the training step. Both callbacks get
    (samples answered, samples of this rank): ``on_progress`` before the first batch and after each was consumed, where
    it may raise; ``on_answer`` within batches, where it must not.
    """
    size = samples_of_batch(backend, count)
    batches = share_out(positions, distributed.world_size(), size)[distributed.rank()]
    done, total = 0, sum(len(batch) for batch in batches)
    if on_progress is not None and total:
        on_progress(0, total)  # a bar knows its length before the first batch, and its ETA after it
    for batch in batches:
        samples = [dataset[index] for index in batch]
        within = None if on_answer is None else lambda n, done=done: on_answer(done + n, total)
        yield answer_samples(samples, backend, vocab, DatasetSeeds(seed, batch.start), scorer, within, count)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, total)


def samples_of_batch(backend: RolloutBackend, count: int) -> int:
    """Samples that the backend answers at once if each gets ``count`` answers."""
    return max(1, backend.batch_size // count)


def answer_dataset(
    dataset: RecordDataset,
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    count: int = 1,
    leave_out: Collection[int] = (),
    **options: Any,
) -> list[ImageAnswer]:
    """The answers of all ranks, on every rank, in the order of ``dataset``, ``count`` per sample. A collective call;
    ``leave_out``: positions that are not answered; ``options`` as for :func:`answer_batches`."""
    positions = [at for at in range(len(dataset)) if at not in leave_out]
    with distributed.raise_on_all_ranks("evaluation"):
        batches = list(answer_batches(dataset, positions, backend, vocab, count=count, **options))
    parts = distributed.gather_json([to_line(answer) for answer in chain.from_iterable(batches)])
    placed: dict[tuple[int, int], str] = {}
    for share, part in zip(share_out(positions, len(parts), samples_of_batch(backend, count)), parts, strict=True):
        places = [(position, k) for position in chain.from_iterable(share) for k in range(count)]
        placed.update(zip(places, part, strict=True))
    return [from_line(placed[place]) for place in sorted(placed)]
