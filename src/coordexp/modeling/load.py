"""Load a checkpoint's model, processor and coordinate vocabulary; write a run's model as a plain checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

from coordexp.checkpoints.card import Card, read_card, write_card
from coordexp.checkpoints.describe import too_few_rows
from coordexp.checkpoints.fingerprints import base_problem
from coordexp.checkpoints.folder import Checkpoint, is_adapter_folder
from coordexp.config.base import default_of
from coordexp.config.schema import ModelConfig
from coordexp.coords import COORD_TOKENS, CoordVocab
from coordexp.data.files import give_ordinary_mode
from coordexp.data.images import open_rgb
from coordexp.data.preparation import ImagePreparation
from coordexp.errors import CheckpointError, VocabError
from coordexp.modeling.adapter import merge_adapter
from coordexp.modeling.attention import transformers_names
from coordexp.modeling.cpu_products import take_linear_layers
from coordexp.modeling.finite import check_finite
from coordexp.modeling.patches import PixelScale, take_rows
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.out_of_memory import is_out_of_memory
from coordexp.rollouts.backend import TrainerParts

logger = logging.getLogger("coordexp")
DTYPE: str = default_of(ModelConfig, "dtype")
ATTENTION: str = default_of(ModelConfig, "attn_implementation")
# While transformers loads a model, it replaces functions of its own classes and torch's default number type. Two
# threads that do so at once leave a replacement in place for good, and no model of the process is whole again.
_LOADING = threading.Lock()


class Qwen3VLForConditionalGeneration(transformers.Qwen3VLForConditionalGeneration):
    """Qwen3-VL that can run any function as its forward: ``model(forward_fn=f)`` returns ``f(model)``.

    The chunked loss applies the language head itself. That must happen inside the wrapper's call, in which DDP prepares
    its gradient reducer, FSDP gathers parameters, and autocast and DeepSpeed are active; so it is passed in.

    The class keeps the name of its base, because ``save_pretrained`` writes it as the checkpoint's architecture.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        take_rows(self)
        take_linear_layers(self)
        self.lm_head.register_forward_pre_hook(_with_plain_strides)

    @wraps(transformers.Qwen3VLForConditionalGeneration.forward)  # generate() reads the signature
    def forward(self, *args: Any, forward_fn: Callable[[Any], Any] | None = None, **kwargs: Any) -> Any:
        if forward_fn is not None:
            return forward_fn(self)
        return super().forward(*args, **kwargs)


