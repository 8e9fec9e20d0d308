"""The image on which an engine profiles its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordexp.data.images import ResizeRule
from coordexp.data.preparation import ImagePreparation, write_preparation
from coordexp.engine.arguments import with_image_size


@pytest.mark.parametrize(
    ("max_model_len", "max_pixels", "side"),
    [
        (4096, None, 2048),  # 64 x 64 tokens of 32 x 32 pixels
        (4100, None, 2048),
        (4096, 1024 * 1024, 1024),
        (100, 1024 * 1024, 320),
        (12_000, 800 * 1000, 864),  # 894 pixels, in whole tokens
    ],
)
def test_it_fits_the_prompt_and_the_resize_rule(
    max_model_len: int, max_pixels: int | None, side: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}))
    if max_pixels is not None:
        write_preparation(ImagePreparation(ResizeRule(max_pixels=max_pixels)), tmp_path)
    given = {"model": str(tmp_path), "max_model_len": max_model_len, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    expected = {"image": {"count": 2, "width": side, "height": side}, "video": 0}
    assert with_image_size(given) == {**given, "limit_mm_per_prompt": expected}
