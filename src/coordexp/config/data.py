"""Where samples come from, and random views of them (``data``); what they look like, and which training takes them
(``custom``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from coordexp.config.strict import FilePath, ListOf, StrictModel
from coordexp.settings import FIELD_ORDER

TrainerVariant = Literal["stage2_rollout_aligned", "stage2_two_channel"]


Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(StrictModel):
    """Random views of training images: stage 1 only. Each follows from (training.seed, epoch, the sample's place)."""

    horizontal_flip: Probability = Field(default=0.0, description="probability of a mirror image")
    vertical_flip: Probability = Field(default=0.0, description="probability of an image upside down")
    scale: Annotated[ListOf[Annotated[float, Field(ge=0.1, le=10)]], Field(min_length=2, max_length=2)] = Field(
        default=(1.0, 1.0),
        description="least and largest factor by which the content grows; the image keeps its size: what grows beyond "
        "it is cut off, what shrinks stands before grey",
    )
    crop: float = Field(
        default=1.0, gt=0, le=1, description="least share of each side that a random window keeps; 1 = the whole image"
    )
    colour: float = Field(
        default=0.0, ge=0, le=0.9, description="brightness, contrast and saturation change by up to this share"
    )
    min_visible: float = Field(
        default=0.3, gt=0, le=1, description="an object of which less of its area is in view is left out, and counted"
    )


class DataConfig(StrictModel):
    """The loader of samples."""

    num_workers: int = Field(
        default=0, ge=0, description="processes that read and encode samples; 0 reads in the trainer's own"
    )
    augment: AugmentConfig | None = Field(
        default=None, description="random views of training images and their objects; null = images as they are"
    )


class CoordSoftCEW1Config(StrictModel):
    """The coordinate loss of stage 1: at coordinate tokens, soft cross-entropy and Wasserstein-1 over the 1000 bins
    beside hard cross-entropy."""

    enabled: bool = Field(default=False, description="add these terms; false trains coordinates by plain cross-entropy")
    ce_weight: float = Field(default=0.0, ge=0, description="weight of hard cross-entropy at coordinate tokens")
    soft_ce_weight: float = Field(
        default=1.0, ge=0, description="weight of soft cross-entropy against the Gaussian target"
    )
    w1_weight: float = Field(default=1.0, ge=0, description="weight of the Wasserstein-1 distance to the target")
    gate_weight: float = Field(
        default=1.0,
        ge=0,
        description="weight of the penalty on mass outside the coordinate tokens at coordinate positions",
    )
    text_gate_weight: float = Field(
        default=0.0, ge=0, description="weight of the penalty on coordinate-token mass at text positions"
    )
    temperature: float = Field(default=1.0, gt=0, description="softmax temperature of the coordinate distribution")
    target_sigma: float = Field(default=2.0, gt=0, description="width of the Gaussian target, in bins")
    target_truncate: float | None = Field(
        default=None, gt=0, description="radius in bins beyond which the target is zero; null keeps the whole Gaussian"
    )


class CoordTokensConfig(StrictModel):
    """Coordinates as tokens of their own, which is all that this project knows."""

    enabled: Literal[True] = Field(default=True, description="coordinates are written as the 1000 coordinate tokens")
    skip_bbox_norm: Literal[True] = Field(
        default=True, description="the dataset's coordinates are bins 0..999 already, and are not scaled again"
    )


class CustomConfig(StrictModel):
    """The training variant and its datasets."""

    trainer_variant: TrainerVariant | None = Field(
        default=None,
        description="null trains stage 1 (plain SFT), 'stage2_rollout_aligned' by rollout matching, "
        "'stage2_two_channel' by rollout matching on some steps and self-context on the others",
    )
    train_jsonl: FilePath = Field(examples=["data/train.jsonl"], description="JSONL of the training samples")
    val_jsonl: FilePath | None = Field(
        default=None, description="JSONL of the validation samples; null evaluates nothing"
    )
    train_sample_limit: int | None = Field(
        default=None, ge=1, description="use only the first N training samples; null = all"
    )
    val_sample_limit: int | None = Field(
        default=None, ge=1, description="use only the first N validation samples; null = all"
    )
    object_field_order: Literal["desc_first", "geometry_first"] = Field(
        default=FIELD_ORDER, description="order of the fields within one object's text"
    )
    object_ordering: Literal["sorted", "random", "file"] = Field(
        default="sorted",
        description="objects of an answer from top to bottom then left to right, shuffled anew each epoch, or as in "
        "the file",
    )
    emit_norm: Literal["none"] = Field(default="none", description="coordinates are written as the dataset has them")
    json_format: Literal["standard"] = Field(default="standard", description="answers are one line of plain JSON")
    coord_tokens: CoordTokensConfig = Field(default=CoordTokensConfig(), description="how coordinates are written")
    coord_soft_ce_w1: CoordSoftCEW1Config | None = Field(
        default=None,
        description="coordinate loss of stage 1; null = off. Stage 2 declares its losses in a pipeline instead",
    )
