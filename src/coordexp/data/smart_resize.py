"""The size to which the Qwen vision processors bring an image, computed here so that preparation can do it once."""

from __future__ import annotations

import math

from coordexp.errors import DataError

MAX_ASPECT_RATIO = 200.0
DEFAULT_FACTOR = 32  # patch 16 x merge 2
DEFAULT_MIN_PIXELS = 256 * 256
DEFAULT_MAX_PIXELS = 1024 * 1024  # 1024 image tokens at factor 32


def check_resize_limits(factor: int, min_pixels: int, max_pixels: int) -> None:
    """Refuse limits that no image can satisfy.

    Raises:
        DataError: ``factor`` < 1, ``min_pixels`` < 1, ``max_pixels`` < ``min_pixels`` or < ``factor``².
    """
    if factor < 1:
        raise DataError(
            f"resize factor is {factor}; expected patch_size * merge_size of the model, e.g. 32 for Qwen3-VL"
        )
    if min_pixels < 1 or max_pixels < min_pixels:
        raise DataError(f"min_pixels={min_pixels}, max_pixels={max_pixels}; expected 1 <= min_pixels <= max_pixels")
    if max_pixels < factor * factor:
        raise DataError(f"max_pixels={max_pixels} is less than one {factor}x{factor} image token; raise max_pixels")


def shape_problem(width: int, height: int) -> str | None:
    """The sentence for an image that the vision processors refuse for its shape; None for any other."""
    if max(height, width) / min(height, width) <= MAX_ASPECT_RATIO:
        return None
    return (
        f"image size {width}x{height} has an aspect ratio above {MAX_ASPECT_RATIO:g}, which the vision processor "
        "refuses; crop or tile the image"
    )


def smart_resize(
    height: int,
    width: int,
    factor: int = DEFAULT_FACTOR,
    min_pixels: int = DEFAULT_MIN_PIXELS,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> tuple[int, int]:
    """``(height, width)`` in pixels after resizing: multiples of ``factor``, area within the limits, aspect ratio kept
    as nearly as the grid allows. The limits give way, as in the processors, where the grid cannot meet them (very thin
    images, limits closer together than one grid step).

    Raises:
        DataError: a side is not positive, the aspect ratio exceeds 200, or the limits contradict each other.
    """
    check_resize_limits(factor, min_pixels, max_pixels)
    if height < 1 or width < 1:
        raise DataError(f"image size {width}x{height}: both sides must be at least 1 pixel")
    if problem := shape_problem(width, height):
        raise DataError(problem)
    # Python's round (half to even) is part of the contract: the processors use it too.
    grid_h, grid_w = round(height / factor) * factor, round(width / factor) * factor
    if grid_h * grid_w > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        grid_h = max(factor, math.floor(height / shrink / factor) * factor)
        grid_w = max(factor, math.floor(width / shrink / factor) * factor)
    elif grid_h * grid_w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        grid_h = math.ceil(height * grow / factor) * factor
        grid_w = math.ceil(width * grow / factor) * factor
    return grid_h, grid_w
