"""Differences of two runs on the same images, with intervals of a paired bootstrap over images."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from rich.table import Table
from rich.text import Text

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, picture_of
from coordexp.evaluation.coco_results import average_precision
from coordexp.evaluation.detection import (
    DENSITIES,
    IOU_THRESHOLD,
    count_image,
    detection_metrics,
    match_answer,
    match_by_desc,
)
from coordexp.evaluation.summary import text_table
from coordexp.printable import printable

RESAMPLES = 1000
CONFIDENCE = 0.95  # of every interval
_MOST_WEIGHTS = 4 << 20  # resamples times images that training's evaluation draws at once
_COUNTS = ("images", "gt", "pred", "matched", "matched_any_desc", "matched_iou_sum", "valid", "dropped", "duplicates",
           "giants", "truncated", "repeat_terminated", "empty", "tokens")  # fmt: skip
COMPARED = ("f1", "precision", "recall", "mean_matched_iou", "duplicate_rate", "giant_rate", "invalid_rate",
            "truncated_rate", "empty_rate", "pred_per_image")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both runs, and the interval that holds ``b - a`` in ``CONFIDENCE`` of all resamples; None for average
    precision, which is not a sum of counts."""

    name: str
    a: float
    b: float
    interval: tuple[float, float] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """F1 of the objects of one description, or of the images of one density. ``ap`` is None for densities."""

    name: str
    gt: int
    f1: Difference
    ap: Difference | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """``part`` of ``whole``, and the interval of their ratio."""

    part: int
    whole: int
    interval: tuple[float, float]

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Single objects from run ``a`` to run ``b``, which equal totals hide.

    ``kept``, ``lost``: annotated objects that ``a`` found, of all that it found. ``gained``: found by ``b`` alone, of
    those that ``a`` missed. ``false_gained``, ``false_lost``: wrong boxes of one run that the other does not have, of
    this run's predictions; a wrong box that both have is of equal description and overlaps by IoU 0.5 or more.
    ``repeats_a``, ``repeats_b``: predictions that repeat another one, of a run's predictions.
    """

    kept: Share
    lost: Share
    gained: Share
    false_gained: Share
    false_lost: Share
    repeats_a: Share
    repeats_b: Share


# Each share of a ledger as two counts of an image: a part, and the whole that it is of.
_PARTS = {
    "kept": ("kept", "found"),
    "lost": ("lost", "found"),
    "gained": ("gained", "missed"),
    "false_gained": ("false_gained", "pred_b"),
    "false_lost": ("false_lost", "pred_a"),
    "repeats_a": ("duplicates_a", "pred_a"),
    "repeats_b": ("duplicates_b", "pred_b"),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``figures`` of all images; the ``ledger`` of single objects; ``by_class`` of the annotated descriptions, most
    frequent first; ``by_density``."""

    images: int
    resamples: int
    seed: int
    figures: tuple[Difference, ...]
    ledger: Ledger
    by_class: tuple[GroupDifference, ...]
    by_density: tuple[GroupDifference, ...]