def _with_plain_strides(head: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
    # ``generate`` gives the head the last position of a prompt as a slice. On a CPU, torch multiplies a bfloat16 slice
    # by a weight without gradients (LoRA) in an unoptimised loop: 12 s instead of 0.05 s for two rows of Qwen3-VL-2B.
    # ``contiguous()`` would not do, because the strides of a slice with one row count as contiguous.
    (hidden_BLH,) = args
    if hidden_BLH.device.type != "cpu":
        return None
    return (hidden_BLH.clone(memory_format=torch.contiguous_format),)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with its processor, vocabulary and card. ``attention``: the value of ``model.attn_implementation``."""

    checkpoint: Checkpoint
    model: Qwen3VLForConditionalGeneration
    processor: Any
    vocab: CoordVocab
    attention: str
    card: Card

    @property
    def preparation(self) -> ImagePreparation:
        return self.card.preparation

    @property
    def image_token_id(self) -> int:
        return self.model.config.image_token_id

    def parts(self, **further: Any) -> TrainerParts:
        """The parts that a rollout backend uses; ``further``: other values of :class:`TrainerParts`' fields."""
        given = {"weights": TrainerWeights(self.model), "checkpoint": self.checkpoint.base, "open_image": open_rgb}
        return TrainerParts(self.model, self.vocab, self.image_token_id, **given | further)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without transformers' bars for loading and saving weights."""
    bars: Any = transformers.utils.logging
    were_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            bars.enable_progress_bar()


def load_vocab(path: str | Path | Checkpoint) -> CoordVocab:
    """Check and read only the tokenizer: cheap. Raises CheckpointError, and VocabError without coordinate tokens."""
    checkpoint = Checkpoint.open(path)
    return _vocab_of(checkpoint, _read(AutoTokenizer, checkpoint.base, "tokenizer"))


def _vocab_of(checkpoint: Checkpoint, tokenizer: Any) -> CoordVocab:
    rows = read_config(checkpoint).text_config.vocab_size
    try:
        vocab = CoordVocab.from_tokenizer(tokenizer)
    except VocabError as error:
        raise VocabError(f"{checkpoint.path}: {error}") from error
    if max(vocab.coord_token_ids) >= rows:
        raise VocabError(too_few_rows(checkpoint.path, max(vocab.coord_token_ids), rows))
    return vocab


class ProcessorAndVocab(NamedTuple):
    """The processor and vocabulary: images, prompts and answers to a model's inputs, and its outputs to text."""

    processor: Any
    vocab: CoordVocab


def load_processor_and_vocab(path: str | Path | Checkpoint) -> ProcessorAndVocab:
    """Check and read the processor and its vocabulary, without weights. Raises CheckpointError, and VocabError without
    coordinate tokens."""
    checkpoint = Checkpoint.open(path)
    processor = load_processor(checkpoint)
    return ProcessorAndVocab(processor, _vocab_of(checkpoint, processor.tokenizer))


def load_model(
    path: str | Path | Checkpoint,
    dtype: str = DTYPE,
    attention: str = ATTENTION,
    known: ProcessorAndVocab | None = None,
) -> LoadedModel:
    """Load a Qwen3-VL checkpoint that has the coordinate tokens; a LoRA run's folder with its adapters merged.
    ``known``: its processor and vocabulary, if they are read already. Raises CheckpointError for weights that are
    unreadable, missing or of another shape, VocabError without the tokens."""
    checkpoint = Checkpoint.open(path)
    processor, vocab = known or load_processor_and_vocab(checkpoint)
    model: Any = read_weights(checkpoint, getattr(torch, dtype))
    model.name_or_path = str(checkpoint.path.absolute())  # adapters trained on it will name it as their base
    model.set_attn_implementation(transformers_names(attention))
    model.model.pixel_scale = PixelScale.of(processor.image_processor)
    return LoadedModel(checkpoint, model, processor, vocab, attention, read_card(checkpoint.path))


def load_processor(path: str | Path | Checkpoint) -> Any:
    """The checkpoint's processor: tokenizer, image processor, chat template. Raises CheckpointError without one that
    can process a prompt."""
    folder = Checkpoint.open(path).base
    try:
        processor: Any = _read(AutoProcessor, folder, "processor")
    except CheckpointError:
        _read(AutoTokenizer, folder, "tokenizer")  # if this is the broken part, the message names it
        raise
    parts = [{"type": "image", "image": "a"}, {"type": "text", "text": "a"}]
    file, what = "chat_template.jinja", "chat template"
    try:  # the libraries read neither file to its end before it is used
        processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
        file, what = "processor_config.json", "image processor"
        pixels = processor.image_processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")["pixel_values"]
        if not pixels.isfinite().all():
            raise ValueError("it makes NaN or infinite pixels")
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{folder}: its {what} cannot be used ({type(error).__name__}: {error}); restore {file}"
        ) from error
    return processor


def read_config(path: str | Path | Checkpoint) -> Any:
    """transformers' configuration of a checkpoint. Raises CheckpointError also for values that transformers refuses."""
    return _read(AutoConfig, Checkpoint.open(path).base, "configuration")


