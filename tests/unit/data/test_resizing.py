"""The size of images for the model, and the rule by which training images were resized."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coordexp.data.images import ResizeRule, shape_problem
from coordexp.data.preparation import (
    NO_RESIZE,
    ImagePreparation,
    preparation_of,
)
from coordexp.errors import DataError
from coordexp.records import ImageRecord

# --- sizes ---

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
def test_resizing_equals_the_processors(
    reference: Callable[..., tuple[int, int]], height: int, width: int, factor: int, data: st.DataObject
) -> None:
    min_pixels = data.draw(st.integers(1, 400_000))
    max_pixels = data.draw(st.integers(max(min_pixels, factor**2), 2_000_000))
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError):
            reference(height, width, factor, min_pixels, max_pixels)
        with pytest.raises(DataError, match="aspect ratio"):
            ResizeRule(factor, min_pixels, max_pixels).size(width, height)
    else:
        expected = reference(height, width, factor, min_pixels, max_pixels)
        assert ResizeRule(factor, min_pixels, max_pixels).size(width, height)[::-1] == expected


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "10x0 has no pixels"),
        ((0,), "factor is 0"),
        ((32, 0, 9999), "1 <= min_pixels"),
        ((32, 9999, 5000), "min_pixels <= max_pixels"),
        ((32, 100, 1000), "less than one 32x32"),
        ((32, 1 << 40, 1 << 41), "would enlarge every image"),
    ],
)
def test_impossible_limits_are_refused(arguments: tuple[int, ...], part: str) -> None:
    with pytest.raises(DataError, match=part):
        ResizeRule(*arguments).size(10, 0)


# --- rules ---


@pytest.mark.parametrize(
    ("limits", "settled"),
    [((256**2, 1024**2), True), ((256**2, 2 * 256**2), True), ((256**2, 256**2), False), ((65_536, 80_000), False)],
)
def test_limits_closer_than_a_grid_step_resize_some_images_twice(limits: tuple[int, int], settled: bool) -> None:
    assert ResizeRule(32, *limits).is_settled() == settled


def test_equal_limits_shrink_an_image_a_second_time() -> None:
    rule = ResizeRule(32, 128**2, 128**2)
    assert rule.size(101, 77) == (160, 128) and rule.size(160, 128) == (128, 96)


RULE = ResizeRule(32, 32 * 32, 160 * 224)


def record(width: int, height: int, metadata: dict[str, Any] | None = None) -> ImageRecord:
    return ImageRecord("d.jsonl:1", Path("/a.png"), width, height, (), metadata or {})


def prepared(rule: ResizeRule) -> dict[str, Any]:
    return {"prepared": asdict(rule)}


def test_a_resized_image_is_not_resized_again() -> None:
    photo = Image.new("RGB", (378, 504))
    copy = RULE.resize(photo)
    assert copy.size == RULE.size(378, 504) == (160, 192)
    assert RULE.resize(copy) is copy


@pytest.mark.parametrize(("size", "expected"), [((7064, 37), (6400, 32)), ((37, 7064), (32, 6400))])
def test_a_thin_image_does_not_become_too_thin(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """191:1 was resized to 7072x32, 221:1, which processors and training refuse."""
    assert ResizeRule().resize(Image.new("RGB", size)).size == expected
    assert ResizeRule().resize(Image.new("RGB", expected)).size == expected and shape_problem(*expected) is None
    assert not ImagePreparation(ResizeRule()).changes(*expected)


def test_a_rule_is_used_only_if_all_records_share_it() -> None:
    shared = [record(160, 192, prepared(RULE)), record(96, 64, prepared(RULE))]
    assert preparation_of(shared) == ImagePreparation(RULE, (96 * 64, 160 * 192))
    assert preparation_of([*shared, record(10, 10)]).resize is None
    assert preparation_of([*shared, record(64, 64, prepared(ResizeRule(16, 256, 4096)))]).resize is None
    assert preparation_of([record(10, 20)]) == ImagePreparation(None, (200, 200))


@pytest.mark.parametrize("written", [3, {"factor": 32}, {"factor": "32", "min_pixels": 1, "max_pixels": 9999},
                                     {"factor": 32, "min_pixels": 9, "max_pixels": 8}])  # fmt: skip
def test_an_invalid_rule_is_refused_with_its_record(written: Any) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl:1: metadata\.prepared is "):
        preparation_of([record(9, 9, {"prepared": written})])


def test_areas_far_from_training_are_recognised() -> None:
    unruled = ImagePreparation(None, (160 * 160, 160 * 208))
    assert unruled.is_unlike_training(378, 504) and unruled.is_unlike_training(32, 32)
    assert not unruled.is_unlike_training(160, 208) and not unruled.is_unlike_training(200, 200)
    assert not ImagePreparation(RULE, (160 * 160, 160 * 208)).is_unlike_training(3780, 5040)
    assert not NO_RESIZE.is_unlike_training(1, 1)