def compare(
    a: Sequence[ImageAnswer],
    b: Sequence[ImageAnswer],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Every figure of both runs; those made of counts have the percentile interval of their difference.

    Images are paired by ``sample_id`` and drawn with replacement, the same ones for both runs, so that an image that is
    hard for both cancels out. The same answers and ``seed`` give the same intervals. Raises DataError if the runs did
    not answer the same images with the same annotations.
    """
    b = paired(a, b)
    weights_RN = _image_weights(np.random.default_rng(seed), len(a), resamples)
    counted = [[count_image(answer, IOU_THRESHOLD) for answer in run] for run in (a, b)]
    ap_a, ap_b = (average_precision(run) for run in (a, b))
    figures = [Difference("AP", ap_a.figures.get("AP", 0.0), ap_b.figures.get("AP", 0.0))]

    def metrics(counts: Sequence[float]) -> dict[str, float]:
        return detection_metrics(dict(zip(_COUNTS, counts, strict=True)))

    matrices = [np.array([[part.counts[name] for name in _COUNTS] for part in run], np.float64) for run in counted]
    whole_a, whole_b = (metrics(run.sum(axis=0).tolist()) for run in matrices)
    drawn = [[metrics(row) for row in (weights_RN @ run).tolist()] for run in matrices]
    for name in COMPARED:
        difference_R = np.array([after[name] - before[name] for before, after in zip(*drawn, strict=True)])
        figures.append(Difference(name, whole_a[name], whole_b[name], _interval(difference_R)))

    changes: list[dict[str, float]] = []
    for before, after, *counts in zip(a, b, *counted, strict=True):
        duplicates = {f"duplicates_{run}": part.counts["duplicates"] for run, part in zip("ab", counts, strict=True)}
        changes.append(_changes(before, after) | duplicates)
    ledger = Ledger(**_shares(_PARTS, changes, [weights_RN]))
    images_of: defaultdict[str, set[int]] = defaultdict(set)
    for run in counted:
        for n, part in enumerate(run):
            for desc in part.by_desc:
                images_of[desc].add(n)
    by_class = []
    for desc, images in images_of.items():
        of_N = sorted(images)
        parts = [[run[n].by_desc.get(desc, {}) for n in of_N] for run in counted]
        ap = Difference("AP", ap_a.by_class[desc], ap_b.by_class[desc]) if desc in ap_a.precision_of else None
        by_class.append(_group(desc, parts, weights_RN[:, of_N], ap))
    by_class = sorted((row for row in by_class if row.gt), key=lambda row: (-row.gt, row.name))

    by_density = []
    for name in list(DENSITIES)[1:]:  # images without objects have no F1
        of_N = [n for n, part in enumerate(counted[0]) if part.density == name]
        if of_N:
            parts = [[run[n].counts for n in of_N] for run in counted]
            by_density.append(_group(f"{name} objects", parts, weights_RN[:, of_N]))
    return Comparison(len(a), resamples, seed, tuple(figures), ledger, tuple(by_class), tuple(by_density))


def changed_rates(first: Sequence[ImageAnswer], later: Sequence[ImageAnswer]) -> dict[str, float]:
    """Shares of :class:`Ledger` by name (``lost_rate``), each with the ends of its interval (``lost_rate_low``,
    ``lost_rate_high``), of two lists of the same images in the same order. A share of nothing is 0,
    and its interval 0 to 1."""
    changes = [_changes(before, after) for before, after in zip(first, later, strict=True)]
    rates: dict[str, float] = {}
    for name, share in _shares(("lost", "gained", "false_gained"), changes, _weights_in_parts(len(changes))).items():
        low, high = share.interval if share.whole else (0.0, 1.0)
        rates |= {f"{name}_rate": share.value, f"{name}_rate_low": low, f"{name}_rate_high": high}
    return rates


def _weights_in_parts(images: int) -> Iterator[np.ndarray]:
    # The weights of RESAMPLES, a few resamples at a time: a validation set may be large.
    if not images:
        yield np.zeros((RESAMPLES, 0))
        return
    generator = np.random.default_rng(0)
    at_once = max(1, _MOST_WEIGHTS // images)
    for done in range(0, RESAMPLES, at_once):
        yield _image_weights(generator, images, min(at_once, RESAMPLES - done))


def _changes(before: ImageAnswer, after: ImageAnswer) -> dict[str, float]:
    """One image's part of the ledger. ``pred_a``, ``pred_b``: predictions that are right or wrong."""
    gt = before.gt or ()
    annotated = {j for j, obj in enumerate(gt) if obj.soft is None}
    found, wrong, judged = [], [], []
    for answer in (before, after):
        pairs = match_answer(answer, IOU_THRESHOLD)
        found.append({j for _, j, _ in pairs} & annotated)
        right = {i for i, _, _ in pairs}
        wrong.append([one for i, one in enumerate(answer.pred) if i not in right])
        judged.append(len(answer.pred) - sum(j not in annotated for _, j, _ in pairs))
    same_wrong = len(match_by_desc(wrong[0], wrong[1], IOU_THRESHOLD))
    return {
        "found": len(found[0]), "missed": len(annotated - found[0]), "kept": len(found[0] & found[1]),
        "lost": len(found[0] - found[1]), "gained": len(found[1] - found[0]),
        "false_lost": len(wrong[0]) - same_wrong, "false_gained": len(wrong[1]) - same_wrong,
        "pred_a": judged[0], "pred_b": judged[1],
    }  # fmt: skip


def _image_weights(generator: np.random.Generator, images: int, resamples: int) -> np.ndarray:
    # (R, N) How often each image is drawn: each row sums to the number of images.
    return generator.multinomial(images, np.full(images, 1 / images), size=resamples)


def _shares(
    names: Collection[str], changes: Sequence[Mapping[str, float]], weights: Iterable[np.ndarray]
) -> dict[str, Share]:
    """Shares of :class:`Ledger` by name. ``weights``: of all resamples, in parts of (R, N)."""
    columns = {key: np.array([one[key] for one in changes], np.float64) for name in names for key in _PARTS[name]}
    sums = [{key: weights_RN @ column_N for key, column_N in columns.items()} for weights_RN in weights]
    shares = {}
    for name in names:
        part, whole = _PARTS[name]
        part_R, whole_R = (np.concatenate([one[key] for one in sums]) for key in (part, whole))
        is_any_R = whole_R > 0  # resamples with nothing to count have no share
        interval = _interval(part_R[is_any_R] / whole_R[is_any_R]) if is_any_R.any() else (0.0, 0.0)
        shares[name] = Share(int(columns[part].sum()), int(columns[whole].sum()), interval)
    return shares


def _group(
    name: str, parts: Sequence[Sequence[Mapping[str, float]]], weights_RN: np.ndarray, ap: Difference | None = None
) -> GroupDifference:
    def f1_of(count_R3: np.ndarray) -> np.ndarray:  # (R,), 1 if there is nothing to find and nothing was found
        gt_R, pred_R, matched_R = count_R3.T
        return np.divide(2 * matched_R, gt_R + pred_R, out=np.ones(len(count_R3)), where=gt_R + pred_R > 0)

    counts = [
        np.array([[part.get(key, 0) for key in ("gt", "pred", "matched")] for part in run], dtype=np.float64)
        for run in parts
    ]
    before, after = (float(f1_of(count_N3.sum(axis=0, keepdims=True))[0]) for count_N3 in counts)
    before_R, after_R = (f1_of(weights_RN @ count_N3) for count_N3 in counts)
    f1 = Difference("f1", before, after, _interval(after_R - before_R))
    return GroupDifference(name, int(counts[0][:, 0].sum()), f1, ap)


def paired(a: Sequence[ImageAnswer], b: Sequence[ImageAnswer]) -> list[ImageAnswer]:
    """``b`` in the order of ``a``, also its annotations: an evaluation has them in the run's order, a prediction in
    that of the file. Raises DataError for other images, or other annotations."""
    by_id = {answer.sample_id: answer for answer in b}
    lone = sorted({answer.sample_id for answer in a} ^ by_id.keys())
    if lone:
        raise DataError(
            f"{len(lone)} images were answered by one run only ({lone[0]} first); predict both from one JSONL"
        )
    for answer in a:
        other = by_id[answer.sample_id]
        pictures = [picture_of(one.image, one.width, one.height) for one in (answer, other)]
        if pictures[0] != pictures[1]:
            raise DataError(
                f"{answer.sample_id}: the two runs answered other pictures ({answer.image}, {other.image}); predict "
                "both from one JSONL"
            )
        if answer.gt is None or other.gt is None or Counter(other.gt) != Counter(answer.gt):
            raise DataError(f"{answer.sample_id}: the two runs have other annotations; predict both from one JSONL")
    return [replace(by_id[answer.sample_id], gt=answer.gt) for answer in a]


def _interval(values_R: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return low, high


def comparison_tables(comparison: Comparison, names: tuple[str, str], max_classes: int = 20) -> Iterable[Table]:
    """Both runs' figures and the intervals of their differences, bold if zero is outside: of all images, by class
    (the ``max_classes`` most frequent), and by density."""
    columns = ("a", "b", "b − a", "interval")
    interval = f"{CONFIDENCE:.0%} of {comparison.resamples} paired resamples"
    said = f"{comparison.images} images; interval: {interval}; bold: zero is outside"
    title = "\n".join(printable(line) for line in (f"a: {names[0]}", f"b: {names[1]}", said))
    table = text_table(Text(title), "figure", *columns)
    for one in comparison.figures:
        table.add_row(one.name, *_cells(one))
    yield table
    table = text_table("single objects, from a to b", "", "objects", "of", "share", "interval")
    ledger = comparison.ledger
    for label, one in (
        ("found by both", ledger.kept),
        ("lost: found by a alone", ledger.lost),
        ("gained: of those that a missed", ledger.gained),
        ("wrong boxes gained, of b's", ledger.false_gained),
        ("wrong boxes lost, of a's", ledger.false_lost),
        ("repeats of a", ledger.repeats_a),
        ("repeats of b", ledger.repeats_b),
    ):
        table.add_row(label, str(one.part), str(one.whole), f"{one.value:.3f}", "{:.3f} … {:.3f}".format(*one.interval))
    yield table
    more = len(comparison.by_class) - max_classes
    by_class = "F1 by class" + (f" ({more} more with --json)" if more > 0 else "")
    for heading, first, rows in (
        (by_class, "class", comparison.by_class[:max_classes]),
        ("F1 by density", "image with", comparison.by_density),
    ):
        table = text_table(heading, first, "gt", *columns)
        by_chance = (1 - CONFIDENCE) * len(rows)
        if by_chance >= 0.5:  # of many intervals, some exclude zero although nothing differs
            table.caption = Text(f"of {len(rows)} rows, {by_chance:.0f} would be bold by luck alone")
        for row in rows:
            table.add_row(Text(printable(row.name)), str(row.gt), *_cells(row.f1))
        yield table


def _cells(difference: Difference) -> tuple[str, str, Text, Text]:
    style = "bold" if difference.is_clear else ""
    change = Text(f"{difference.b - difference.a:+.3f}", style)
    interval = "–" if difference.interval is None else "{:+.3f} … {:+.3f}".format(*difference.interval)
    return f"{difference.a:.3f}", f"{difference.b:.3f}", change, Text(interval, style)


def comparison_json(comparison: Comparison, names: tuple[str, str]) -> Mapping[str, object]:
    """The same for machines."""

    def plain(difference: Difference) -> Mapping[str, object]:
        low, high = difference.interval or (None, None)
        return {"name": difference.name, "a": difference.a, "b": difference.b, "low": low, "high": high,
                "difference": difference.b - difference.a, "clear": difference.is_clear}  # fmt: skip

    def group(row: GroupDifference) -> Mapping[str, object]:
        return {"name": row.name, "gt": row.gt, "figures": [plain(one) for one in (row.f1, row.ap) if one is not None]}

    def share(of: Share) -> Mapping[str, object]:
        low, high = of.interval
        return {"part": of.part, "whole": of.whole, "share": of.value, "low": low, "high": high}

    return {
        "a": names[0],
        "b": names[1],
        "confidence": CONFIDENCE,
        **{name: getattr(comparison, name) for name in ("images", "resamples", "seed")},
        "figures": [plain(one) for one in comparison.figures],
        "ledger": {one.name: share(getattr(comparison.ledger, one.name)) for one in fields(Ledger)},
        "by_class": [group(row) for row in comparison.by_class],
        "by_density": [group(row) for row in comparison.by_density],
    }
