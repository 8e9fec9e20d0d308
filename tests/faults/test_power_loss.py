"""A power loss between any two ``fsync`` calls leaves a complete checkpoint, or one that is ignored.

The disk is simulated: of every file it holds what ``fsync`` was called for, and of every folder the names that were
there at its last ``fsync``; nothing else survives. In the second kind of disk all names survive at once (its journal
was written early), and bytes without an ``fsync`` are zeros.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordexp.training.checkpoint import SEAL, check_contents, resolve_resume
from support.tiny_run import run_config, train


@dataclass
class Disk:
    """The files that survive a power loss after each ``fsync`` below ``root``."""

    root: Path
    held: dict[int, bytes] = field(default_factory=dict)  # content by file
    names: dict[Path, dict[str, int]] = field(default_factory=dict)  # of folders: name → file
    losses: list[tuple[dict[int, bytes], dict[Path, dict[str, int]], dict[Path, tuple[int, int]]]] = field(
        default_factory=list
    )

    def flushed(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.root):
            return
        if path.is_dir():
            self.names[path] = {one.name: one.stat().st_ino for one in path.iterdir() if one.is_file()}
        else:
            self.held[path.stat().st_ino] = path.read_bytes()
        there = {one: (one.stat().st_ino, one.stat().st_size) for one in self.root.rglob("*") if one.is_file()}
        self.losses.append((dict(self.held), {folder: dict(names) for folder, names in self.names.items()}, there))

    def left(self, number: int, into: Path, all_names: bool) -> Path:
        """The files that a machine finds after loss ``number``."""
        held, names, there = self.losses[number]
        files = (
            {path: held.get(inode, b"").ljust(size, b"\0")[:size] for path, (inode, size) in there.items()}
            if all_names
            else {folder / name: held.get(inode, b"") for folder, of in names.items() for name, inode in of.items()}
        )
        for path, content in files.items():
            found = into / path.relative_to(self.root)
            found.parent.mkdir(parents=True, exist_ok=True)
            found.write_bytes(content)
        return into


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    folder = tmp_path_factory.mktemp("disk")
    made, fsync = Disk(folder / "run"), os.fsync

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        made.flushed(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        keys = {"training__max_steps": 3, "training__save_strategy": "steps", "training__save_steps": 1}
        train(run_config(folder, 1, **keys)).save_model()
    assert len(made.losses) > 20
    yield made


@pytest.mark.parametrize("all_names", [False, True], ids=["names without a flush are lost", "names survive first"])
@pytest.mark.parametrize("part", range(6), ids=lambda part: f"losses {part} of 6")
def test_a_power_loss_leaves_a_complete_checkpoint_or_none(
    part: int, all_names: bool, disk: Disk, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    taken: list[str] = []
    for number in range(part, len(disk.losses), 6):
        left = disk.left(number, tmp_path / str(number), all_names)
        left.mkdir(exist_ok=True)
        checkpoint = resolve_resume(left, True)
        taken.append("none" if checkpoint is None else checkpoint.name)
        sealed = [one.parent for one in left.glob(f"checkpoint-*/{SEAL}") if one.stat().st_size]
        for folder in sealed:
            check_contents(folder)  # raises where a sealed file is not what it was
        for path in () if checkpoint is None else checkpoint.iterdir():
            assert path.read_bytes() == (disk.root / path.relative_to(left)).read_bytes(), path
    seen(f"{len(taken)} losses; taken: {', '.join(f'{name} ({taken.count(name)})' for name in sorted(set(taken)))}")


def test_a_checkpoint_survives_once_its_save_has_returned(disk: Disk, tmp_path: Path) -> None:
    left = disk.left(len(disk.losses) - 1, tmp_path / "left", False)
    assert resolve_resume(left, True) == left / "checkpoint-3"


def test_a_seal_written_before_its_files_is_detected(disk: Disk, tmp_path: Path) -> None:
    """The simulated disk loses bytes without an ``fsync``: without the weights' flush, the sealed folder is damaged."""
    held, names, there = disk.losses[-1]
    weights = (disk.root / "checkpoint-3" / "model.safetensors").stat().st_ino
    disk.losses.append(({inode: data for inode, data in held.items() if inode != weights}, names, there))
    try:
        left = disk.left(len(disk.losses) - 1, tmp_path / "left", True)
    finally:
        disk.losses.pop()
    assert resolve_resume(left, True) == left / "checkpoint-2"


@pytest.mark.parametrize("all_names", [False, True], ids=["names without a flush are lost", "names survive first"])
def test_a_run_that_counts_as_finished_has_its_whole_model(all_names: bool, disk: Disk, tmp_path: Path) -> None:
    """After each loss: the next start trains on or saves the model again, unless the model is whole."""
    finished = 0
    later = [at for at, (_, _, there) in enumerate(disk.losses) if disk.root / "trainer_state.json" in there]
    for number in later:
        left = disk.left(number, tmp_path / str(number), all_names)
        state = left / "trainer_state.json"
        if state.is_file() and state.read_bytes().strip(b"\0"):
            finished += 1
            assert json.loads(state.read_text())["global_step"] == 3
            for name in ("model.safetensors", "config.json", "tokenizer.json", "coordexp.json"):
                assert (left / name).read_bytes() == (disk.root / name).read_bytes(), (number, name)
    assert finished
