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
DEEPSPEED = "deepspeed.config"
SEAL = "complete.json"  # the last file of a checkpoint: it is whole
_MODEL_FILES = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json")
# Other files that decide how text and images become the model's input. Their sum is the last part of a fingerprint;
# those of earlier versions lack it.
_INPUT_FILES = (
    *("processor_config.json", "preprocessor_config.json", "chat_template.*", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
)


def fingerprint(path: Path, *, sealed: bool = True) -> str:
    """A short fingerprint of a file's content, or of a checkpoint's with the models that its adapters are put on. Two
    are compared by :func:`is_same`.

    Weights that a seal lists with their present size, and that were not touched after it, are not read, because it has
    their checksums; ``sealed`` False reads them.
    """
    if not path.is_dir():
        return _of([("", path)], sealed)  # without its name: it may be renamed, those of a checkpoint have fixed ones
    model, inputs = (
        [(file.name, file) for place in with_bases(path) for one in names for file in sorted(place.glob(one))]
        for names in (_MODEL_FILES, _INPUT_FILES)
    )
    return f"{_of(model, sealed)}-{_checksum(inputs, sealed)}"


def is_same(recorded: object, now: str) -> bool:
    """Whether a recorded fingerprint, which an earlier version may have computed of fewer files, is that of ``now``."""
    return recorded == now or now.startswith(f"{recorded}-")


def inputs_of(config: RunConfig) -> dict[str, str]:
    """The fingerprints of the model and the training data as they are now, by key; of several files with weights. Also
    that of DeepSpeed's file, if the run has one."""
    files = config.custom.train_jsonl
    weights = [f" x {file.weight!r}" if file.weight != 1 else "" for file in files]
    data = " + ".join(fingerprint(one.path) + weight for one, weight in zip(files, weights, strict=True))
    inputs = {MODEL: fingerprint(Path(config.model.model)), DATA: data}
    engine = config.deepspeed.config
    if config.deepspeed.enabled and isinstance(engine, str) and Path(engine).is_file():
        inputs[DEEPSPEED] = fingerprint(Path(engine))
    return inputs


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
    if recorded is None or is_same(recorded, now := fingerprint(base, sealed=False)):
        return None
    return f"its adapters were trained on a model of fingerprint {recorded}, and {base} has {now}"


def _of(files: Sequence[tuple[str, Path]], sealed: bool) -> str:
    size = sum(file.stat().st_size for _, file in files)
    return f"{_checksum(files, sealed)}-{size}-whole"  # whole: once it was of the first and last MiB of each file


def _checksum(files: Sequence[tuple[str, Path]], sealed: bool) -> str:
    sums = "\n".join(f"{name} {' '.join(_sums_of(file, sealed))}" for name, file in files)
    return f"{zlib.crc32(sums.encode()):08x}"


def _sums_of(file: Path, sealed: bool) -> Sequence[str]:
    now, seal = file.stat(), file.with_name(SEAL)
    # Only weights take long to read; an edit of a setting often keeps the size, and clocks may differ. The seal is
    # written last, so later weights may be those of another step, of the same size. Their time of modification does not
    # show that: a copy may keep the original's.
    trusted = sealed and file.suffix == ".safetensors" and seal.is_file()
    trusted = trusted and now.st_ctime_ns <= seal.stat().st_ctime_ns
    listed = read_object(file.parent, SEAL, "seal").get("files") if trusted else None
    entry = listed.get(file.name) if isinstance(listed, dict) else None
    if isinstance(entry, dict) and entry.get("bytes") == now.st_size and isinstance(entry.get("crc32"), list):
        return entry["crc32"]
    return _read_sums(file, now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino)


@lru_cache(maxsize=256)
def _read_sums(file: Path, *_: int) -> Sequence[str]:
    # Kept while size, times and inode of the file stay the same: a start needs them several times.
    return checksums([file], flush=False)[0]