def read_weights(checkpoint: Checkpoint, dtype: torch.dtype | Literal["auto"]) -> Qwen3VLForConditionalGeneration:
    """As transformers' ``from_pretrained``, but weights that are unreadable, missing, misshapen, NaN or infinite raise
    CheckpointError, and so do adapters whose base model was changed."""
    path = checkpoint.path
    if (method := checkpoint.quantised_by) is not None:  # their scales are neither merged, resized nor written
        raise CheckpointError(
            f"{path}: its weights are quantised ({method}), which only vLLM reads; take the checkpoint that it was "
            "made from, whose weights are float32, bfloat16 or float16"
        )
    if checkpoint.parent is not None:
        if (problem := base_problem(path, checkpoint.parent.path)) is not None:
            raise CheckpointError(
                f"{path}: {problem}; put that model back, or merge them with this one on purpose: coordexp model merge "
                f"{path} OUTPUT --base {checkpoint.parent.path}"
            )
        return _with_adapters(path, checkpoint.parent, dtype)
    with _reading(path, "weights"), _LOADING:
        loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            # Else config.json may name one that is not installed, or code of the hub, which would be fetched.
            attn_implementation="sdpa",
        )
    model, report = loaded
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} weights are missing, {missing[0]} first; restore the checkpoint's files"
        )
    # transformers then keeps both matrices, with a warning; vLLM skips the head and answers otherwise.
    if model.config.tie_word_embeddings and model.lm_head.weight is not model.get_input_embeddings().weight:
        raise CheckpointError(
            f"{path}: its config.json says that the head is the embedding (tie_word_embeddings), but its weights have "
            "an lm_head.weight of other values; set tie_word_embeddings to false there and in its text_config, or "
            "restore the checkpoint's files"
        )
    _keep_what_can_be_saved(model, path)
    check_finite(model, path)
    return model


def _with_adapters(
    folder: Path, base: Checkpoint, dtype: torch.dtype | Literal["auto"]
) -> Qwen3VLForConditionalGeneration:
    """The model ``base`` with the adapters of ``folder`` merged."""
    # The base is read in the run's own number type, or in one of which no weight is rounded before it is merged.
    own = getattr(torch, _own_dtype(folder, base))
    model: Any = read_weights(base, dtype if dtype in ("auto", own) else torch.float32)
    merge_adapter(model, folder)
    if dtype not in ("auto", model.dtype):
        model.to(dtype)
        for config in (model.config, model.config.text_config, model.config.vision_config):
            config.dtype = dtype  # vLLM reads those of the parts
    check_finite(model, folder)
    return model


def _keep_what_can_be_saved(model: Any, path: Path) -> None:
    # transformers reads settings that contradict each other, such as a temperature without do_sample, and refuses to
    # write them: a run would fail at its first save. CoordExp decodes by its own keys, so nothing else reads them.
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        keys = ", ".join(re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)) or str(error)
        logger.warning(
            "%s: its generation_config.json contradicts itself (%s), and transformers would not write it again: what "
            "is saved keeps its token ids alone; CoordExp does not decode by this file",
            path,
            keys,
        )
        model.generation_config = _token_ids_of(model.generation_config)


