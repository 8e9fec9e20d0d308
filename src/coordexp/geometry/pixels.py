"""Norm1000 bins → pixels of an image of any size: bin k is pixel k / 999 · (side − 1), as in preparation."""

from __future__ import annotations

from coordexp.geometry.boxes import Shape, aabb
from coordexp.records import NUM_BINS


def pixel_box(shape: Shape, width: int, height: int) -> tuple[float, float, float, float]:
    """``(x1, y1, x2, y2)`` of the shape's bounds, in pixels."""
    x1, y1, x2, y2 = aabb(shape)
    return _pixel(x1, width), _pixel(y1, height), _pixel(x2, width), _pixel(y2, height)


def pixel_ring(shape: Shape, width: int, height: int) -> tuple[tuple[float, float], ...]:
    """The shape's outline in pixels: a box's four corners, or a polygon's vertices."""
    if shape.kind == "bbox_2d":
        x1, y1, x2, y2 = pixel_box(shape, width, height)
        return (x1, y1), (x2, y1), (x2, y2), (x1, y2)
    flat = tuple(shape.bins)
    return tuple((_pixel(x, width), _pixel(y, height)) for x, y in zip(flat[0::2], flat[1::2], strict=True))


def _pixel(k: int, side: int) -> float:
    return k / (NUM_BINS - 1) * max(1, side - 1)
