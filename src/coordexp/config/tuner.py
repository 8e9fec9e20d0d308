"""``tuner``: which weights are trained, and in what form."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.strict import ListOf, StrictModel


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
