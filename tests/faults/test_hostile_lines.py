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
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "text": b'"images"',
    "bytes that are not UTF-8": b'{"images": ["\xff.png"]}',
    "UTF-16": json.dumps(LINE).encode("utf-16"),
    "a NUL": b"\x00" + line(),
    "two values": line() + line(),
    "a comma too many": line()[:-1] + b",}",
    "NaN": line()[:-1] + b', "width": NaN}',
    "a key twice": line()[:-1] + b', "width": 9}',
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "an integer of 10,000 digits": line()[:-1] + b', "metadata": ' + b"9" * 10_000 + b"}",
    "no images": line(images=...),
    "images empty": line(images=[]),
    "two images": line(images=["a.png", "a.png"]),
    "images text": line(images="a.png"),
    "images null": line(images=None),
    "image number": line(images=[3]),
    "image empty": line(images=[""]),
    "image a folder": line(images=["."]),
    "image with NUL": line(images=["a\x00.png"]),
    "image that is not there": line(images=["b.png"]),
    "image that is none": line(images=["none.png"]),
    "image that is empty": line(images=["empty.png"]),
    "image of another size": line(width=10),
    "width as text": line(width="9"),
    "width a fraction": line(width=9.5),
    "width true": line(width=True),
    "width zero": line(width=0),
    "width negative": line(width=-9),
    "width 10^30": line(width=10**30),
    "no height": line(height=...),
    "no objects": line(objects=...),
    "objects null": line(objects=None),
    "objects an object": line(objects={}),
    "object null": line(objects=[None]),
    "object text": line(objects=["cup"]),
    "unknown key": line(label=3),
    "object with unknown key": obj(label="cup"),
    "no desc": obj(desc=...),
    "desc empty": obj(desc="  "),
    "desc number": obj(desc=3),
    "desc of two lines": obj(desc="a\nb"),
    "desc with a control token": obj(desc="<|im_end|>"),
    "desc with a line separator": obj(desc="a\u2028b"),
    "desc half a character": obj(desc="a\ud800"),
    "no shape": obj(bbox_2d=...),
    "two shapes": obj(poly=[1, 1, 5, 1, 5, 5]),
    "box of three": obj(bbox_2d=[1, 2, 3]),
    "box of five": obj(bbox_2d=[1, 2, 3, 4, 5]),
    "box of texts": obj(bbox_2d=["1", "2", "3", "4"]),
    "box of fractions": obj(bbox_2d=[1.5, 2, 3, 4]),
    "box of pixels": obj(bbox_2d=[1, 2, 3000, 4000]),
    "box negative": obj(bbox_2d=[-1, 2, 3, 4]),
    "box the wrong way": obj(bbox_2d=[30, 40, 1, 2]),
    "box null": obj(bbox_2d=None),
    "box of coordinates beyond": obj(bbox_2d=["<|coord_1000|>", 2, 3, 4]),
    "polygon of two points": obj(bbox_2d=..., poly=[1, 1, 5, 5]),
    "polygon of an odd number": obj(bbox_2d=..., poly=[1, 1, 5, 5, 9]),
    "soft above one": obj(soft=1.5),
    "soft as text": obj(soft="0.5"),
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
    """The second of three lines."""
    (folder / "data.jsonl").write_bytes(b"\n".join([line(), LINES[name].replace(b"\n", b" "), line()]) + b"\n")
    done = run_cli(capsys, "data", "check", folder / "data.jsonl")
    assert_in_words(done, "data.jsonl:2")
    seen(done.err)


YAMLS: dict[str, str] = {
    "empty": "",
    "null": "null",
    "a list": "- a",
    "text": "run it",
    "unclosed": "training: {",
    "a tab": "training:\n\toutput_dir: x",
    "an unknown tag": "training: !!python/object/apply:os.system [id]",
    "an unknown alias": "training: *nothing",
    "an alias of itself": "training: &a [*a]",
    "a key twice": "training: {output_dir: a}\ntraining: {output_dir: b}",
    "keys that are numbers": "1: 2",
    "keys that are lists": "[1, 2]: 3",
    "two documents": "training: {}\n---\nmodel: {}",
    "NUL": "training: \0",
    "nested 5,000 deep": "a: " + "[" * 5000 + "]" * 5000,
    "extends itself": "extends: run.yaml",
    "extends what is not there": "extends: nothing.yaml",
    "extends a folder": "extends: .",
    "extends a number": "extends: 3",
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
