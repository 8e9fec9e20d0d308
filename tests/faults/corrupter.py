"""Damage that leaves a file's size as it is: what a bad disk, a lost page or a careless copy makes of it."""

from __future__ import annotations

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
    # Writing through a hard link would reach the file that a copy shares with its original.
    shutil.copy2(path, path.with_name("being-damaged"))
    path.with_name("being-damaged").replace(path)
    damage(path)
    assert path.stat().st_size == size
