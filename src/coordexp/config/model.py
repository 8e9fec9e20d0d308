"""The checkpoint (``model``) and what it is asked (``template``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.strict import StrictModel


class ModelConfig(StrictModel):
    """The checkpoint and how it is run."""

    model: str = Field(
        min_length=1,
        examples=["checkpoints/demo-stage1"],
        description="folder of a Qwen3-VL checkpoint with the 1000 coordinate tokens",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="number type in which weights are loaded"
    )
    attn_implementation: Literal["packed", "flex", "varlen", "flash", "sdpa"] = Field(
        default="packed",
        description="attention of packed rows: packed takes torch's varlen kernel on CUDA in half precision and "
        "computes segment by segment elsewhere; varlen and flex are torch's kernels of these names, flash the package "
        "flash-attn, all three on CUDA only; sdpa masks a full square",
    )


class TemplateConfig(StrictModel):
    """The text around the image."""

    system: str | None = Field(default=None, description="system message; null sends none")
    prompt: str | None = Field(default=None, description="user text beside the image; null takes the built-in prompt")
