"""What a folder is: a plain Qwen3-VL checkpoint, or adapters that belong to one; which weights it holds, whatever its
name; the run that it comes from, as far as the folder tells; and to which part of the model a name belongs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from coordexp.errors import CheckpointError

MODEL_TYPE = "qwen3_vl"
CONFIG, WEIGHTS, OFFSETS = "adapter_config.json", "adapter_model.safetensors", "coord_offset.safetensors"
TOKENIZER = "tokenizer.json"
BASE_KEY = "base_model_name_or_path"
COORD_IDS = "coord_token_ids"
"""The tensor of :data:`OFFSETS` that says to which tokens its rows belong."""


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder holds an adapter or coordinate offsets, to be put on another checkpoint, rather than a model."""
    return any((Path(path) / name).is_file() for name in (CONFIG, OFFSETS))


def base_of(path: str | Path) -> Path:
    """The folder of the model to which the adapters of ``path`` belong.

    Raises:
        CheckpointError: unreadable files, or a base that is not there.
    """
    folder = Path(path)
    try:
        if (folder / CONFIG).is_file():
            named = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get(BASE_KEY)
        else:
            with safe_open(folder / OFFSETS, "np") as file:
                named = (file.metadata() or {}).get(BASE_KEY)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: its adapter files cannot be read ({error}); restore them") from error
    if not named or not Path(named).is_dir() or Path(named).resolve() == folder.resolve():
        raise CheckpointError(
            f"{folder}: holds adapters of the model {named}, which is no folder here; put that model back, or name its "
            "new place: coordexp model merge FOLDER OUTPUT --base MODEL"
        )
    return Path(named)


def base_checkpoint(path: str | Path) -> Path:
    """The plain checkpoint at the bottom of ``path``: itself, or the model to which its adapters belong.

    A LoRA run changes neither tokenizer nor processor nor sizes, so those are read there, by engines too.

    Raises:
        CheckpointError: adapters whose base is not there.
    """
    return base_checkpoint(base_of(path)) if is_adapter_folder(path) else Path(path)


def read_config_file(path: str | Path) -> Mapping[str, Any]:
    """``config.json`` of a Qwen3-VL checkpoint, or of the one to which adapters belong, whose folder holds a tokenizer
    too.

    Raises:
        CheckpointError: no such folder, no readable configuration, another model family, no tokenizer.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: no such folder; a Qwen3-VL checkpoint on disk is needed, nothing is downloaded")
    folder = base_checkpoint(path)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json; model.model must be a Qwen3-VL checkpoint folder")
    config = _json(folder / "config.json", folder, "configuration")
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(f"{folder}: model type {model_type!r}; CoordExp trains {MODEL_TYPE!r} checkpoints")
    # transformers makes an empty tokenizer where there is none.
    if not any((folder / name).is_file() for name in (TOKENIZER, "vocab.json")):
        raise CheckpointError(f"{folder}: no {TOKENIZER}; copy the tokenizer's files into the checkpoint's folder")
    return config


def _json(file: Path, folder: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: its {what} cannot be read ({error}); restore the checkpoint's files"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: its {what} cannot be read (no JSON object); restore the checkpoint's files")
    return content


def read_object(folder: Path, name: str, what: str) -> dict[str, Any]:
    """A file of a checkpoint that holds one JSON object; empty where there is no such file.

    Raises:
        CheckpointError: it is there and cannot be read; ``what`` names it.
    """
    return _json(folder / name, folder, what) if (folder / name).is_file() else {}


RESOLVED_CONFIG = "resolved_config.yaml"


def settings_of_run(checkpoint: Path) -> Mapping[str, Any]:
    """The configuration of the run that wrote ``checkpoint``: beside it, or in the folder above; empty where there is
    none.

    Raises:
        ConfigError: the file is no YAML.
    """
    from coordexp.config.source import read_document  # what only reads a folder needs no configuration

    for place in (checkpoint, checkpoint.absolute().parent):
        if (place / RESOLVED_CONFIG).is_file():
            return read_document(place / RESOLVED_CONFIG).data
    return {}


Part = Literal["vit", "aligner", "llm", "coord"]
OFFSET = "coord_offset"


def part_of(name: str) -> Part:
    """The part of a Qwen3-VL model to which a parameter or module belongs; coordinate offsets are their own."""
    if name.rpartition(".")[2] == OFFSET:
        return "coord"
    path = f".{name}."
    if ".visual." not in path:
        return "llm"
    return "aligner" if ".visual.merger." in path or ".visual.deepstack_merger_list." in path else "vit"


_ANSWERS_DEPEND_ON = ("*.safetensors", "*config.json", "tokenizer.json", "chat_template.*")


def checkpoint_fingerprint(folder: Path) -> str:
    """The first 16 hex digits of a SHA-256 over the names and contents of weights, tokenizer and configurations.

    An adapter's folder stands for itself: its base is named in its configuration.

    Raises:
        CheckpointError: no weights there.
    """
    files = sorted({path for pattern in _ANSWERS_DEPEND_ON for path in folder.glob(pattern) if path.is_file()})
    if not any(path.suffix == ".safetensors" for path in files):
        raise CheckpointError(f"{folder}: holds no *.safetensors; name the folder of a checkpoint")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode("utf-8") + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
