"""A checkpoint's folder, read without its weights and without torch.

:class:`Checkpoint` is either a plain Qwen3-VL model, or a LoRA run's folder, whose adapters belong to another model.
transformers takes seconds to import, so commands that only look at a folder read it here; tests compare both ways.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from coordexp import hub
from coordexp.config.resolved import AnswerConfig
from coordexp.config.schema import RunConfig
from coordexp.coords import CoordVocab
from coordexp.data.images import ResizeRule
from coordexp.errors import CheckpointError, ConfigError, DataError, VocabError
from coordexp.printable import has_half_characters
from coordexp.reading import LFS_POINTER, is_lfs_pointer

MODEL_TYPE = "qwen3_vl"
CONFIG, WEIGHTS, OFFSETS = "adapter_config.json", "adapter_model.safetensors", "coord_offset.safetensors"
MODEL_WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
RESOLVED_CONFIG = "resolved_config.yaml"
BASE_KEY = "base_model_name_or_path"
COORD_IDS = "coord_token_ids"  # the tensor of OFFSETS with the token ids of its rows
_RM = "rollout_matching"
OFFSET = "coord_offset"  # last part of the name of a coordinate offset


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint whose folder was read once. ``parent``: the model on which its adapters are put, which may have
    adapters itself; None for a plain model. ``config``: ``config.json`` of :attr:`base`."""

    path: Path
    parent: Checkpoint | None
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path | Checkpoint, _above: tuple[Path, ...] = ()) -> Checkpoint:
        """Read a folder's small files; a :class:`Checkpoint` is returned as it is. Raises CheckpointError for no such
        folder, no readable configuration, another model family, no tokenizer, adapters without their base, and as
        :func:`weight_files`. ``_above``: the folders whose adapters are put on this one."""
        if isinstance(path, Checkpoint):
            return path
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: {hub.no_such_folder(folder)}")
        for file in (*sorted(folder.glob("*.safetensors")), folder / TOKENIZER):
            if file.is_file() and is_lfs_pointer(file):
                raise CheckpointError(f"{file}: is {LFS_POINTER}")
        if is_adapter_folder(folder):
            if folder.resolve() in _above:
                raise CheckpointError(
                    f"{folder}: its adapters belong, by way of {_above[-1]}, to its own folder; correct {BASE_KEY} "
                    f"in one {CONFIG}"
                )
            parent = cls.open(base_of(folder), (*_above, folder.resolve()))
            return cls(folder, parent, parent.config)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: no config.json; model.model must be a Qwen3-VL checkpoint folder")
        config = read_object(folder, "config.json", "configuration", finite=True)
        for part in (config, config.get("text_config") or {}):
            if not isinstance(part, dict) or not isinstance(part.get("quantization_config") or {}, dict):
                raise CheckpointError(
                    f"{folder}: text_config or quantization_config in its config.json is not an object; restore the "
                    "checkpoint's files"
                )
        model_type = config.get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(f"{folder}: model type {model_type!r}; CoordExp trains {MODEL_TYPE!r} checkpoints")
        # transformers makes an empty tokenizer where there is none.
        if not any((folder / name).is_file() for name in (TOKENIZER, "vocab.json")):
            raise CheckpointError(f"{folder}: no {TOKENIZER}; copy the tokenizer's files into the checkpoint's folder")
        weight_files(folder)
        return cls(folder, None, config)

    @property
    def base(self) -> Path:
        """The folder of the plain model. It has the tokenizer, processor and sizes, which adapters do not change."""
        return self.path if self.parent is None else self.parent.base

    @property
    def has_tokenizer_file(self) -> bool:
        """Whether :meth:`read_vocab` works; a checkpoint with ``vocab.json`` alone needs transformers."""
        return (self.base / TOKENIZER).is_file()

    @property
    def num_positions(self) -> int | None:
        """Longest text, in tokens, counting stretched rotary embeddings as vLLM does: no engine starts with more. None
        if the configuration does not say."""
        text = self.config.get("text_config") or self.config
        try:
            positions = int(text["max_position_embeddings"])
            rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
            if rope.get("rope_type") == "yarn":  # its factor applies to the length before stretching
                positions = int(rope.get("original_max_position_embeddings") or positions)
            return int(positions * float(rope.get("factor") or 1.0))
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
            return None

    @property
    def quantised_by(self) -> str | None:
        """How the weights are quantised, such as "fp8"; None if they are ordinary numbers."""
        for section in (self.config, self.config.get("text_config") or {}):
            if settings := section.get("quantization_config"):
                return str(settings.get("quant_method"))
        return None

    def read_vocab(self) -> CoordVocab:
        """The coordinate vocabulary, from ``tokenizer.json`` alone. Raises CheckpointError, VocabError."""
        try:
            return CoordVocab.from_tokenizer(_FileTokenizer(self.base))
        except VocabError as error:
            raise VocabError(f"{self.path}: {error}") from error


