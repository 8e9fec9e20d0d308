"""Answers for a photograph's tiles → one answer for the photograph. Torch-free.

Two tiles see an object that is in both, and each may see another part of it. So two predictions of different tiles are
the same object if they have one description and look alike where both tiles could see: the IoU of their parts in the
tiles' common region is at least 0.5. A prediction that ends at its tile's border is also the same object as one that
contains, or is contained in, 0.8 of the smaller part there (intersection over smaller area, IOS). Pairs are joined from
the most alike on, and an object takes at most one prediction of a tile. Predictions of one tile are never joined.
Polygons are compared by their bounds.

A joined object is the largest prediction that ends at no border; if there is none, its parts together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.data.polygons import clipped_shape
from coordexp.data.tiles import Tiling, Window
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, merged_counts
from coordexp.geometry import box_iou_pairs, to_fraction, to_pixel
from coordexp.records import GeometryKind, ImageRecord

_SAME_IOU = 0.5
_SAME_IOS = 0.8
_AT_BORDER = 0.01  # of a tile's side: a prediction that ends so close to a border is cut by it
_DECIMALS = 3  # of a bin: 0.01 pixels of a side of 10,000

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class _Part:
    """A prediction in pixels of the photograph. ``reach``: its box, extended beyond the borders of its tile that cut
    it."""

    obj: ScoredObject
    tile: int
    points: tuple[float, ...]
    box: Box
    reach: Box

    @property
    def is_cut(self) -> bool:
        return self.box != self.reach


def merge_tiles(record: ImageRecord, tiling: Tiling, answers: Sequence[ImageAnswer]) -> ImageAnswer:
    """One answer for the photograph ``record`` from those of its tiles, in the order of ``tiling``.

    Boxes are in fractions of the photograph's bins. Scores and confidences are the highest of an object's predictions,
    counts are sums."""
    windows = tiling.windows(record.width, record.height)
    size = record.width, record.height
    seen = enumerate(zip(answers, windows, strict=True))
    parts = [_part(obj, at, answer, window, size) for at, (answer, window) in seen for obj in answer.pred]
    pred = []
    for group in _groups(parts, windows):
        kind, points = _joined(group, windows)
        bins = tuple(round(to_fraction(x, size[at % 2]), _DECIMALS) for at, x in enumerate(points))
        scores = [part.obj.score for part in group if part.obj.score is not None]
        confidences = [part.obj.confidence for part in group if part.obj.confidence is not None]
        counts = [part.obj.answers for part in group if part.obj.answers is not None]
        pred.append(
            ScoredObject(group[0].obj.desc, kind, bins, max(scores, default=None), max(confidences, default=None),
                      max(counts, default=None))
        )  # fmt: skip
    several = max(len(answer.further_texts) for answer in answers)
    return ImageAnswer.of(
        record,
        pred,
        **merged_counts(answers),
        text="\n".join(answer.text for answer in answers),
        further_texts=tuple("\n".join(answer.further_texts[k] for answer in answers) for k in range(several)),
        tiling=tiling,
    )


def merge_all_tiles(
    records: Sequence[ImageRecord], tiling: Tiling, answers: Sequence[ImageAnswer], count: int
) -> list[ImageAnswer]:
    """``count`` answers for each photograph, which follow each other, from as many for each of its tiles."""
    merged, start = [], 0
    for record in records:
        end = start + count * len(tiling.windows(record.width, record.height))
        merged += [merge_tiles(record, tiling, answers[start + k : end : count]) for k in range(count)]
        start = end
    return merged


def _part(obj: ScoredObject, tile: int, answer: ImageAnswer, window: Window, size: tuple[int, int]) -> _Part:
    sides = answer.width, answer.height
    points = tuple(window[at % 2] + to_pixel(k, sides[at % 2]) for at, k in enumerate(obj.bins))
    box = min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])
    reach = list(box)
    for at, edge in enumerate((0, 0, *size)):
        near = _AT_BORDER * sides[at % 2]
        if window[at] != edge and abs(window[at] - box[at]) <= near:
            reach[at] = window[at] + (-2 if at < 2 else 2) * near
    return _Part(obj, tile, points, box, (reach[0], reach[1], reach[2], reach[3]))


def _groups(parts: Sequence[_Part], windows: Sequence[Window]) -> list[list[_Part]]:
    """The predictions of each object, in the order of their first ones."""
    group_of = list(range(len(parts)))
    members = {at: [at] for at in group_of}
    for _, _, i, j in sorted(_pairs(parts, windows), reverse=True):
        a, b = sorted((group_of[i], group_of[j]))
        tiles = [parts[k].tile for k in (*members[a], *members[b])]
        if a != b and len(set(tiles)) == len(tiles):
            for k in members.pop(b):
                group_of[k] = a
                members[a].append(k)
    return [[parts[k] for k in sorted(members[at])] for at in sorted(members)]


def _pairs(parts: Sequence[_Part], windows: Sequence[Window]) -> Iterator[tuple[float, float, int, int]]:
    """(likeness, common area, part, part) of all that may be one object. Likeness is an IoU, or an IOS less 1, to a
    tenth: among pairs that are equally alike, more in common decides."""
    window_T4 = np.array(windows, dtype=np.float64)
    of_tile = [[k for k, part in enumerate(parts) if part.tile == at] for at in range(len(windows))]
    used = [at for at, own in enumerate(of_tile) if own]
    for a in used:
        low_T2 = np.maximum(window_T4[a, :2], window_T4[:, :2])
        high_T2 = np.minimum(window_T4[a, 2:], window_T4[:, 2:])
        near = np.flatnonzero((low_T2 <= high_T2).all(axis=1))
        for b in near[near > a].tolist():
            if not of_tile[b]:
                continue
            border_2 = _AT_BORDER * np.maximum(window_T4[a, 2:] - window_T4[a, :2], window_T4[b, 2:] - window_T4[b, :2])
            common = np.concatenate([low_T2[b], high_T2[b]])
            wide = np.concatenate([low_T2[b] - border_2, high_T2[b] + border_2])
            for i in of_tile[a]:
                others = [j for j in of_tile[b] if parts[j].obj.desc == parts[i].obj.desc]
                if not others:
                    continue
                own_4, other_M4 = np.array(parts[i].reach), np.array([parts[j].reach for j in others])
                iou_M = box_iou_pairs(_inside(own_4, wide), _inside(other_M4, wide))
                ios_M, shared_M = _ios(_inside(own_4, common), _inside(other_M4, common))
                for j, iou, ios, shared in zip(others, iou_M, ios_M, shared_M, strict=True):
                    if iou >= _SAME_IOU:
                        yield round(float(iou), 1), float(shared), i, j
                    elif ios >= _SAME_IOS and (parts[i].is_cut or parts[j].is_cut):
                        yield round(float(ios) - 1, 1), float(shared), i, j


def _inside(box_N4: np.ndarray, window: np.ndarray) -> np.ndarray:
    # Boxes outside become NaN, which is like no other box.
    low_N2 = np.maximum(box_N4[..., :2], window[:2])
    high_N2 = np.minimum(box_N4[..., 2:], window[2:])
    outside_N1 = (low_N2 > high_N2).any(axis=-1, keepdims=True)
    clipped_N4 = np.concatenate([low_N2, np.maximum(low_N2, high_N2)], axis=-1)
    return np.where(outside_N1, np.nan, clipped_N4)


def _ios(a_4: np.ndarray, b_M4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intersection over smaller area, (M,), and intersection, (M,); 0 where there is none."""
    shared_M2 = np.minimum(a_4[2:], b_M4[:, 2:]) - np.maximum(a_4[:2], b_M4[:, :2])
    shared_M = np.nan_to_num(np.maximum(shared_M2, 0).prod(axis=1))
    smaller_M = np.minimum((a_4[2:] - a_4[:2]).prod(), (b_M4[:, 2:] - b_M4[:, :2]).prod(axis=1))
    return np.divide(shared_M, smaller_M, out=np.zeros_like(shared_M), where=smaller_M > 0), shared_M


