"""LoRA and DoRA adapters and coordinate offsets: attach them, save, load, and merge them into a plain model.

* ``adapter_config.json``, peft's: rank, scale, adapted modules, the folder of the base model
* ``adapter_model.safetensors``, peft's: adapters, and modules that are trained whole
* ``coord_offset.safetensors``: float32 offsets by parameter name, token ids of their rows, the base model's folder
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from coordexp.checkpoints.folder import BASE_KEY, CONFIG, COORD_IDS, OFFSETS, WEIGHTS, is_named, part_of
from coordexp.config.schema import TunerConfig
from coordexp.data.files import give_ordinary_mode
from coordexp.errors import CheckpointError, ConfigError
from coordexp.modeling.cpu_products import is_linear, take_linear_layers
from coordexp.modeling.patches import PatchProjection
from coordexp.modeling.trainer_weights import (
    ADAPTER,
    PEFT_PREFIX,
    adapter_config,
    adapter_name,
    add_coord_offset,
    add_offset,
    is_adapter_part,
    is_offset,
    is_saved_whole,
    merge_lora,
    offset_of,
)

ALL_LINEAR = "all-linear"
_TABLES = ("lm_head", "embed_tokens")
_LORA_A = ".lora_A.weight"
# Settings of peft that change an adapter's result and that merge_lora does not implement.
_NOT_SUPPORTED = ("use_rslora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication",
                  "use_qalora", "alora_invocation_tokens", "trainable_token_indices", "target_parameters")  # fmt: skip
# Starts of adapters that leave the base model as it is; others (PiSSA, OLoRA, CorDA …) subtract from its weights first.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def has_adapter(model: Any) -> bool:
    """Whether the model is trained by adapters or coordinate offsets, and so is saved as a LoRA run's folder."""
    return any(_is_ours(name) for name, _ in model.named_parameters())


