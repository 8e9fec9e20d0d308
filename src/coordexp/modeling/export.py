"""A training run's final model → a plain checkpoint folder in another number type."""

from __future__ import annotations

from pathlib import Path

from coordexp.data.preparation import write_preparation
from coordexp.modeling.load import load_model


def export_checkpoint(checkpoint: Path, output: Path, dtype: str = "bfloat16") -> Path:
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