def _token_ids_of(settings: GenerationConfig) -> GenerationConfig:
    return GenerationConfig(**{key: getattr(settings, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")})


def _read(source: Any, path: Path, what: str) -> Any:
    with _reading(path, what):
        # Unless it is refused, transformers asks at the terminal whether to run Python code of the folder.
        return source.from_pretrained(path, trust_remote_code=False)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Raises CheckpointError for any error of a library that cannot read a checkpoint's files."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # of a damaged file, the libraries raise anything
        if is_out_of_memory(error):
            raise
        if "custom code" in str(error):
            raise CheckpointError(
                f"{path}: its {what} is Python code (auto_map), which is not run; take a Qwen3-VL checkpoint's files"
            ) from error
        raise CheckpointError(f"{path}: its {what} cannot be read ({error}); restore the checkpoint's files") from error


def export_checkpoint(checkpoint: Path, output: Path, dtype: str | None = None, for_openai: bool = False) -> Path:
    """Write all of ``checkpoint`` that inference reads: model, tokenizer, processor, chat template, card.

    ``dtype``: of the weights; None keeps the run's, since another would change its answers. ``for_openai``: for a
    server that is not CoordExp's, as :func:`adapt_for_openai`. Attention is reset to transformers' default, so that the
    folder loads everywhere. Raises as :func:`load_model`.
    """
    loaded = load_model(checkpoint, dtype or _own_dtype(checkpoint, checkpoint), attention="sdpa")
    write_checkpoint(loaded.model, loaded.processor, loaded.card, output)
    if for_openai:
        adapt_for_openai(output, loaded.preparation)
    return output


def adapt_for_openai(folder: Path, preparation: ImagePreparation) -> None:
    """Let any server of an OpenAI-compatible API answer with the checkpoint that :func:`write_checkpoint` wrote to
    ``folder``.

    Coordinate tokens become ordinary added tokens: servers leave special tokens out of their text. Of
    generation_config.json the token ids stay: servers apply its repetition penalty and sampling to requests that name
    none, and the answers would differ from CoordExp's. The processor gets the limits of the training images' resize
    rule, so that the server resizes as training did. Raises CheckpointError if that rule has another factor than the
    processor.
    """
    _token_ids_of(GenerationConfig.from_pretrained(folder)).save_pretrained(folder)
    names = {"<|coord_*|>", *COORD_TOKENS}
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in names
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["extra_special_tokens"] = [one for one in settings.get("extra_special_tokens", []) if one not in names]
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if (rule := preparation.resize) is not None:
        processor = load_processor(folder)
        vision = processor.image_processor
        if vision.patch_size * vision.merge_size != rule.factor:
            raise CheckpointError(
                f"{folder}: trained on images whose sides are multiples of {rule.factor}, but its processor makes them "
                f"multiples of {vision.patch_size * vision.merge_size}; export without --for openai"
            )
        vision.size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
        processor.save_pretrained(folder)
        if not rule.is_settled():
            logger.warning(
                "%s: its image limits, %d and %d pixels, are closer than a step of %d pixels: servers resize as "
                "training did, but Detector, predict and evaluate would resize some images twice with this folder; "
                "give them the run's own, or an export without --for",
                folder, rule.min_pixels, rule.max_pixels, rule.factor,
            )  # fmt: skip


def merge_checkpoint(folder: Path, output: Path, base: Path | None = None, dtype: str | None = None) -> Path:
    """Write the base model of ``folder``, with its adapters and coordinate offsets merged in, to ``output``, with the
    card of ``folder``.

    ``base`` replaces the folder that the adapters name, and may have other weights, which is logged; ``dtype`` None
    keeps the run's number type, since another would change its answers. Each merged matrix is computed in float32 and
    rounded once, from the base's weights as the run read them or, for another ``dtype``, as they are stored. Raises as
    :func:`load_model`, and CheckpointError for other adapters.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not is_adapter_folder(folder):
        raise CheckpointError(
            f"{folder}: has no adapters to merge; a full model is copied by: coordexp model export FOLDER OUTPUT"
        )
    if base is None:
        return export_checkpoint(folder, output, dtype)
    if (problem := base_problem(folder, base)) is not None:
        logger.warning("%s: %s; merged all the same, as --base says", folder, problem)
    opened = Checkpoint.open(base)
    processor, _ = load_processor_and_vocab(opened)
    model = _with_adapters(folder, opened, getattr(torch, dtype or _own_dtype(folder, opened)))
    write_checkpoint(model, processor, read_card(folder), output)
    return output


def _own_dtype(folder: Path, weights: Path | Checkpoint) -> str:
    """The number type in which the checkpoint in ``folder`` answers: its run's, or else that of the stored weights."""
    training = read_card(folder).training
    if training is not None:
        return training.dtype
    return str(read_config(weights).dtype or "float32").removeprefix("torch.")


def write_checkpoint(model: Any, processor: Any, card: Card, folder: Path) -> None:
    """Write a plain checkpoint to a new folder. Raises OSError, for weights too, if the disk does not take it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # of a system's error, the library keeps the number in its text alone
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    give_ordinary_mode(folder)
    processor.save_pretrained(folder)
    write_card(replace(card, base=None), folder)