def save_adapter(model: Any, folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the trained weights to ``folder``, from ``state_dict`` if they had to be gathered first."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if state_dict is None else state_dict
    # A tied offset has two names in the state dict, and one among the parameters.
    names = [name for name, _ in model.named_parameters() if _is_ours(name)]
    trained = {name: state[name].detach().cpu().contiguous() for name in names}
    adapters = {adapter_name(name): tensor for name, tensor in trained.items() if not is_offset(name)}
    offsets = {name: tensor for name, tensor in trained.items() if is_offset(name)}
    base = str(model.name_or_path)
    if adapters:
        config = adapter_config(model.peft_config[ADAPTER]) | {BASE_KEY: base, "inference_mode": True}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(adapters, folder / WEIGHTS, metadata={"format": "pt"})
    if offsets:
        offset = offset_of(model.get_input_embeddings())
        assert offset is not None, "an offset is always on the embedding"
        offsets[COORD_IDS] = offset[0].cpu()
        # A single key: safetensors writes several in a random order, and equal weights should be equal files.
        save_file(offsets, folder / OFFSETS, metadata={BASE_KEY: base})
    give_ordinary_mode(folder)


@torch.no_grad()
def load_adapter(model: Any, folder: Path) -> None:
    """Load the weights that :func:`save_adapter` wrote, bit for bit, into a model with the same ``tuner`` section.
    Raises CheckpointError for others."""
    saved = _read(folder / WEIGHTS) | _read(folder / OFFSETS)
    saved.pop(COORD_IDS, None)
    wanted = {
        name if is_offset(name) else adapter_name(name): parameter
        for name, parameter in model.named_parameters()
        if _is_ours(name)
    }
    odd = sorted(wanted.keys() ^ saved.keys())
    odd += [name for name, p in wanted.items() if name in saved and p.shape != saved[name].shape]
    if odd:
        raise CheckpointError(
            f"{folder}: its adapters are not those of this configuration ({len(odd)} differ, {odd[0]} first); resume "
            "with the tuner section that wrote them"
        )
    for name, parameter in wanted.items():
        parameter.copy_(saved[name])


@torch.no_grad()
def merge_adapter(model: Any, folder: Path) -> None:
    """Merge the adapters and offsets of ``folder`` into a plain model, in place. Raises CheckpointError for files that
    are unreadable, of another model, or with settings that cannot be merged."""
    weights = dict(model.named_parameters())
    saved, offsets = _read(folder / WEIGHTS), _read(folder / OFFSETS)
    if not saved and (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: has {CONFIG} but no {WEIGHTS}; restore it, or use an older checkpoint")

    def target(name: str, shape: Sequence[int]) -> torch.nn.Parameter:
        weight = weights.get(name.removeprefix(PEFT_PREFIX))
        if weight is None or weight.shape != tuple(shape):
            raise CheckpointError(
                f"{folder}: its {name} fits no weight of the base model; put back the model that it was trained on"
            )
        return weight

    rank, scaling, use_dora = _settings(folder) if saved else (1.0, 1.0, False)
    _check_tables(model, saved, offsets, folder)
    modules = [name.removesuffix(_LORA_A) for name in sorted(saved) if name.endswith(_LORA_A)]
    for module in modules:
        a_RI, b_OR = saved.pop(module + _LORA_A), saved.pop(f"{module}.lora_B.weight", None)
        if b_OR is None or not rank == a_RI.shape[0] == b_OR.shape[1]:  # the scale depends on the rank
            raise CheckpointError(
                f"{folder}: {WEIGHTS} has no two matrices of rank {rank:g} (r in {CONFIG}) for {module}; restore both "
                "files"
            )
        magnitude_O = saved.pop(f"{module}.lora_magnitude_vector", None)
        if (magnitude_O is None) == use_dora:
            raise CheckpointError(
                f"{folder}: {CONFIG} has use_dora: {str(use_dora).lower()}, and {WEIGHTS} has "
                f"{'no ' if use_dora else ''}magnitudes for {module}; restore both files"
            )
        weight_OI = target(f"{module}.weight", (b_OR.shape[0], a_RI.shape[1]))
        weight_OI.copy_(merge_lora(weight_OI, a_RI, b_OR, scaling, magnitude_O))
    for name, tensor in saved.items():  # modules trained whole
        target(name, tensor.shape).copy_(tensor)
    if offsets:
        ids_B, rows = offsets.pop(COORD_IDS), model.config.text_config.vocab_size
        for name, offset_BH in offsets.items():
            weight_VH = target(name.rpartition(".")[0] + ".weight", (rows, offset_BH.shape[1]))
            weight_VH.copy_(add_offset(weight_VH, ids_B, offset_BH))


def _settings(folder: Path) -> tuple[float, float, bool]:
    """Rank, scale and ``use_dora`` of the adapters in ``folder``. Raises CheckpointError for settings that cannot be
    merged."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = config.get("peft_type", "LORA")
        if kind != "LORA":
            raise CheckpointError(
                f"{folder / CONFIG}: peft_type is {kind}, and CoordExp reads LORA; merge it with peft, if it can be"
            )
        rank = float(config["r"])
        scaling = float(config["lora_alpha"]) / rank
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG}: not a LoRA configuration ({error!r}); restore it") from error
    unknown = [key for key in _NOT_SUPPORTED if config.get(key)]
    unknown += ["bias"] if config.get("bias", "none") != "none" else []
    if (start := config.get("init_lora_weights")) not in _STARTS:
        unknown.append(f"init_lora_weights: {start}")
    if unknown:
        raise CheckpointError(
            f"{folder / CONFIG}: sets {', '.join(unknown)}, which CoordExp cannot merge; merge it with "
            "peft (PeftModel.merge_and_unload)"
        )
    return rank, scaling, bool(config.get("use_dora"))


def _check_tables(model: Any, saved: Mapping[str, Any], offsets: Mapping[str, Any], folder: Path) -> None:
    """A tied head is the embedding: what changes one of them alone has no place in it."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    own = next((name for name in sorted(saved) if not set(_TABLES).isdisjoint(name.split("."))), None)
    if tied and own is not None:
        raise CheckpointError(
            f"{folder}: {own} is of the embedding or the head alone, which are one matrix in the base model; merge it "
            "with peft, into a model with tie_word_embeddings: false"
        )
    if not tied and 0 < len(offsets.keys() - {COORD_IDS}) < len(_TABLES):
        raise CheckpointError(
            f"{folder}: its coordinate rows are of a model whose head is the embedding, and this base has a head of "
            "its own; put back the model that it was trained on"
        )


def _is_ours(name: str) -> bool:
    return is_adapter_part(name) or is_saved_whole(name) or is_offset(name)


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file) if file.is_file() else {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); restore it, or use an older checkpoint") from error


def tune(model: Any, config: TunerConfig, coord_ids: Sequence[int]) -> None:
    """Freeze parts of the model, and attach adapters and coordinate offsets, as ``config`` says. Raises ConfigError if
    nothing is left to train, or a name matches no module that can be adapted."""
    freeze = {"vit": config.freeze_vit, "aligner": config.freeze_aligner, "llm": config.freeze_llm}
    frozen = {part for part, frozen in freeze.items() if frozen}
    if config.train_type == "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)
    else:
        from peft import LoraConfig
        from peft.tuners.lora import LoraLayer

        model.requires_grad_(False)
        targets = _targets(model, config.target_modules, frozen)
        saved = _trained_whole(model, config.modules_to_save, frozen)
        targets = [name for name in targets if not _is_within(name, saved)]
        if saved and not targets:  # peft attaches nothing without an adapter
            raise ConfigError(
                "tuner.target_modules: every module that these names mean is trained whole, by tuner.modules_to_save; "
                "name another one, or set tuner.train_type: full"
            )
        if targets:
            lora = LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  # peft only divides by the rank
                lora_dropout=config.lora_dropout,
                use_dora=config.use_dora,
                target_modules=targets,
                modules_to_save=saved or None,
            )
            model.add_adapter(lora, ADAPTER)
            for parameter in model.parameters():
                if parameter.requires_grad:  # adapters of a bfloat16 model are trained in float32
                    parameter.data = parameter.data.float()
            for module in model.modules():
                if isinstance(module, LoraLayer) and not config.use_dora:  # DoRA's norms need float32
                    module.cast_input_dtype_enabled = _OutsideAutocast()  # pyright: ignore[reportAttributeAccessIssue]
            take_linear_layers(model)  # the adapters' own
        elif not config.train_coord_rows:
            raise ConfigError("tuner.target_modules: every part is frozen, so no module can get adapters; unfreeze one")
        if config.train_coord_rows:
            add_coord_offset(model, coord_ids)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "tuner: freeze_vit, freeze_aligner and freeze_llm leave nothing to train; set at least one of them to false"
        )


