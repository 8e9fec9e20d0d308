"""Sizes, parts, coordinate tokens and adapters of a checkpoint, from the headers of its safetensors files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from coordexp.checkpoints.card import read_card
from coordexp.checkpoints.folder import (
    CONFIG,
    COORD_IDS,
    OFFSETS,
    WEIGHTS,
    Checkpoint,
    part_of,
    read_object,
    weight_files,
)
from coordexp.errors import CheckpointError, VocabError

_HEAD = "lm_head.weight"
TABLES = ("lm_head", "embed_tokens", "pos_embed")  # matrices that are not linear layers of the blocks
_LAYER = re.compile(r"(?:^|\.)language_model\.layers\.(\d+)\.")


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
    """``parameters`` by part, tied weights once; ``linear_modules``: valid names for ``tuner.target_modules``, by part;
    ``coord_tokens``: "yes", or the problem with them; ``source``: the hub's model of these weights."""

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
    source: str | None


def describe(path: Path) -> ModelInfo:
    """Describe a plain checkpoint, or a LoRA run's folder by its base model. Raises CheckpointError."""
    checkpoint = Checkpoint.open(path)
    config, folder = checkpoint.config, checkpoint.base
    shapes = weight_shapes(checkpoint)
    tables = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    if len(tables) != 1 or len(tables[0]) != 2:
        raise CheckpointError(f"{folder}: its weights have no token embedding; restore the checkpoint's files")
    rows, hidden = tables[0]
    tied = _HEAD not in shapes or bool(config.get("tie_word_embeddings"))
    parameters: Counter[str] = Counter()
    linear: dict[str, set[str]] = {}
    # Last parts of names that other modules have too, such as the patch embedding's proj: an adapter needs more of it.
    shared = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) > 2}
    for name, shape in shapes.items():
        if name == _HEAD and tied:
            continue
        parameters[part_of(name)] += math.prod(shape)
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        if kind == "weight" and len(shape) == 2 and last not in TABLES:
            own = ".".join(module.split(".")[-2:]) if last in shared else last
            linear.setdefault(part_of(name), set()).add(own)
    if not checkpoint.has_tokenizer_file:
        coord_tokens = f"unknown: {path} has no tokenizer.json; save its tokenizer with transformers' save_pretrained"
    else:
        try:
            highest = max(checkpoint.read_vocab().coord_token_ids)
            coord_tokens = "yes" if highest < rows else too_few_rows(checkpoint.path, highest, rows)
        except VocabError as error:
            coord_tokens = str(error)
    adapter = None
    if checkpoint.parent is not None:
        lora = read_object(checkpoint.path, CONFIG, "adapter's configuration")
        files = [file for name in (WEIGHTS, OFFSETS) if (file := checkpoint.path / name).is_file()]
        trained = [shape for file in files for name, shape in _header(file).items() if name != COORD_IDS]
        adapter = AdapterInfo(
            base=str(checkpoint.parent.path),
            rank=lora.get("r"),
            alpha=lora.get("lora_alpha"),
            dora=bool(lora.get("use_dora")),
            target_modules=_names(lora.get("target_modules")),
            modules_to_save=_names(lora.get("modules_to_save")),
            coordinate_rows=(checkpoint.path / OFFSETS).is_file(),
            parameters=sum(map(math.prod, trained)),
        )
    text = config.get("text_config") or {}
    return ModelInfo(
        path=str(path),
        model_type=str(config["model_type"]),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "unknown"),
        layers=len({match.group(1) for name in shapes if (match := _LAYER.search(name))}),
        hidden=hidden,
        vocab_rows=rows,
        tied_head=tied,
        coord_tokens=coord_tokens,
        parameters=dict(parameters),
        linear_modules={part: tuple(sorted(names)) for part, names in linear.items()},
        adapter=adapter,
        source=read_card(checkpoint.path).source,
    )


def _names(value: object) -> tuple[str, ...]:
    # peft also takes one text, such as all-linear or a pattern.
    return tuple(map(str, value)) if isinstance(value, list) else () if value is None else (str(value),)


def too_few_rows(path: str | Path, highest: int, rows: int) -> str:
    """The message for a model with fewer ``rows`` than its tokenizer's ``highest`` coordinate id needs."""
    return (
        f"{path}: coordinate token ids reach {highest} but the model has {rows} embedding rows; "
        "resize it with: coordexp model expand-vocab CHECKPOINT OUTPUT"
    )


def weight_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, from one file or from all that the index names."""
    folder = checkpoint.base
    shapes: dict[str, tuple[int, ...]] = {}
    for name in weight_files(folder):
        if not (folder / name).is_file():
            pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
            fix = f"{pickled[0]} is not read; save it as safetensors" if pickled else "restore the checkpoint's files"
            raise CheckpointError(f"{folder}: its weights, {name}, are missing; {fix}")
        shapes |= _header(folder / name)
    return shapes


def _header(file: Path) -> Mapping[str, tuple[int, ...]]:
    try:
        with safe_open(file, "np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); restore the checkpoint's files") from error
