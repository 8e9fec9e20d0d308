"""The parts of a run's inputs that its fingerprint depends on."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from coordexp.checkpoints.fingerprints import fingerprint, inputs_of, is_same
from coordexp.config import parse_config
from support.config_samples import set_key, stage2


def model(folder: Path, weights: bytes = b"1234") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def adapter(folder: Path, base: Path, rank: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"5678")
    return folder


def test_an_adapter_changes_with_its_base_and_its_configuration(tmp_path: Path) -> None:
    put_on = adapter(tmp_path / "adapter", model(tmp_path / "base"))
    before = fingerprint(put_on)
    model(tmp_path / "base", b"1235")
    on_another = fingerprint(put_on)
    assert on_another != before
    model(tmp_path / "base", b"1234")
    assert fingerprint(put_on) == before
    adapter(tmp_path / "adapter", tmp_path / "base", rank=4)  # as many bytes
    assert fingerprint(put_on) != before


def test_sealed_checksums_count_only_for_a_file_of_the_sealed_size(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    read = fingerprint(folder)
    sealed = {"files": {"model.safetensors": {"bytes": 4, "crc32": ["00000000"]}}}
    (folder / "complete.json").write_text(json.dumps(sealed))
    assert fingerprint(folder) != read, "not read: the seal has its checksum"
    sealed["files"]["model.safetensors"]["bytes"] = 5
    (folder / "complete.json").write_text(json.dumps(sealed))
    assert fingerprint(folder) == read


def test_sealed_checksums_do_not_count_for_a_file_that_was_replaced_after_the_seal(tmp_path: Path) -> None:
    """Weights of another step have the same size, and a copy may keep an earlier time of modification."""
    folder = model(tmp_path / "checkpoint-2", b"aaaa")
    read = fingerprint(folder)
    sealed = {"files": {"model.safetensors": {"bytes": 4, "crc32": ["00000000"]}}}
    (folder / "complete.json").write_text(json.dumps(sealed))
    assert fingerprint(folder) != read
    time.sleep(0.05)  # more than a step of the file system's clock
    (tmp_path / "other.safetensors").write_bytes(b"bbbb")
    os.utime(tmp_path / "other.safetensors", (0, 0))
    shutil.copy2(tmp_path / "other.safetensors", folder / "model.safetensors")
    assert fingerprint(folder) == fingerprint(model(tmp_path / "unsealed", b"bbbb"))


def test_a_renamed_data_file_is_the_same_data(tmp_path: Path) -> None:
    for name in ("train.jsonl", "renamed.jsonl"):
        (tmp_path / name).write_bytes(b"{}\n")
    assert fingerprint(tmp_path / "train.jsonl") == fingerprint(tmp_path / "renamed.jsonl")


def test_weights_of_joined_files_belong_to_the_data(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b"{}\n")
    base = model(tmp_path / "base")
    found = {}
    for weight in (1.0, 2.0):
        files = [{"path": str(tmp_path / "a.jsonl"), "weight": weight}, {"path": str(tmp_path / "b.jsonl")}]
        tree = set_key(set_key(stage2(), "custom.train_jsonl", files), "model.model", str(base))
        found[weight] = inputs_of(parse_config(tree))["custom.train_jsonl"]
    one = fingerprint(tmp_path / "a.jsonl")
    assert found == {1.0: f"{one} + {one}", 2.0: f"{one} x 2.0 + {one}"}


def test_the_content_of_deepspeeds_file_belongs_to_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"{}\n")
    tree = set_key(stage2(), "custom.train_jsonl", str(tmp_path / "train.jsonl"))
    tree = set_key(tree, "model.model", str(model(tmp_path / "base")))
    config = parse_config(tree | {"deepspeed": {"enabled": True, "config": str(tmp_path / "z.json")}})
    found = [inputs_of(config)]
    for text in ('{"zero_optimization": {"stage": 1}}', '{"zero_optimization": {"stage": 2}}'):
        (tmp_path / "z.json").write_text(text)
        found.append(inputs_of(config))
    assert [one.get("deepspeed.config") for one in found] == [None, "f589042b-35-whole", "893f0210-35-whole"]


@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.jinja", "tokenizer_config.json"])
def test_what_makes_pixels_and_prompts_belongs_to_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Also where a seal lists the file in that size."""
    folder = model(tmp_path / "model")
    (folder / name).write_text("384")
    (folder / "complete.json").write_text(json.dumps({"files": {name: {"bytes": 3, "crc32": ["00000000"]}}}))
    before = fingerprint(folder)
    (folder / name).write_text("512")
    assert not is_same(before, fingerprint(folder))


def test_a_fingerprint_of_an_earlier_version_is_of_fewer_files(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "processor_config.json").write_text("{}")
    assert is_same("a9af26d4-6-whole", fingerprint(folder))
    assert not is_same("a9af26d4-6-who", fingerprint(folder)) and not is_same(None, fingerprint(folder))
    model(tmp_path / "model", b"1235")
    assert not is_same("a9af26d4-6-whole", fingerprint(folder))