class _OutsideAutocast:
    """Whether peft casts an adapter's input to float32. Autocast would cast it back for the product: the same value, at
    the price of two kernels and a float32 copy of each layer's input."""

    def __bool__(self) -> bool:
        return not any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu"))


def _targets(model: Any, names: Sequence[str], frozen: set[str]) -> list[str]:
    if ALL_LINEAR in names:
        if len(names) > 1:
            raise ConfigError(f"tuner.target_modules: {ALL_LINEAR} excludes other names; remove them, or it")
        linear = (name for name, module in model.named_modules() if is_linear(module))
        return [name for name in linear if part_of(name) not in frozen and name.split(".")[-1] not in _TABLES]
    targets = _matching(model, names, "tuner.target_modules", frozen)
    for name in targets:
        module = model.get_submodule(name)
        if isinstance(module, PatchProjection):
            raise ConfigError(
                f"tuner.target_modules: {name} multiplies whole patches by a weight of five axes: an adapter of it "
                "could neither be merged nor pushed to engines. Name it in tuner.modules_to_save, which trains it whole"
            )
        if not is_linear(module):
            raise ConfigError(
                f"tuner.target_modules: {name} is a {type(module).__name__}; only linear layers can get adapters. Name "
                f"those, or write {ALL_LINEAR}"
            )
    return targets


def _trained_whole(model: Any, ends: Sequence[str], frozen: set[str]) -> list[str]:
    key = "tuner.modules_to_save"
    names = _matching(model, ends, key, frozen)
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            entry = f"{name}.{next(iter(dict(module.named_children())), 0)}"
            raise ConfigError(f"{key}: {name} is a list of modules; name those to train, such as {entry}")
        inside = [inner for inner, _ in module.named_parameters(prefix=name)]
        if not inside:
            raise ConfigError(f"{key}: {name} has no weights; remove it")
        # A copy of the embedding would leave a tied head on the table that is not trained.
        if (table := next((one for one in inside if one.split(".")[-2] in _TABLES), None)) is not None:
            raise ConfigError(
                f"{key}: {name} has {table}, which cannot be trained next to adapters; name the layers in it, such as "
                "language_model.layers.0, or set tuner.train_type: full"
            )
        if parts := sorted({part_of(one) for one in inside} & frozen):
            keys = " and ".join(f"tuner.freeze_{part}" for part in parts)
            raise ConfigError(f"{key}: {name} has weights that {keys} freezes; set it to false, or name the others")
    return [name for name in names if not _is_within(name, set(names) - {name})]


def _is_within(name: str, modules: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in modules)


def _matching(model: Any, ends: Sequence[str], key: str, frozen: set[str]) -> list[str]:
    # Modules outside frozen parts that have one of `ends` as the end of their dotted name.
    names = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for end in ends:
        matching = [name for name in names if is_named(name, (end,))]
        if not matching:
            raise ConfigError(
                f"{key}: no module of the model has a name that ends in {end!r}; see `coordexp model info`"
            )
        trained = [name for name in matching if part_of(name) not in frozen]
        if not trained:
            parts = " and ".join(sorted({f"tuner.freeze_{part_of(name)}" for name in matching}))
            raise ConfigError(f"{key}: {end!r} is only in what {parts} freezes; set it to false, or remove the name")
        found += [name for name in trained if name not in found]
    for name in found:
        if name.split(".")[-1] in _TABLES:
            raise ConfigError(
                f"{key}: {name} is the embedding or the head; tuner.train_coord_rows trains its 1000 coordinate rows, "
                "and tuner.train_type: full the whole table"
            )
    return found
