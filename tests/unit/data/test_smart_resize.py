"""Our resize plan is the vision processor's own."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import smart_resize
from coordexp.errors import DataError

sides = st.integers(1, 3000)


@pytest.fixture(scope="module")
def reference() -> Callable[..., tuple[int, int]]:
    """The installed transformers' own function. Its module imports torchvision, which this function does not use and
    a CPU-only machine may not be able to load, so the function is taken from the module's source."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "models" / "qwen2_vl" / "image_processing_qwen2_vl.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "smart_resize"]
    scope: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)
    return scope["smart_resize"]


@given(height=sides, width=sides, factor=st.sampled_from([16, 28, 32]), data=st.data())
def test_it_equals_the_processors(
    reference: Callable[..., tuple[int, int]], height: int, width: int, factor: int, data: st.DataObject
) -> None:
    min_pixels = data.draw(st.integers(1, 400_000))
    max_pixels = data.draw(st.integers(max(min_pixels, factor**2), 2_000_000))
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError):
            reference(height, width, factor, min_pixels, max_pixels)
        with pytest.raises(DataError, match="aspect ratio"):
            smart_resize(height, width, factor, min_pixels, max_pixels)
    else:
        expected = reference(height, width, factor, min_pixels, max_pixels)
        assert smart_resize(height, width, factor, min_pixels, max_pixels) == expected


@given(height=st.integers(100, 3000), ratio=st.floats(0.25, 4.0))
def test_usual_images_land_on_the_grid_within_the_limits_and_stay_there(height: int, ratio: float) -> None:
    width = round(height * ratio)
    new_height, new_width = smart_resize(height, width)
    assert new_height % 32 == new_width % 32 == 0
    assert 256 * 256 <= new_height * new_width <= 1024 * 1024
    # Half a grid step on either side is all that the shape may give.
    assert abs(new_width - new_height * width / height) <= 32 * (1 + width / height)
    assert smart_resize(new_height, new_width) == (new_height, new_width)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((0, 10), "at least 1 pixel"),
        ((10, 10, 0), "factor is 0"),
        ((10, 10, 32, 0, 9999), "1 <= min_pixels"),
        ((10, 10, 32, 9999, 5000), "min_pixels <= max_pixels"),
        ((10, 10, 32, 100, 1000), "less than one 32x32"),
    ],
)
def test_impossible_demands_are_refused(arguments: tuple[int, ...], part: str) -> None:
    with pytest.raises(DataError, match=part):
        smart_resize(*arguments)
