"""A tiny Qwen3-VL checkpoint with random weights: the real architecture at about 4 M parameters.

transformers, vLLM and ms-swift load the folder like any Qwen3-VL checkpoint. The demo and the tests run on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, set_seed

from coordexp.checkpoints.card import UNTRAINED
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.coords import COORD_TOKENS, TURN_END, serialize_objects
from coordexp.data.scenes import COLOURS, SHAPES
from coordexp.modeling.expand_vocab import smooth_coord_rows
from coordexp.modeling.load import write_checkpoint
from coordexp.records import GTObject

# Qwen's special tokens, so that the chat format and every tool that looks for them work unchanged.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", TURN_END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# One token per structural step, and none that spans two entries: a rollout's entries then end where tokens end, so the
# text that stage 2 appends is tokenised as the model itself would have written it.
_SPLIT = (
    r', "object_|"object_|": \{"desc": "|": \{"bbox_2d": \["|": \{"poly": \["'
    r'|", "bbox_2d": \["|", "poly": \["|"\], "desc": "|"\]\}|"\}|", "|\d| ?[A-Za-z]+|[^\sA-Za-z\d]|\s+'
)


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Sizes of the tiny model. Every attention kernel supports ``head_dim`` 64."""

    hidden: int = 192
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 576
    vision_hidden: int = 128
    vision_depth: int = 4
    vision_heads: int = 4
    vision_mlp: int = 384
    patch: int = 8
    min_pixels: int = 64 * 64
    max_pixels: int = 448 * 448
    tied: bool = True  # the language head is the embedding matrix
    vocab_rows: int = 0  # of the embedding matrix; at least one for each token


def build_tokenizer(coord_tokens: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred merges, Qwen's special tokens, and the 1000 coordinate tokens."""

    def corpus() -> Iterator[str]:
        # Enough text of the output format for BPE to make each structural step one token.
        names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES] + ["RBC", "WBC", "Platelets", "person"]
        for order in ("desc_first", "geometry_first"):
            for name in names:
                scene = [GTObject(name, "bbox_2d", (1, 2, 3, 4)), GTObject(name, "poly", (1, 2, 3, 4, 5, 6))]
                text = serialize_objects(scene * 6, order)
                for coordinate in COORD_TOKENS[1:7]:
                    text = text.replace(coordinate, "\0")
                yield from text.split("\0")
        for _ in range(4):
            yield DEFAULT_PROMPT
            yield "system\n user\n assistant\n Detect every object."

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=8192,
    )
    added = ["<|coord_*|>", *COORD_TOKENS] if coord_tokens else []
    tokenizer.add_special_tokens({"extra_special_tokens": [*SPECIAL_TOKENS, *added]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_checkpoint(folder: Path, seed: int = 0, spec: TinySpec | None = None, coord_tokens: bool = True) -> Path:
    """Write a random tiny Qwen3-VL checkpoint (model, tokenizer, processor, chat template) to ``folder``.

    ``coord_tokens=False`` leaves the coordinate tokens out, as Qwen's own checkpoints do.
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    spec = spec or TinySpec()
    tokenizer = build_tokenizer(coord_tokens=coord_tokens)
    token = tokenizer.get_vocab()
    third = spec.head_dim // 2 // 3
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": max(len(tokenizer), spec.vocab_rows),
            "hidden_size": spec.hidden,
            "intermediate_size": spec.mlp,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [spec.head_dim // 2 - 2 * third, third, third],
                "mrope_interleaved": True,
            },
            "pad_token_id": token["<|endoftext|>"],
            "eos_token_id": token[TURN_END],
            "tie_word_embeddings": spec.tied,
        },
        vision_config={
            "depth": spec.vision_depth,
            "hidden_size": spec.vision_hidden,
            "intermediate_size": spec.vision_mlp,
            "num_heads": spec.vision_heads,
            "patch_size": spec.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": spec.hidden,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1],
        },
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        # PreTrainedConfig takes any key; generation reads these two from the top level.
        pad_token_id=token["<|endoftext|>"],  # pyright: ignore[reportCallIssue]
        eos_token_id=token[TURN_END],  # pyright: ignore[reportCallIssue]
        tie_word_embeddings=spec.tied,
    )
    set_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    if coord_tokens:
        rows = smooth_coord_rows(spec.hidden, 0.02, torch.Generator().manual_seed(seed))
        coord_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(COORD_TOKENS)))
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight")[coord_ids] = rows
    pixels = {"shortest_edge": spec.min_pixels, "longest_edge": spec.max_pixels}
    vision = {"patch_size": spec.patch, "merge_size": 2, "temporal_patch_size": 2, "size": pixels}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**vision),
        chat_template=CHAT_TEMPLATE,
    )
    write_checkpoint(model, processor, UNTRAINED, folder)
    return folder
