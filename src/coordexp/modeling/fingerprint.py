"""Which weights a folder holds, whatever its name: two folders of one fingerprint answer alike."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coordexp.errors import CheckpointError

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
