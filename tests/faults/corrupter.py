"""What a bad disk, a lost page or a careless copy makes of a file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path


def flip_bit(path: Path, at: float = 0.5) -> None:
    """Turn one bit over, ``at`` that share of the file."""
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(at * len(data)))] ^= 0x10
    path.write_bytes(data)


def zero_upper_half(path: Path) -> None:
    """As a file whose last pages never reached the disk."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def zero_all(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap_halves(path: Path) -> None:
    """The same bytes in another order: a sum of bytes would not see it."""
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[middle:] + data[:middle])


# Damage that leaves a file's size as it is.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "one bit": flip_bit,
    "first bit": lambda path: flip_bit(path, 0.0),
    "last bit": lambda path: flip_bit(path, 1.0),
    "upper half zeroed": zero_upper_half,
    "all zeroed": zero_all,
    "halves swapped": swap_halves,
}


def damaged_copy(checkpoint: Path, name: str, damage: Callable[[Path], None]) -> None:
    """Damage one file of a checkpoint in place; its size stays."""
    path = checkpoint / name
    size = path.stat().st_size
    damage(unshared(path))
    assert path.stat().st_size == size


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size + 1))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


# Damage that shows in a size or in a name.
LOSSES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: os.truncate(path, 0),
    "cut in half": truncate,
    "one byte more": lengthen,
    "garbage": garbage,
    "a folder in its place": make_folder,
    "a link to nothing": make_link,
}


def unshared(path: Path) -> Path:
    """``path`` with bytes of its own: writing through a hard link would reach what a copy shares with its original."""
    shutil.copy2(path, path.with_name("being-damaged"))
    path.with_name("being-damaged").replace(path)
    return path
