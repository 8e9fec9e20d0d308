"""Fingerprints of a run's inputs, of their whole content: by them a resumed run, and every rank of a run, knows that it
reads what the others read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from coordexp.checkpoints.card import read_card
from coordexp.checkpoints.folder import base_of, is_adapter_folder, read_object
from coordexp.config import RunConfig
from coordexp.data.files import checksums

MODEL, DATA, VALIDATION = "model.model", "custom.train_jsonl", "custom.val_jsonl"
SEAL = "complete.json"  # the last file of a checkpoint: it is whole
_FILES = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json")
_WHOLE = "whole"  # the last part of a fingerprint; earlier versions read only the first and last MiB of a file


def fingerprint(path: Path, *, whole: bool = True, sealed: bool = True) -> str:
    """A short fingerprint of a file's content, or of a checkpoint's with the models that its adapters are put on.

    Files that a seal lists with their present size are not read, because it has their checksums; ``sealed`` False reads
    them. ``whole`` False: the first and last MiB of each file only, as earlier versions of CoordExp computed it.
    """
    files = [path]
    if path.is_dir():
        files = [file for place in with_bases(path) for one in _FILES for file in sorted(place.glob(one))]
    size = sum(file.stat().st_size for file in files)
    if not whole:
        return f"{zlib.crc32(b''.join(map(_ends, files))):08x}-{size}"
    # A single file may be renamed; those of a checkpoint have fixed names.
    sums = "\n".join(f"{'' if file == path else file.name} {' '.join(_sums_of(file, sealed))}" for file in files)
    return f"{zlib.crc32(sums.encode()):08x}-{size}-{_WHOLE}"


def inputs_of(config: RunConfig, *, whole: bool = True) -> dict[str, str]:
    """The fingerprints of the model and the training data as they are now, by key; of several files with weights."""
    files = config.custom.train_jsonl
    weights = [f" x {file.weight!r}" if file.weight != 1 else "" for file in files]
    data = " + ".join(fingerprint(one.path, whole=whole) + weight for one, weight in zip(files, weights, strict=True))
    return {MODEL: fingerprint(Path(config.model.model), whole=whole), DATA: data}


def is_whole(recorded: str) -> bool:
    """Whether a recorded value of :func:`inputs_of` is of whole files."""
    return _WHOLE in recorded


def with_bases(model: Path) -> Sequence[Path]:
    """The folder of ``model``, and those of the models that its adapters are put on."""
    places = [model]
    while is_adapter_folder(places[-1]):
        places.append(base_of(places[-1]))
    return places


def base_problem(adapters: Path, base: Path) -> str | None:
    """How ``base`` differs from the model on which the adapters in a folder were trained; None if it does not, or if
    their card names no fingerprint. Reads all weights of ``base``."""
    recorded = read_card(adapters).base
    if recorded is None or recorded == (now := fingerprint(base, sealed=False)):
        return None
    return f"its adapters were trained on a model of fingerprint {recorded}, and {base} has {now}"


def _sums_of(file: Path, sealed: bool) -> Sequence[str]:
    now = file.stat()
    listed = read_object(file.parent, SEAL, "seal").get("files") if sealed else None
    entry = listed.get(file.name) if isinstance(listed, dict) else None
    if isinstance(entry, dict) and entry.get("bytes") == now.st_size and isinstance(entry.get("crc32"), list):
        return entry["crc32"]
    return _read_sums(file, now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino)


@lru_cache(maxsize=256)
def _read_sums(file: Path, *_: int) -> Sequence[str]:
    # Kept while size, times and inode of the file stay the same: a start needs them several times.
    return checksums([file], flush=False)[0]


def _ends(file: Path, size: int = 1 << 20) -> bytes:
    with file.open("rb") as opened:
        head = opened.read(size)
        opened.seek(max(len(head), file.stat().st_size - size))
        return head + opened.read(size)
