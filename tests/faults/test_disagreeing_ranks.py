"""Ranks with other data, weights, configuration or packages are refused before the first step."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from coordexp import distributed
from coordexp.errors import ConfigError
from coordexp.training import checked_run
from coordexp.training.checked_run import check_agreement, facts_of_rank
from faults.runs import run_all
from support.tiny_run import run_config, tiny_checkpoint, tiny_scenes


def shorter(lines: list[str]) -> list[str]:
    return lines[:7]


def relabelled(lines: list[str]) -> list[str]:
    return [lines[0].replace('"desc": "', '"desc": "x', 1).replace('"desc":"', '"desc":"x', 1), *lines[1:]]


def reordered(lines: list[str]) -> list[str]:
    return lines[::-1]


def copy_of_scenes(folder: Path, change: Callable[[list[str]], list[str]] = list) -> Path:
    """The tiny scenes with absolute paths of images, and other lines."""
    read = [json.loads(line) for line in tiny_scenes().read_text().splitlines()]
    for record in read:
        record["images"] = [str(tiny_scenes().parent / one) for one in record["images"]]
    lines = [json.dumps(record) for record in read]
    changed = change(lines)
    assert change is list or changed != lines
    folder.mkdir(parents=True)
    (folder / "scenes.jsonl").write_text("\n".join(changed) + "\n")
    return folder / "scenes.jsonl"


def other_weights(folder: Path) -> Path:
    shutil.copytree(tiny_checkpoint(), folder)
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).flatten()[0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# The last rank's difference: the key that it is refused by, and the key to write with its value.
OTHERS: dict[str, tuple[str, Callable[[Path], tuple[str, Any]]]] = {
    "shorter training data": (
        "custom.train_jsonl", lambda folder: ("custom.train_jsonl", str(copy_of_scenes(folder, shorter)))
    ),
    "relabelled training data": (
        "custom.train_jsonl", lambda folder: ("custom.train_jsonl", str(copy_of_scenes(folder, relabelled)))
    ),
    "reordered training data": (
        "custom.train_jsonl", lambda folder: ("custom.train_jsonl", str(copy_of_scenes(folder, reordered)))
    ),
    "validation data": ("custom.val_jsonl", lambda folder: ("custom.val_jsonl", str(copy_of_scenes(folder, shorter)))),
    "weights": ("model.model", lambda folder: ("model.model", str(other_weights(folder)))),
    "learning rate": ("training.learning_rate", lambda _: ("training.learning_rate", 0.5)),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=() if "relabelled" in one else pytest.mark.campaign) for one in OTHERS]
)
def test_a_rank_with_other_inputs_is_refused_on_all_ranks(
    what: str, tmp_path: Path, seen: Callable[[object], None]
) -> None:
    key, change = OTHERS[what]
    shared = str(copy_of_scenes(tmp_path / "shared"))
    run_config(tmp_path, 1, custom__train_jsonl=shared, custom__val_jsonl=shared, training__ddp_timeout=120)
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    path, value = change(tmp_path / "other")
    section, name = path.split(".")
    content[section][name] = value
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(content))
    assert run_all(tmp_path, 2, odd="odd.yaml") == [2, 2]
    for rank in (0, 1):
        said = (tmp_path / f"log{rank}").read_text()
        (line,) = [one for one in said.splitlines() if one.startswith(f"  {key}: ")]
        values = line.removeprefix(f"  {key}: ").split(" on rank 0, ")
        assert values[1].endswith(" on rank 1") and values[0] != values[1].removesuffix(" on rank 1"), line
        assert "would not train the same thing" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()
    seen(line)


def test_a_rank_with_other_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, 1)
    own = facts_of_rank(config)
    other = json.loads(json.dumps(own))
    other["versions"]["torch"] = "2.0.0"
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda values, operation: list(values))
    monkeypatch.setattr(checked_run.distributed, "gather_json", lambda value: [value, other])
    both = re.escape(f"torch: {own['versions']['torch']} on rank 0, 2.0.0 on rank 1")
    with pytest.raises(ConfigError, match=both):
        check_agreement(config)


def test_the_same_content_in_other_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine may have its own copy."""
    first = run_config(tmp_path, 1, custom__train_jsonl=str(copy_of_scenes(tmp_path / "a")))
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    second = run_config(
        tmp_path, 1, custom__train_jsonl=str(copy_of_scenes(tmp_path / "b")), model__model=str(tmp_path / "model")
    )
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda values, operation: list(values))
    monkeypatch.setattr(checked_run.distributed, "gather_json", lambda value: [facts_of_rank(first), value])
    check_agreement(second)