def weight_files(folder: Path) -> list[str]:
    """The names of the files that have a plain model's weights; whether they exist is not checked. Raises
    CheckpointError for an invalid index, or one next to another model in one file."""
    if not (folder / WEIGHTS_INDEX).is_file():
        return [MODEL_WEIGHTS]
    weight_map = read_object(folder, WEIGHTS_INDEX, "index of weights").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{folder}: {WEIGHTS_INDEX} has no weight_map of file names; restore the checkpoint's files"
        )
    names = sorted(set(weight_map.values()))
    if MODEL_WEIGHTS not in names and (folder / MODEL_WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder}: has {MODEL_WEIGHTS}, which transformers would read, and {WEIGHTS_INDEX}, whose files vLLM "
            "would read; remove those of the model that is not meant"
        )
    return names


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder has adapters or coordinate offsets, to be put on another checkpoint, instead of a model."""
    return any((Path(path) / name).is_file() for name in (CONFIG, OFFSETS))


def base_name(folder: Path) -> str | None:
    """The model to which the adapters in ``folder`` belong, as they name it. Raises CheckpointError."""
    try:
        if (folder / CONFIG).is_file():
            content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            base = content.get(BASE_KEY) if isinstance(content, dict) else content
            if not isinstance(base, str | None):
                raise ValueError(f"{BASE_KEY} in {CONFIG} is not text")
            return base
        with safe_open(folder / OFFSETS, "np") as file:  # coordinate offsets without LoRA have no adapter_config.json
            return (file.metadata() or {}).get(BASE_KEY)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: its adapter files cannot be read ({error}); restore them") from error


def base_of(folder: Path) -> Path:
    """The folder of the model to which the adapters in ``folder`` belong; of a model of the hub, that in its cache.
    Raises CheckpointError."""
    base = base_name(folder)
    place = None if not base else Path(base)
    if place is not None and (named := hub.hub_model(place)) is not None:
        place = hub.cached(named)
    if place is None or not place.is_dir() or place.resolve() == folder.resolve():
        raise CheckpointError(
            f"{folder}: has adapters of the model {base}, which is not a folder here; put that model back, or name "
            "its new place: coordexp model merge FOLDER OUTPUT --base MODEL"
        )
    return place


def read_object(folder: Path, name: str, what: str, *, finite: bool = False) -> dict[str, Any]:
    """A JSON object from a checkpoint's folder; empty without such a file. ``what``: its name in a CheckpointError.
    ``finite``: refuse NaN and infinity, which Python's reader takes."""
    if not (folder / name).is_file():
        return {}
    try:
        read = msgspec.json.decode if finite else json.loads
        content = read((folder / name).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: its {what} cannot be read ({error}); restore the checkpoint's files"
        ) from error
    return content


def processor_rule(folder: Path) -> ResizeRule:
    """How the image processor in a checkpoint's folder resizes. Raises CheckpointError if the folder has none."""
    settings = read_object(folder, "processor_config.json", "processor").get("image_processor")
    settings = settings or read_object(folder, "preprocessor_config.json", "image processor")
    try:
        size = settings.get("size") or {}
        # The older keys win, as in transformers, for folders that have both.
        least = settings.get("min_pixels") or size.get("shortest_edge")
        most = settings.get("max_pixels") or size.get("longest_edge")
        if least and most and settings.get("patch_size") and settings.get("merge_size"):
            return ResizeRule(settings["patch_size"] * settings["merge_size"], int(least), int(most))
    except (AttributeError, TypeError, ValueError, OverflowError, DataError) as error:
        raise CheckpointError(
            f"{folder}: its image processor's sizes cannot be used ({error}); restore processor_config.json"
        ) from error
    raise CheckpointError(f"{folder}: no image processor's sizes; restore processor_config.json")


