"""The published sizes of Qwen3-VL, with 1000 coordinate tokens. No weights."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3VLConfig

VOCABULARY, IMAGE_TOKEN, VISION_START, VISION_END = 152_670, 151_655, 151_652, 151_653
# hidden, intermediate, layers, heads, tied; the vision tower's hidden, intermediate, depth and deepstack layers
SIZES: dict[str, tuple[int, int, int, int, bool, tuple[int, int, int, list[int]]]] = {
    "2B": (2048, 6144, 28, 16, True, (1024, 4096, 24, [5, 11, 17])),
    "4B": (2560, 9728, 36, 32, True, (1024, 4096, 24, [5, 11, 17])),
    "8B": (4096, 12288, 36, 32, False, (1152, 4304, 27, [8, 16, 24])),
}


def qwen3_vl_config(size: str, layers: int | None = None) -> Qwen3VLConfig:
    """transformers' configuration of one size; ``layers``: of the language model, instead of all."""
    hidden, intermediate, all_layers, heads, tied, (vision, vision_intermediate, depth, deepstack) = SIZES[size]
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 128,
        "num_hidden_layers": layers or all_layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "tie_word_embeddings": tied, "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                            "rope_theta": 5_000_000},
    }  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": vision, "intermediate_size": vision_intermediate, "depth": depth, "num_heads": 16,
        "patch_size": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deepstack,
    }  # fmt: skip
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],  # vLLM takes a checkpoint without it for a pooling model
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=tied,
        image_token_id=IMAGE_TOKEN,
        video_token_id=151_656,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
