"""A checkpoint that no longer matches its seal is never used, and never gives a traceback."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordexp.checkpoints.card import CARD
from coordexp.data.files import checksums
from coordexp.errors import CheckpointError
from coordexp.training.checkpoint import SEAL, read_seal, resolve_resume
from support.cli_runs import run_cli
from support.tiny_run import run_config, train

FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json",
         "log_line_rank0.json", "carry_buffer_rank0.json", "tokenizer.json"]  # fmt: skip


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped_bit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


# Damage by a bad disk, a lost page or a careless copy that keeps a file's size.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "one bit": changed(lambda data: flipped_bit(data, len(data) // 2)),
    "first bit": changed(lambda data: flipped_bit(data, 0)),
    "last bit": changed(lambda data: flipped_bit(data, len(data) - 1)),
    "upper half zeroed": changed(lambda data: data[: len(data) // 2].ljust(len(data), b"\0")),
    "all zeroed": changed(lambda data: bytes(len(data))),
    "halves swapped": changed(lambda data: data[len(data) // 2 :] + data[: len(data) // 2]),
}
# Damage that shows in a size or in a name.
LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte more": changed(lambda data: data + b"\0"),
    "garbage": changed(lambda data: random.Random(0).randbytes(len(data) + 1)),
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def unshared(path: Path) -> Path:
    """``path`` as a separate copy: writing through a hard link would change the original too."""
    shutil.copy2(path, path.with_name("being-damaged"))
    path.with_name("being-damaged").replace(path)
    return path


def damage_file(checkpoint: Path, name: str, damage: str) -> None:
    size = (checkpoint / name).stat().st_size
    DAMAGES[damage](unshared(checkpoint / name))
    assert (checkpoint / name).stat().st_size == size


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(run_config(folder, 1, training__max_steps=3, training__save_strategy="steps", training__save_steps=1))
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", copy_function=os.link))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_the_same_size_is_detected(
    name: str, damage: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage_file(run / "checkpoint-3", name, damage)
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        assert resolve_resume(run, True) == run / "checkpoint-2"
    assert f"checkpoint-3 is damaged: {name} is not what was saved" in caplog.text
    with pytest.raises(CheckpointError, match=rf"checkpoint-3 .*{name} .*{run / 'checkpoint-2'}"):
        resolve_resume(run, str(run / "checkpoint-3"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", FILES)
def test_an_incomplete_file_is_detected(name: str, loss: str, run: Path, seen: Callable[[str], None]) -> None:
    LOSSES[loss](unshared(run / "checkpoint-3" / name))
    assert resolve_resume(run, True) == run / "checkpoint-2"
    with pytest.raises(CheckpointError, match=rf"checkpoint-3 .*{name}") as refused:
        resolve_resume(run, str(run / "checkpoint-3"))
    seen(str(refused.value).partition("checkpoint-3 ")[2])


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_an_older_checkpoint_is_detected(name: str, run: Path, seen: Callable[[str], None]) -> None:
    """Skipped if both files are equal."""
    older, newer = ((run / f"checkpoint-{step}" / name).read_bytes() for step in (1, 3))
    unshared(run / "checkpoint-3" / name).write_bytes(older)
    taken = resolve_resume(run, True)
    assert taken == run / ("checkpoint-3" if older == newer else "checkpoint-2")
    seen("the same bytes" if older == newer else "ignored")


SEALS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "null": lambda seal: None,
    "a list": lambda seal: [],
    "empty": lambda seal: {},
    "no files": lambda seal: {name: value for name, value in seal.items() if name != "files"},
    "files a list": lambda seal: {**seal, "files": [*seal["files"]]},
    "files null": lambda seal: {**seal, "files": None},
    "no step": lambda seal: {name: value for name, value in seal.items() if name != "step"},
    "step as words": lambda seal: {**seal, "step": "three"},
    "a file without size": lambda seal: {**seal, "files": {name: {} for name in seal["files"]}},
    "sizes that are words": lambda seal: {**seal, "files": {name: "many" for name in seal["files"]}},
    "a file too many": lambda seal: {**seal, "files": {**seal["files"], "more.bin": {"bytes": 1, "crc32": ["0"]}}},
    "another checksum": lambda seal: {
        **seal, "files": {**seal["files"], "config.json": {**seal["files"]["config.json"], "crc32": ["00000000"]}}
    },
}  # fmt: skip


@pytest.mark.parametrize("change", SEALS)
def test_a_checkpoint_with_a_wrong_seal_is_ignored(change: str, run: Path, seen: Callable[[str], None]) -> None:
    path = unshared(run / "checkpoint-3" / SEAL)
    path.write_text(json.dumps(SEALS[change](json.loads(path.read_text()))))
    assert resolve_resume(run, True) == run / "checkpoint-2"
    with pytest.raises(CheckpointError) as refused:
        resolve_resume(run, str(run / "checkpoint-3"))
    seen(str(refused.value).partition("checkpoint-3 ")[2])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_checkpoint_with_an_incomplete_seal_is_ignored(loss: str, run: Path) -> None:
    LOSSES[loss](unshared(run / "checkpoint-3" / SEAL))
    assert resolve_resume(run, True) == run / "checkpoint-2"


def test_two_damaged_checkpoints_are_skipped_by_name(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage_file(run / "checkpoint-3", "model.safetensors", "one bit")
    damage_file(run / "checkpoint-2", "optimizer.pt", "all zeroed")
    with caplog.at_level(logging.WARNING, logger="coordexp"):
        assert resolve_resume(run, True) == run / "checkpoint-1"
    assert "checkpoint-3 is damaged" in caplog.text and "checkpoint-2 is damaged" in caplog.text


def test_a_run_does_not_restart_when_all_checkpoints_are_damaged(run: Path) -> None:
    for step in (1, 2, 3):
        damage_file(run / f"checkpoint-{step}", "model.safetensors", "one bit")
    with pytest.raises(CheckpointError, match="resume_from_checkpoint: true found no"):
        resolve_resume(run, True)


def test_a_damaged_checkpoint_is_a_one_line_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_file(run / "checkpoint-3", "optimizer.pt", "one bit")
    named = str(run / "checkpoint-3")
    run_config(tmp_path, 1, training__max_steps=4, training__resume_from_checkpoint=named)
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "optimizer.pt is not what was saved" in refused.err


# A resume does not read these.
UNREAD = ("config.json", "tokenizer.json")


@pytest.mark.parametrize("name", [name for name in FILES if name not in UNREAD])
def test_an_unreadable_file_with_a_valid_seal_is_a_one_line_error(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksum is that of the damaged file."""
    damage_file(run / "checkpoint-3", name, "all zeroed")
    path = unshared(run / "checkpoint-3" / SEAL)
    seal = json.loads(path.read_text())
    seal["files"][name]["crc32"] = checksums([run / "checkpoint-3" / name], flush=False)[0]
    path.write_text(json.dumps(seal))
    run_config(tmp_path, 1, training__max_steps=4, training__resume_from_checkpoint=True)
    refused = run_cli(capsys, "train", tmp_path / "run.yaml")
    assert refused.code == 2, refused.err
    assert re.search(rf"checkpoint-3: .*{name}.* cannot be read .*; resume from an older", refused.err), refused.err
    assert refused.err.count("\nerror: ") + refused.err.startswith("error: ") == 1


def test_a_seal_lists_every_file_that_a_resume_reads(run: Path) -> None:
    files = {path.name for path in (run / "checkpoint-3").iterdir()} - {SEAL, CARD}
    seal = read_seal(run / "checkpoint-3")
    assert set(seal.files) == files >= set(FILES)
