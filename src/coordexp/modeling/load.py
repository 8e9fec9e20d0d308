"""A checkpoint folder → model, processor and coordinate vocabulary, checked before weights are read; and a run's
model → a plain folder that every tool loads: in another number type, or its adapters merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from coordexp.checkpoints.describe import too_few_rows
from coordexp.checkpoints.folder import base_checkpoint, base_of, is_adapter_folder, read_config_file
from coordexp.config.base import default_of
from coordexp.config.schema import ModelConfig
from coordexp.coords import CoordVocab
from coordexp.data.preparation import AS_THEY_ARE, ImagePreparation, read_preparation, write_preparation
from coordexp.errors import CheckpointError, VocabError
from coordexp.modeling.adapter import merge_adapter
from coordexp.modeling.attention import transformers_names
from coordexp.modeling.forward import Qwen3VLForConditionalGeneration

DTYPE: str = default_of(ModelConfig, "dtype")
ATTENTION: str = default_of(ModelConfig, "attn_implementation")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with what belongs to it. ``attention`` is ``model.attn_implementation``'s value; ``preparation``: how the
    images that it was trained on were brought to their size."""

    model: Qwen3VLForConditionalGeneration
    processor: Any
    vocab: CoordVocab
    attention: str
    preparation: ImagePreparation = AS_THEY_ARE

    @property
    def image_token_id(self) -> int:
        """The placeholder whose embeddings the vision tower replaces."""
        return self.model.config.image_token_id


def load_vocab(path: str | Path) -> CoordVocab:
    """Read and check only the tokenizer: cheap, so it runs before anything expensive.

    Raises:
        CheckpointError: no such folder, or not a Qwen3-VL checkpoint. VocabError: no coordinate tokens.
    """
    config = read_config(path)
    tokenizer = _read(AutoTokenizer, base_checkpoint(path), "tokenizer")
    try:
        vocab = CoordVocab.from_tokenizer(tokenizer)
    except VocabError as error:
        raise VocabError(f"{path}: {error}") from error
    rows = config.text_config.vocab_size
    if max(vocab.coord_token_ids) >= rows:
        raise VocabError(too_few_rows(path, max(vocab.coord_token_ids), rows))
    return vocab


def load_model(path: str | Path, dtype: str = DTYPE, attention: str = ATTENTION) -> LoadedModel:
    """Load a Qwen3-VL checkpoint that knows the coordinate tokens; a LoRA run's folder with its adapters merged.

    Raises:
        CheckpointError: weights that are unreadable, missing or of another shape. VocabError: no coordinate tokens.
    """
    vocab = load_vocab(path)
    model = _read_weights(path, getattr(torch, dtype))
    model.name_or_path = str(Path(path).absolute())  # what adapters that are trained on it will name as their base
    model.set_attn_implementation(transformers_names(attention))
    return LoadedModel(model, load_processor(path), vocab, attention, read_preparation(path))


def load_processor(path: str | Path) -> Any:
    """The checkpoint's processor: tokenizer, image processor, chat template. Raises CheckpointError without one."""
    return _read(AutoProcessor, base_checkpoint(path), "processor")


def read_config(path: str | Path) -> Any:
    """transformers' configuration of a Qwen3-VL checkpoint, whose folder holds a tokenizer too.

    Raises:
        CheckpointError: as :func:`~coordexp.checkpoints.folder.read_config_file`, or values that transformers refuses.
    """
    read_config_file(path)
    return _read(AutoConfig, base_checkpoint(path), "configuration")


def _read_weights(path: str | Path, dtype: torch.dtype) -> Qwen3VLForConditionalGeneration:
    """transformers starts missing weights at random and goes on; here that is an error."""
    if is_adapter_folder(path):
        merged = _read_weights(base_of(path), dtype)
        merge_adapter(merged, Path(path))
        return merged
    try:
        loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: its weights cannot be read ({error}); restore the checkpoint's files"
        ) from error
    model, report = loaded
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} weights are missing, {missing[0]} first; restore the checkpoint's files"
        )
    return model


def _read(source: Any, path: str | Path, what: str) -> Any:
    """``source.from_pretrained``, whose errors say neither which folder nor what to do."""
    try:
        return source.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: its {what} cannot be read ({error}); restore the checkpoint's files") from error


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
