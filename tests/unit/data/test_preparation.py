"""The rule by which training images were resized: in the data, in the checkpoint, on any other image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.data.preparation import (
    NO_RESIZE,
    PREPARATION,
    ImagePreparation,
    ResizeRule,
    preparation_of,
    read_preparation,
    write_preparation,
)
from coordexp.errors import CheckpointError, DataError
from coordexp.records import ImageRecord

RULE = ResizeRule(32, 32 * 32, 160 * 224)


def record(width: int, height: int, metadata: dict[str, Any] | None = None) -> ImageRecord:
    return ImageRecord("d.jsonl:1", Path("/a.png"), width, height, (), metadata or {})


def prepared(rule: ResizeRule) -> dict[str, Any]:
    return {"prepared": rule.to_metadata()}


def test_a_resized_image_stays_as_it_is() -> None:
    photo = Image.new("RGB", (378, 504))
    copy = RULE.resize(photo)
    assert copy.size == RULE.size(378, 504) == (160, 192)
    assert RULE.resize(copy) is copy


def test_the_rule_is_that_of_all_records_or_none() -> None:
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


@pytest.mark.parametrize(
    "kept", [ImagePreparation(RULE, (1, 2)), ImagePreparation(None, (5, 9)), ImagePreparation(RULE)]
)
def test_a_checkpoint_stores_the_preparation(kept: ImagePreparation, tmp_path: Path) -> None:
    write_preparation(kept, tmp_path)
    assert read_preparation(tmp_path) == kept
    assert json.loads((tmp_path / PREPARATION).read_text()) == {
        "schema_version": 1,
        "resize": kept.resize and {"factor": 32, "min_pixels": 1024, "max_pixels": 35840},
        "seen_pixels": kept.seen_pixels and list(kept.seen_pixels),
    }
    write_preparation(NO_RESIZE, tmp_path)
    assert read_preparation(tmp_path) == NO_RESIZE and not (tmp_path / PREPARATION).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"resize": {"factor": 0}, "seen_pixels": null}',
                                  '{"resize": null, "seen_pixels": [1]}'])  # fmt: skip
def test_a_broken_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / PREPARATION).write_text(text)
    with pytest.raises(CheckpointError, match=PREPARATION):
        read_preparation(tmp_path)


def test_areas_far_from_training_are_recognised() -> None:
    unruled = ImagePreparation(None, (160 * 160, 160 * 208))
    assert unruled.is_unlike_training(378, 504) and unruled.is_unlike_training(32, 32)
    assert not unruled.is_unlike_training(160, 208) and not unruled.is_unlike_training(200, 200)
    assert not ImagePreparation(RULE, (160 * 160, 160 * 208)).is_unlike_training(3780, 5040)
    assert not NO_RESIZE.is_unlike_training(1, 1)
