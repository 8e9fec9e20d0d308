"""What a folder is: a plain Qwen3-VL checkpoint, or adapters that belong to one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
