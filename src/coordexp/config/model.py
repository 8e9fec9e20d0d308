"""The checkpoint (``model``), what it is asked (``template``), and which of its weights are trained (``tuner``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.strict import ListOf, StrictModel


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
        description="attention of packed rows, and of their images in the vision tower: packed takes torch's varlen "
        "kernel on CUDA in half precision and computes segment by segment elsewhere; varlen and flex are torch's "
        "kernels of these names, flash the package flash-attn, all three on CUDA only; sdpa masks a full square",
    )


DEFAULT_PROMPT = (
    "Detect every object in the image. Answer with one JSON object that maps object_1, object_2, … to "
    '{"desc": …, "bbox_2d": [x1, y1, x2, y2]} or {"desc": …, "poly": [x, y, …]}, '
    "ordered from top to bottom, with coordinate tokens from <|coord_0|> to <|coord_999|>."
)


class TemplateConfig(StrictModel):
    """The text around the image."""

    system: str | None = Field(default=None, description="system message; null sends none")
    prompt: str | None = Field(default=None, description="user text beside the image; null takes the built-in prompt")


class TunerConfig(StrictModel):
    """Full fine-tuning or adapters, and the parts of the model that stay as they are."""

    train_type: Literal["full", "lora"] = Field(
        default="full", description="train the weights themselves, or low-rank adapters beside them"
    )
    lora_rank: int = Field(default=8, ge=1, description="rank of the adapters; read when train_type is 'lora'")
    lora_alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by lora_alpha / lora_rank")
    lora_dropout: float = Field(default=0.05, ge=0, lt=1, description="dropout on the adapters' input")
    use_dora: bool = Field(default=False, description="train each adapted matrix's magnitudes too (DoRA)")
    target_modules: ListOf[str] = Field(
        default=("all-linear",),
        min_length=1,
        description="modules that get adapters, by the end of their names; all-linear takes every linear layer of the "
        "parts that are not frozen, but the output head",
    )
    modules_to_save: ListOf[str] = Field(
        default=(), description="modules trained in full beside the adapters, by the end of their names"
    )
    freeze_vit: bool = Field(default=False, description="keep the vision tower as it is")
    freeze_aligner: bool = Field(
        default=False, description="keep the mergers that map image features into the language model as they are"
    )
    freeze_llm: bool = Field(default=False, description="keep the language model as it is")
    train_coord_rows: bool = Field(
        default=True,
        description="with lora: train the 1000 coordinate tokens' rows of embedding and head in full precision",
    )
