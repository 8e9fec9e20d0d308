"""The seal of a checkpoint: its last file, which lists all others with their sizes and checksums.

All ranks write a checkpoint together, over seconds or minutes, and a kill or a power loss may come between any two of
its files. It counts from the moment at which it is sealed: every rank has written its own files, the disk holds them,
and what is sealed is what was read back from them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.data.files import PIECE_BYTES, checksums, flush_file, write_atomically
from coordexp.errors import CheckpointError

SEAL = "complete.json"
_WRITTEN_BY = re.compile(r"(?:rank|rng_state_|__)(\d+)(?:_\d+)?\.\w+$")


@dataclass(frozen=True, slots=True)
class SealedFile:
    """``crc32``: of each 64 MiB; None in a seal of a version that knew sizes only."""

    bytes: int
    crc32: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Seal:
    """What a whole checkpoint says about itself. ``files``: by path; ``resumable``: false for the model alone."""

    step: int
    world_size: int
    resumable: bool
    files: Mapping[str, SealedFile]

    @property
    def has_checksums(self) -> bool:
        """Whether every file's content can be compared, and not its size alone."""
        return all(file.crc32 is not None for file in self.files.values())


def seal_checkpoint(folder: Path, step: int, *, resumable: bool, writes: bool, shared: bool) -> None:
    """Declare a checkpoint finished, once every rank is here and the disk holds everything. A collective call.

    Args:
        writes: whether this rank writes the seal. shared: all ranks write to one file system; otherwise each that seals
            sees the files of its own machine alone.
    """
    where = f"sealing {folder}"
    with distributed.raise_on_all_ranks(where):
        sizes = _sizes(folder)
    mine = sorted(sizes) if writes else []
    if shared:
        # A network file system may show a rank the others' files late, but its own at once.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gathered = distributed.gather_json([sizes, local])
        seen = [part for part, _ in gathered]
        sizes = {name: max(part.get(name, 0) for part in seen) for part in seen for name in part}
        mine = _share(seen, sizes, gathered[0][1])[distributed.rank()]
    with distributed.raise_on_all_ranks(where):
        sums = dict(zip(mine, checksums([folder / name for name in mine], flush=True), strict=True))
    if shared:
        for part in distributed.gather_json(sums):
            sums |= part
    with distributed.raise_on_all_ranks(where):
        if writes:
            _flush_names(folder)
            files = {name: SealedFile(size, tuple(sums[name])) for name, size in sizes.items()}
            seal = Seal(step, distributed.world_size(), resumable, files)
            write_atomically(folder / SEAL, json.dumps(asdict(seal), indent=1, sort_keys=True) + "\n")


def read_seal(folder: Path) -> Seal:
    """The seal of a checkpoint all of whose files are there, in their sizes. Their contents are not checked.

    Raises:
        CheckpointError: the folder holds none, or not all that its seal lists. The text goes on after a path.
    """
    if not folder.is_dir():
        raise CheckpointError("is no folder")
    try:
        seal = _from_json(json.loads((folder / SEAL).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise CheckpointError(f"is unfinished: it has no {SEAL}, the last file of a checkpoint") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"has an unreadable {SEAL} ({error!r})") from error
    sizes = _sizes(folder)
    wrong = sorted(name for name, file in seal.files.items() if sizes.get(name) != file.bytes)
    if wrong:
        state = (
            "is missing" if wrong[0] not in sizes else f"has {sizes[wrong[0]]} bytes of {seal.files[wrong[0]].bytes}"
        )
        raise CheckpointError(f"is damaged: {wrong[0]} {state}{_and_more(wrong)}")
    return seal


def check_contents(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare files with the checksums in their seal; ``part`` of ``parts`` reads its share of them.

    Raises:
        CheckpointError: as :func:`read_seal`, or a file is not as it was sealed.
    """
    seal = read_seal(folder)
    loads, mine = [0] * parts, []
    for name, file in sorted(seal.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += file.bytes
        if lightest == part and file.crc32 is not None:
            mine.append(name)
    try:
        contents = checksums([folder / name for name in mine], flush=False)
    except OSError as error:
        raise CheckpointError(f"is damaged: {error}") from error
    wrong = [(name, sums) for name, sums in zip(mine, contents, strict=True) if tuple(sums) != seal.files[name].crc32]
    if wrong:
        name, sums = wrong[0]
        sealed = seal.files[name].crc32 or ()
        piece = next(i for i, (a, b) in enumerate(zip(sums, sealed, strict=True)) if a != b)
        span = f"bytes {piece * PIECE_BYTES}-{min((piece + 1) * PIECE_BYTES, seal.files[name].bytes) - 1}"
        raise CheckpointError(
            f"is damaged: {name} is not what was saved ({span}: CRC-32 {sums[piece]}, sealed {sealed[piece]})"
            f"{_and_more([name for name, _ in wrong])}"
        )


def _from_json(data: Any) -> Seal:
    files = {
        str(name): SealedFile(one, None) if isinstance(one, int) else SealedFile(one["bytes"], tuple(one["crc32"]))
        for name, one in data["files"].items()
    }
    return Seal(int(data["step"]), int(data["world_size"]), bool(data["resumable"]), files)


def _share(seen: Sequence[Mapping[str, int]], sizes: Mapping[str, int], local: int) -> list[list[str]]:
    """Which rank reads which files back: its own where their names say so, the others the first ``local`` ranks, which
    are on the first one's machine, evenly. What a rank wrote lies in its machine's memory; another machine would fetch
    it over the network."""
    loads, shares = [0] * len(seen), [[] for _ in seen]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        whole = [rank for rank, part in enumerate(seen) if part.get(name) == sizes[name]]
        named = _WRITTEN_BY.search(name)
        own = [rank for rank in whole if named is not None and rank == int(named[1])]
        candidates = own or [rank for rank in whole if rank < local] or whole
        rank = min(candidates, key=lambda rank: loads[rank])
        loads[rank] += sizes[name]
        shares[rank].append(name)
    return shares


def _flush_names(folder: Path) -> None:
    """A file whose name the disk does not hold is lost with its folder's last page."""
    for one in [*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent]:
        flush_file(one)


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.name != SEAL
    }


def _and_more(wrong: Sequence[str]) -> str:
    return f", and {len(wrong) - 1} more files are not as they were" if len(wrong) > 1 else ""