def _joined(group: Sequence[_Part], windows: Sequence[Window]) -> tuple[GeometryKind, tuple[float, ...]]:
    whole = [part for part in group if not part.is_cut] or group[: len(group) == 1]
    if whole:
        largest = max(whole, key=lambda part: (part.box[2] - part.box[0]) * (part.box[3] - part.box[1]))
        return largest.obj.kind, largest.points
    if all(part.obj.kind == "poly" for part in group):
        # Each polygon counts up to the middle of what its tile shares with the next one: rings that do not overlap.
        cells = (_cell(windows[part.tile], windows) for part in group)
        rings = [clipped_shape("poly", part.points, cell)[0] for part, cell in zip(group, cells, strict=True)]
        first, *others = [ring for ring in rings if ring] or [group[0].points]
        # One ring that goes to each other one and back, on a line without area.
        return "poly", tuple(x for ring in (first, *((*first[:2], *o, *o[:2]) for o in others)) for x in ring)
    low, high = zip(*((part.box[:2], part.box[2:]) for part in group), strict=True)
    corners = (*map(min, zip(*low, strict=True)), *map(max, zip(*high, strict=True)))
    return "bbox_2d", corners


def _cell(window: Window, windows: Sequence[Window]) -> Box:
    sides: list[tuple[float, float]] = []
    for axis in (0, 1):
        spans = sorted({(one[axis], one[axis + 2]) for one in windows})
        at = spans.index((window[axis], window[axis + 2]))
        low = spans[0][0] if at == 0 else (spans[at - 1][1] + spans[at][0]) / 2
        high = spans[-1][1] if at == len(spans) - 1 else (spans[at][1] + spans[at + 1][0]) / 2
        sides.append((low, high))
    return sides[0][0], sides[1][0], sides[0][1], sides[1][1]
