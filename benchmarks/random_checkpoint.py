"""A checkpoint of a published Qwen3-VL's size with random weights and Qwen's own tokenizer.

A module of the other scripts; running it does nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the sizes and the tokenizer are the tests'

BLOCK = 1 << 22  # random numbers that every tensor is filled with, from a place of its own
REAL_LIMITS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # pixels, as the published processor has them
PUBLISHED_ROWS = 151_936  # of the embedding, without coordinate tokens, padded


def write_checkpoint(folder: Path, size: str, layers: int | None = None, *, coord_tokens: bool = False) -> None:
    """Write bfloat16 weights and the files of a published checkpoint to the new ``folder``. ``layers``: of the language
    model, instead of all; the vision tower is shortened in proportion. ``coord_tokens``: with their rows and tokens."""
    # In a process of its own: a new process counts the memory of the one that started it in its own peak.
    built = multiprocessing.get_context("spawn").Process(target=_write, args=(folder, size, layers, coord_tokens))
    built.start()
    built.join()
    if built.exitcode:
        raise SystemExit(f"{folder}: the checkpoint was not written (exit code {built.exitcode})")


def _write(folder: Path, size: str, layers: int | None, coord_tokens: bool) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from coordexp.modeling.tiny import CHAT_TEMPLATE
    from support.qwen_sizes import SIZES, qwen3_vl_config
    from support.qwen_tokenizer import qwen_tokenizer

    folder.mkdir()
    config: Any = qwen3_vl_config(size, layers)
    if layers is not None:
        vision, whole = config.vision_config, SIZES[size][2]
        vision.depth = max(3, round(vision.depth * layers / whole))
        vision.deepstack_visual_indexes = [vision.depth * part // 4 for part in (1, 2, 3)]
    if not coord_tokens:
        config.text_config.vocab_size = PUBLISHED_ROWS
    config.save_pretrained(folder)
    tokenizer = qwen_tokenizer(coord_tokens=coord_tokens)
    tokenizer.chat_template = CHAT_TEMPLATE
    images: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": REAL_LIMITS}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**images),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in Qwen3VLForConditionalGeneration(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(BLOCK, generator=generator)).bfloat16()
    weights = {}
    for name, shape in shapes.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif "norm" in name:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            shift = int(torch.randint(0, BLOCK, (1,), generator=generator))
            times = -(-shape.numel() // BLOCK)
            weights[name] = noise.roll(shift).repeat(times)[: shape.numel()].reshape(shape).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
