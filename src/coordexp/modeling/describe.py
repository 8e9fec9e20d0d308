"""What a checkpoint folder holds, read without its weights: sizes, parts, coordinate tokens, adapters."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from coordexp.errors import CheckpointError, VocabError
from coordexp.modeling.adapter import CONFIG, OFFSETS, WEIGHTS, base_of, is_adapter_folder
from coordexp.modeling.forward import Qwen3VLForConditionalGeneration
from coordexp.modeling.load import base_checkpoint, load_vocab, read_config
from coordexp.modeling.tuner import part_of


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """``parameters`` counts adapters, modules saved whole and coordinate offsets."""

    base: str
    rank: int | None
    alpha: float | None
    dora: bool
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    coordinate_rows: bool
    parameters: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``parameters`` by part, tied weights once; ``linear_modules``: what ``tuner.target_modules`` can name, by part;
    ``coord_tokens``: "yes", or what is wrong with them."""

    path: str
    model_type: str
    dtype: str
    layers: int
    hidden: int
    vocab_rows: int
    tied_head: bool
    coord_tokens: str
    parameters: dict[str, int]
    linear_modules: dict[str, tuple[str, ...]]
    adapter: AdapterInfo | None


def describe(path: Path) -> ModelInfo:
    """Describe a plain checkpoint, or a LoRA run's folder by its base model.

    Raises:
        CheckpointError: no Qwen3-VL checkpoint, or adapters that are unreadable or without their base.
    """
    config = read_config(path)
    text = config.text_config
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[part_of(name)] += parameter.numel()
    linear: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            linear.setdefault(part_of(name), set()).add(name.rpartition(".")[2])
    try:
        load_vocab(path)
        coord_tokens = "yes"
    except VocabError as error:
        coord_tokens = str(error)
    return ModelInfo(
        path=str(path),
        model_type=config.model_type,
        dtype=str(config.dtype or "unknown").removeprefix("torch."),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab_rows=text.vocab_size,
        tied_head=model.lm_head.weight is model.get_input_embeddings().weight,
        coord_tokens=coord_tokens,
        parameters=dict(parameters),
        linear_modules={part: tuple(sorted(names)) for part, names in linear.items()},
        adapter=_describe_adapter(path) if is_adapter_folder(path) else None,
    )


def _describe_adapter(path: Path) -> AdapterInfo:
    base_checkpoint(path)  # says what is wrong with the chain of base models
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8")) if (path / CONFIG).is_file() else {}
        parameters = sum(_count(path / name) for name in (WEIGHTS, OFFSETS))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: its adapter files cannot be read ({error}); restore them") from error
    return AdapterInfo(
        base=str(base_of(path)),
        rank=config.get("r"),
        alpha=config.get("lora_alpha"),
        dora=bool(config.get("use_dora")),
        target_modules=tuple(config.get("target_modules") or ()),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        coordinate_rows=(path / OFFSETS).is_file(),
        parameters=parameters,
    )


def _count(file: Path) -> int:
    """Trained numbers in a file; none where there is no file. The token ids of offset rows are not trained."""
    if not file.is_file():
        return 0
    with safe_open(file, "pt") as tensors:
        return sum(
            torch.Size(tensors.get_slice(name).get_shape()).numel()
            for name in tensors.keys()  # noqa: SIM118  # not a mapping
            if tensors.get_slice(name).get_dtype() != "I64"
        )
