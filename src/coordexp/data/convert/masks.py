"""Masks → outlines: COCO's run-length encodings, and any boolean array."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordexp.data.polygons import signed_ring_area

_SIGNED, _MORE, _LOW = 0x10, 0x20, 0x1F  # of a character of a compressed count, from which 48 is taken first
_LARGEST = 1 << 28  # pixels


def decode_runs(segmentation: dict[str, Any], size: tuple[int, int] | None) -> np.ndarray:
    """A COCO run-length mask, compressed or as a list of counts → (height, width) of bool.

    The runs must add up to the size: pycocotools trusts them and reads foreign memory otherwise.

    Args:
        size: the (width, height) of the image in its annotation; None without one.

    Raises:
        ValueError: not a run-length mask, or one of another size.
    """
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


def _inflated(text: str) -> list[int]:
    """COCO's compressed counts: groups of five bits, the lowest first; from the third on, differences to the count two
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


def outline(mask: np.ndarray) -> tuple[tuple[float, ...], int]:
    """The outer ring of a mask's largest part, in pixels from the image's corner, and the number of its parts.

    Holes are filled: a ring cannot have any.

    Args:
        mask: (height, width) of bool.

    Raises:
        ValueError: the mask is empty.
    """
    from contourpy import contour_generator

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        raise ValueError("the mask is empty")
    top, left = int(rows[0]), int(columns[0])
    part = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # A line along the pixels' edges would be a stair; one half-way between inside and outside cuts their corners.
    lines = contour_generator(z=np.pad(part, 1).astype(np.float64), name="serial").lines(0.5)
    rings: list[tuple[float, ...]] = []
    for line in lines:
        points_N2 = np.asarray(line)[:-1] + np.array([left - 0.5, top - 0.5])
        # Points on a straight stretch are dropped.
        before_N2, after_N2 = points_N2 - np.roll(points_N2, 1, axis=0), np.roll(points_N2, -1, axis=0) - points_N2
        turns_N = before_N2[:, 0] * after_N2[:, 1] != before_N2[:, 1] * after_N2[:, 0]
        rings.append(tuple(points_N2[turns_N].ravel().tolist()))
    areas = [signed_ring_area(ring) for ring in rings]
    largest = max(range(len(rings)), key=lambda k: abs(areas[k]))  # the outermost ring is larger than any hole
    parts = sum((area > 0) == (areas[largest] > 0) for area in areas)  # holes turn the other way
    return rings[largest], parts