Part = Literal["vit", "aligner", "llm", "coord"]


def part_of(name: str) -> Part:
    """The part of a Qwen3-VL model to which a parameter or module belongs; coordinate offsets are one of their own."""
    if name.rpartition(".")[2] == OFFSET:
        return "coord"
    path = f".{name}."
    if ".visual." not in path:
        return "llm"
    return "aligner" if ".visual.merger." in path or ".visual.deepstack_merger_list." in path else "vit"


def is_named(module: str, ends: Iterable[str]) -> bool:
    """Whether one of ``ends``, as ``tuner.target_modules`` and ``modules_to_save`` have them, means a module."""
    return any(module == end or module.endswith(f".{end}") for end in ends)


class _FileTokenizer:
    """The part of transformers' fast tokenizer that :class:`CoordVocab` uses, on the library below it."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises no type of its own
            raise CheckpointError(
                f"{folder}: its tokenizer cannot be read ({error}); restore the checkpoint's files"
            ) from error
        self._tokenizer.no_truncation()  # the file may set either
        self._tokenizer.no_padding()
        settings = read_object(folder, "special_tokens_map.json", "tokenizer's settings")
        settings |= read_object(folder, "tokenizer_config.json", "tokenizer's settings")
        self.eos_token_id = self._id(settings.get("eos_token"))
        self.pad_token_id = self._id(settings.get("pad_token"))
        named: list[Any] = [value for name, value in settings.items() if name.endswith("_token")]
        for name in ("extra_special_tokens", "additional_special_tokens"):  # a list, or an object by name
            extra = settings.get(name) or []
            named += extra.values() if isinstance(extra, dict) else extra
        ids = {self._id(token) for token in named if isinstance(token, str | dict)}
        self.all_special_ids = sorted(token_id for token_id in ids if token_id is not None)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str | list[str], add_special_tokens: bool) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        encoded = self._tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encoded]}

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def _id(self, token: Any) -> int | None:
        """``token`` as ``tokenizer_config.json`` has it: its text, or an object with it."""
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or has_half_characters(content):  # the library takes none of these
            return None
        return self._tokenizer.token_to_id(content)


def num_positions(checkpoint: str | Path | Checkpoint) -> int | None:
    """As :attr:`Checkpoint.num_positions`; also None if the checkpoint cannot be read, which loading reports."""
    try:
        return Checkpoint.open(checkpoint).num_positions
    except CheckpointError:
        return None


def check_lengths(config: RunConfig | AnswerConfig, checkpoint: str | Path | Checkpoint | None = None) -> None:
    """Raise ConfigError with every length that ``checkpoint`` (None for ``model.model``) does not support, and the
    limit."""
    checkpoint = checkpoint or config.model.model
    limit, rollout = num_positions(checkpoint), config.rollout_matching
    if limit is None or rollout is None:
        return
    problems = []
    if rollout.max_new_tokens >= limit:
        problems.append(
            f"{_RM}.max_new_tokens: {rollout.max_new_tokens} leaves no room for a prompt; write less than {limit}"
        )
    if rollout.rollout_backend == "vllm":
        longest = rollout.vllm.max_model_len
        if longest is not None and longest > limit:
            problems.append(
                f"{_RM}.vllm.max_model_len: {longest} is more than an engine can have; write {limit} or less"
            )
        elif longest is None and config.global_max_length > limit:
            problems.append(
                f"global_max_length: {config.global_max_length} is more than an engine can have, and "
                f"{_RM}.vllm.max_model_len is null and means it; write {limit} or less"
            )
    if problems:
        name = checkpoint.path if isinstance(checkpoint, Checkpoint) else checkpoint
        of = f"{name} has {limit} positions (max_position_embeddings in its config.json)"
        raise ConfigError("\n".join(f"{problem}: {of}" for problem in problems))


def length_advice(config: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """A row may be longer than the positions, which restart with each sample in it; a sample may not."""
    limit = checkpoint.num_positions
    if limit is not None and config.global_max_length > limit:
        yield (
            f"global_max_length: {config.global_max_length} is more than the {limit} positions of {checkpoint.path} "
            "(max_position_embeddings); a longer sample uses positions on which the model was never trained. Write "
            f"{limit} or less"
        )
