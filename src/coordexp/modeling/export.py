"""A run's final model → a plain checkpoint folder that every tool loads: in another type, or its adapters merged."""

from __future__ import annotations

from pathlib import Path

from coordexp.checkpoints.folder import base_checkpoint, base_of, is_adapter_folder
from coordexp.data.preparation import read_preparation, write_preparation
from coordexp.errors import CheckpointError
from coordexp.modeling.adapter import merge_adapter
from coordexp.modeling.load import DTYPE, load_model, read_config


def export_checkpoint(checkpoint: Path, output: Path, dtype: str = DTYPE) -> Path:
    """Write model, tokenizer, processor, chat template and image preparation of ``checkpoint``, weights as ``dtype``.

    With it travels the run's ``resolved_config.yaml``, where there is one: it says what the model was asked. Nothing
    else does: no optimizer, no trainer state. Attention is reset to transformers' default, so that the
    folder loads everywhere.

    Raises:
        CheckpointError, VocabError: as :func:`coordexp.modeling.load.load_model`.
    """
    loaded = load_model(checkpoint, dtype, attention="sdpa")
    output.mkdir(parents=True, exist_ok=True)
    loaded.model.save_pretrained(output)
    loaded.processor.save_pretrained(output)
    write_preparation(loaded.preparation, output)
    resolved = checkpoint / "resolved_config.yaml"
    if resolved.is_file():
        (output / resolved.name).write_bytes(resolved.read_bytes())
    return output


def merge_checkpoint(folder: Path, output: Path, base: Path | None = None, dtype: str | None = None) -> Path:
    """Write the base model of ``folder``, with its adapters and coordinate offsets merged in, to ``output``.

    ``base`` stands in for the folder that the adapters name; ``dtype`` None keeps the base's number type. Each merged
    matrix is computed in float32 and rounded once.

    Raises:
        CheckpointError: no adapters, or adapters of another model. VocabError: as
            :func:`coordexp.modeling.load.load_model`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not is_adapter_folder(folder):
        raise CheckpointError(
            f"{folder}: holds no adapters to merge; a full model is copied by: coordexp model export FOLDER OUTPUT"
        )
    base = base or base_of(folder)
    stored = read_config(base_checkpoint(base)).dtype
    loaded = load_model(base, dtype or str(stored or "float32").removeprefix("torch."), attention="sdpa")
    merge_adapter(loaded.model, folder)
    output.mkdir(parents=True, exist_ok=True)
    loaded.model.save_pretrained(output)
    loaded.processor.save_pretrained(output)
    write_preparation(read_preparation(folder), output)
    return output
