"""Unusable data: named by file and line, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.errors import DataError
from coordexp.evaluation.answers import read_answers
from coordexp.training.checked_run import check_run
from support.cli_runs import run_cli
from support.tiny_run import encoder_of, load_tiny, run_config


def write_line(folder: Path, image: str, size: tuple[int, int]) -> Path:
    cat = {"desc": "cat", "bbox_2d": [1, 1, 9, 9]}
    line = {"images": [image], "width": size[0], "height": size[1], "objects": [cat]}
    path = folder / "bad.jsonl"
    path.write_text(json.dumps(line) + "\n")  # escapes a surrogate, as many writers do
    return path


CASES: list[Any] = [
    pytest.param("thin.png", (1, 1000), "extreme_shape", "aspect ratio above 200", id="1x1000"),
    pytest.param("thin.png", (5000, 2), "extreme_shape", "aspect ratio above 200", id="5000x2"),
    pytest.param("a" * 5000 + ".png", (9, 9), "unreadable_image", "cannot be looked for", id="a path of 5,000"),
    pytest.param("b/" * 2500 + "c.png", (9, 9), "unreadable_image", "cannot be looked for", id="2,500 folders deep"),
    pytest.param("a\ud800.png", (9, 9), "schema", "lone surrogate", id="half a character"),
]


@pytest.mark.parametrize(("image", "size", "finding", "says"), CASES)
def test_data_check_and_training_name_the_line(
    image: str, size: tuple[int, int], finding: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if image == "thin.png":
        Image.new("RGB", size).save(tmp_path / image)
    path = write_line(tmp_path, image, size)
    checked = run_cli(capsys, "data", "check", path)
    assert checked.code == 2 and finding in checked.out + checked.err and "bad.jsonl:1" in checked.err
    run_config(tmp_path, 1, custom__train_jsonl=str(path))
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2 and says in refused.err and "bad.jsonl:1" in refused.err, refused.err
    assert len(refused.err) < 2000


def test_a_set_without_any_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    path = tmp_path / "none.jsonl"
    path.write_text('{"images": ["a.png"], "width": 40, "height": 24, "objects": []}\n')
    checked = run_cli(capsys, "data", "check", path)
    assert checked.code == 2 and "no_objects" in checked.err
    for key in ("train_jsonl", "val_jsonl"):
        with pytest.raises(DataError, match=rf"custom\.{key}: .*none\.jsonl"):
            check_run(run_config(tmp_path, 1, **{f"custom__{key}": str(path)}))


def test_an_image_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    """Prediction on a folder has no lines that could be checked before."""
    from coordexp.records import ImageRecord

    Image.new("RGB", (1000, 2)).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match=r"thin\.png: .*1000x2"):
        encoder_of(load_tiny()).encode(ImageRecord("thin", tmp_path / "thin.png", 1000, 2, ()))


def test_a_prediction_line_nested_200000_deep_is_refused_by_number(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text('{"x": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(DataError, match=r"predictions\.jsonl:1: "):
        read_answers(tmp_path)
