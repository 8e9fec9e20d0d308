"""Masks → outlines: COCO's run-length encodings, and any boolean array."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordexp.data.polygons import signed_ring_area

_SIGNED, _MORE, _LOW = 0x10, 0x20, 0x1F  # of a character of a compressed count, from which 48 is taken first
_LARGEST = 1 << 28  # pixels


def decode_runs(segmentation: Any, size: tuple[int, int] | None) -> np.ndarray:
    """A COCO run-length mask, compressed or as a list of counts → (height, width) of bool.

    The runs must add up to the size: decoders that trust them read foreign memory otherwise.

    Args:
        size: the (width, height) that the annotation gives its image; None where it gives none.

    Raises:
        ValueError: no run-length mask, or one of another size.
    """
    if not isinstance(segmentation, dict):
        raise ValueError("expected a mapping with counts and size")
    shape, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(side) is not int or side < 1 for side in shape):
        raise ValueError(f"size is {shape!r}, not [height, width]")
    height, width = shape
    if height * width > _LARGEST or (size is not None and (width, height) != size):
        raise ValueError(f"the mask is {width}x{height}, the image {'of another size' if size is None else size}")
    runs = _inflated(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or any(type(run) is not int or run < 0 for run in runs):
        raise ValueError("counts are neither a list of numbers nor COCO's text")
    if sum(runs) != height * width:
        raise ValueError(f"the runs add up to {sum(runs)} pixels, and the mask has {height * width}")
    values = np.arange(len(runs)) % 2 == 1  # the first run is outside
    return np.repeat(values, runs).reshape(width, height).T  # column by column


def encode_runs(mask: np.ndarray) -> dict[str, Any]:
    """The inverse of :func:`decode_runs`, counts as a list."""
    flat = mask.T.ravel()
    ends = [*(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    runs = np.diff([0, *ends]).tolist()
    return {"size": list(mask.shape), "counts": [0, *runs] if flat[0] else runs}


def outline(mask: np.ndarray) -> tuple[tuple[float, ...], int]:
    """The outer ring of a mask's largest part, in pixels from the image's corner, and how many parts it has.

    Holes are filled: a ring cannot have any.

    Args:
        mask: (height, width) of bool.

    Raises:
        ValueError: nothing is in it.
    """
    from contourpy import contour_generator

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        raise ValueError("the mask is empty")
    top, left = int(rows[0]), int(columns[0])
    part = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # Through the corners of pixels would be a stair; through the middle between in and out it cuts their corners.
    lines = contour_generator(z=np.pad(part, 1).astype(np.float64), name="serial").lines(0.5)
    corner_2 = np.array([left - 0.5, top - 0.5])
    rings = [_corners(np.asarray(line)[:-1] + corner_2) for line in lines]
    areas = [signed_ring_area(ring) for ring in rings]
    largest = max(range(len(rings)), key=lambda k: abs(areas[k]))  # the outermost ring is larger than any hole
    parts = sum((area > 0) == (areas[largest] > 0) for area in areas)  # holes turn the other way
    return rings[largest], parts


def _corners(points_N2: np.ndarray) -> tuple[float, ...]:
    """A closed line without the points at which it goes straight on, flat."""
    before_N2, after_N2 = points_N2 - np.roll(points_N2, 1, axis=0), np.roll(points_N2, -1, axis=0) - points_N2
    turns_N = before_N2[:, 0] * after_N2[:, 1] != before_N2[:, 1] * after_N2[:, 0]
    return tuple(points_N2[turns_N].ravel().tolist())


def _inflated(text: str) -> list[int]:
    """COCO's compressed counts: groups of five bits, the least first; from the third on, differences to the count two
    before."""
    runs: list[int] = []
    at = 0
    while at < len(text):
        value, shift, group = 0, 0, _MORE
        while group & _MORE:
            if at == len(text) or not 0 <= (group := ord(text[at]) - 48) < 64 or shift > 40:
                raise ValueError("counts are cut off, or no COCO text")
            value |= (group & _LOW) << shift
            at, shift = at + 1, shift + 5
        if group & _SIGNED:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    return runs
