"""Broken lines and configurations: refused by the command, with file and line, in few words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.cli_runs import Outcome, run_cli
from support.config_samples import stage1, write_yaml

OBJECT = {"desc": "cup", "bbox_2d": [1, 2, 30, 40]}
LINE = {"images": ["a.png"], "width": 9, "height": 9, "objects": [OBJECT]}


def line(**change: Any) -> bytes:
    return json.dumps({name: value for name, value in {**LINE, **change}.items() if value is not ...}).encode()


def obj(**change: Any) -> bytes:
    return line(objects=[{name: value for name, value in {**OBJECT, **change}.items() if value is not ...}])


LINES: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "text": b'"images"',
    "UTF-16": json.dumps(LINE).encode("utf-16"),
    "a NUL": b"\x00" + line(),
    "two values": line() + line(),
    "a comma too many": line()[:-1] + b",}",
    "a key twice": line()[:-1] + b', "width": 9}',
    "no images": line(images=...),
    "images null": line(images=None),
    "image number": line(images=[3]),
    "image a folder": line(images=["."]),
    "width as text": line(width="9"),
    "width a fraction": line(width=9.5),
    "width negative": line(width=-9),
    "width 10^30": line(width=10**30),
    "no height": line(height=...),
    "no objects": line(objects=...),
    "objects null": line(objects=None),
    "object null": line(objects=[None]),
    "object text": line(objects=["cup"]),
    "desc with a line separator": obj(desc="a\u2028b"),
    "box of five": obj(bbox_2d=[1, 2, 3, 4, 5]),
    "box of texts": obj(bbox_2d=["1", "2", "3", "4"]),
    "polygon of two points": obj(bbox_2d=..., poly=[1, 1, 5, 5]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    Image.new("RGB", (9, 9)).save(made / "a.png")
    (made / "none.png").write_bytes(b"no image at all")
    (made / "empty.png").write_bytes(b"")
    return made


def assert_in_words(done: Outcome, where: str) -> None:
    assert done.code == 2, done
    assert where in done.err and "Traceback" not in done.err and len(done.err) < 3000, done.err


@pytest.mark.parametrize("name", LINES)
def test_data_check_names_file_and_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    (folder / "data.jsonl").write_bytes(b"\n".join([line(), LINES[name].replace(b"\n", b" "), line()]) + b"\n")
    done = run_cli(capsys, "data", "check", folder / "data.jsonl")
    assert_in_words(done, "data.jsonl:2")
    seen(done.err)


YAMLS: dict[str, str] = {
    "empty": "",
    "null": "null",
    "text": "run it",
    "a tab": "training:\n\toutput_dir: x",
    "an unknown tag": "training: !!python/object/apply:os.system [id]",
    "an unknown alias": "training: *nothing",
    "keys that are lists": "[1, 2]: 3",
    "two documents": "training: {}\n---\nmodel: {}",
    "NUL": "training: \0",
    "nested 5,000 deep": "a: " + "[" * 5000 + "]" * 5000,
    "extends a folder": "extends: .",
}
KEYS: dict[str, tuple[str, Any]] = {
    "steps NaN": ("max_steps", float("nan")),
    "steps infinite": ("max_steps", float("inf")),
    "steps as text": ("max_steps", "many"),
    "steps 10^30": ("max_steps", 10**30),
    "rate negative": ("learning_rate", -1.0),
    "rate NaN": ("learning_rate", float("nan")),
    "batch zero": ("per_device_train_batch_size", 0),
    "folder null": ("output_dir", None),
    "folder a list": ("output_dir", ["a"]),
    "folder with NUL": ("output_dir", "a\0b"),
    "unknown": ("outptu_dir", "x"),
    "stop_within_s zero": ("stop_within_s", 0),
    "ddp_timeout text": ("ddp_timeout", "long"),
}


@pytest.mark.parametrize("name", [*YAMLS, *KEYS])
def test_config_check_names_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    if name in YAMLS:
        (tmp_path / "run.yaml").write_bytes(YAMLS[name].encode())
    else:
        config = stage1()
        config["training"][KEYS[name][0]] = KEYS[name][1]
        write_yaml(tmp_path, config, "run.yaml")
    done = run_cli(capsys, "config", "check", tmp_path / "run.yaml")
    assert_in_words(done, "run.yaml")
    seen(done.err)
