"""All keys of a run: :class:`RunConfig` and its smaller sections. :mod:`coordexp.config.checks` holds the rules between
keys, which :func:`coordexp.config.load_config` applies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coordexp.config.base import Count, FilePath, ListOf, NonNegative, Positive, Probability, Share, StrictModel
from coordexp.config.rollout import FIELD_ORDER, RolloutMatchingConfig, Stage2ABConfig, resolved_rollout
from coordexp.config.training import DeepSpeedConfig, FSDPConfig, LaunchConfig, TrainingConfig


class ModelConfig(StrictModel):
    """The checkpoint and how it is run."""

    model: Annotated[str, Field(min_length=1)]
    """folder of a Qwen3-VL checkpoint with the 1000 coordinate tokens"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """number type in which weights are loaded"""
    attn_implementation: Literal["packed", "varlen", "flash", "sdpa"] = "packed"
    """attention of packed rows, and of their images in the vision tower: packed takes torch's varlen kernel on CUDA in
    half precision and computes segment by segment elsewhere; varlen is torch's kernel of this name, flash the package
    flash-attn, both on CUDA only; sdpa masks a full square"""


DEFAULT_PROMPT = (
    "Detect every object in the image. Answer with one JSON object that maps object_1, object_2, … to "
    '{"desc": …, "bbox_2d": [x1, y1, x2, y2]} or {"desc": …, "poly": [x, y, …]}, '
    "ordered from top to bottom, with coordinate tokens from <|coord_0|> to <|coord_999|>."
)


class TemplateConfig(StrictModel):
    """The text around the image."""

    system: str | None = None
    """system message; null sends none"""
    prompt: str | None = None
    """user text next to the image; null takes the built-in prompt"""


class TunerConfig(StrictModel):
    """Full fine-tuning or adapters, and the parts of the model that stay as they are."""

    train_type: Literal["full", "lora"] = "full"
    """train the weights themselves, or low-rank adapters next to them"""
    lora_rank: Count = 8
    """rank of the adapters; read when train_type is 'lora'"""
    lora_alpha: Positive = 32.0
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """dropout on the adapters' input"""
    use_dora: bool = False
    """train each adapted matrix's magnitudes too (DoRA)"""
    target_modules: Annotated[ListOf[str], Field(min_length=1)] = ("all-linear",)
    """modules that get adapters, by the end of their names; all-linear takes every linear layer of the parts that are
    not frozen, except the output head"""
    modules_to_save: ListOf[str] = ()
    """modules trained in full next to the adapters, by the end of their names"""
    freeze_vit: bool = False
    """keep the vision tower as it is"""
    freeze_aligner: bool = False
    """keep the mergers that map image features into the language model as they are"""
    freeze_llm: bool = False
    """keep the language model as it is"""
    train_coord_rows: bool = True
    """with lora: train the 1000 coordinate tokens' rows of embedding and head in full precision"""


class AugmentConfig(StrictModel):
    """Random views of training images: stage 1 only. Each follows from (training.seed, epoch, the sample's index)."""

    horizontal_flip: Probability = 0.0
    """probability of a mirror image"""
    vertical_flip: Probability = 0.0
    """probability of an image upside down"""
    scale: Annotated[ListOf[Annotated[float, Field(ge=0.1, le=10)]], Field(min_length=2, max_length=2)] = (1.0, 1.0)
    """least and largest factor by which the content grows; the image keeps its size: content that no longer fits is cut
    off, and smaller content gets a grey border"""
    crop: Share = 1.0
    """least share of each side that a random window keeps; 1 = the whole image"""
    colour: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """brightness, contrast and saturation change by up to this share"""
    min_visible: Share = 0.3
    """objects with less than this share of their area in view are left out, and counted"""


class DataConfig(StrictModel):
    """The loader of samples."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """processes that read and encode samples; 0 reads in the trainer's own"""
    augment: AugmentConfig | None = None
    """random views of training images and their objects; null = images as they are"""


class CoordSoftCEW1Config(StrictModel):
    """The coordinate loss of stage 1: at coordinate tokens, soft cross-entropy and Wasserstein-1 over the 1000 bins in
    addition to hard cross-entropy."""

    enabled: bool = False
    """add these terms; false trains coordinates by plain cross-entropy"""
    ce_weight: NonNegative = 0.0
    """weight of hard cross-entropy at coordinate tokens"""
    soft_ce_weight: NonNegative = 1.0
    """weight of soft cross-entropy against the Gaussian target"""
    w1_weight: NonNegative = 1.0
    """weight of the Wasserstein-1 distance to the target"""
    gate_weight: NonNegative = 1.0
    """weight of the penalty on mass outside the coordinate tokens at coordinate positions"""
    text_gate_weight: NonNegative = 0.0
    """weight of the penalty on coordinate-token mass at text positions"""
    temperature: Positive = 1.0
    """softmax temperature of the coordinate distribution"""
    target_sigma: Positive = 2.0
    """width of the Gaussian target, in bins"""
    target_truncate: Positive | None = None
    """radius in bins beyond which the target is zero; null keeps the whole Gaussian"""


class CustomConfig(StrictModel):
    """The training variant and its datasets."""

    trainer_variant: Literal["stage2_rollout_aligned", "stage2_two_channel"] | None = None
    """null trains stage 1 (plain SFT), 'stage2_rollout_aligned' by rollout matching, 'stage2_two_channel' by rollout
    matching on some steps and self-context on the others"""
    train_jsonl: FilePath
    """JSONL of the training samples"""
    val_jsonl: FilePath | None = None
    """JSONL of the validation samples; null evaluates nothing"""
    train_sample_limit: Count | None = None
    """use only the first N training samples; null = all"""
    val_sample_limit: Count | None = None
    """use only the first N validation samples; null = all"""
    object_field_order: Literal["desc_first", "geometry_first"] = FIELD_ORDER
    """order of the fields within one object's text"""
    object_ordering: Literal["sorted", "random", "file"] = "sorted"
    """objects of an answer from top to bottom then left to right, shuffled again each epoch, or as in the file"""
    coord_soft_ce_w1: CoordSoftCEW1Config | None = None
    """coordinate loss of stage 1; null = off. Stage 2 declares its losses in a pipeline instead"""


class RunConfig(StrictModel):
    """One run, fully determined. Parts of the program get sections or values of it, never this tree."""

    model: ModelConfig
    """the checkpoint to train"""
    template: TemplateConfig = TemplateConfig()
    """the text around the image"""
    data: DataConfig = DataConfig()
    """the loader of samples"""
    custom: CustomConfig
    """the training variant and its datasets"""
    tuner: TunerConfig = TunerConfig()
    """which weights are trained, and in what form"""
    training: TrainingConfig
    """the run of the optimizer"""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """training under DeepSpeed"""
    fsdp: FSDPConfig = FSDPConfig()
    """fully sharded data parallel training"""
    global_max_length: Count
    """capacity of a packed row, and the longest sample, in tokens"""
    rollout_matching: RolloutMatchingConfig | None = None
    """rollouts, matching and objective of stage 2; evaluation of stage 1 decodes by it too"""
    stage2_ab: Stage2ABConfig | None = None
    """two-channel training"""
    launch: LaunchConfig = LaunchConfig()
    """the processes that coordexp launch starts"""


class AnswerConfig(StrictModel):
    """All that inference reads of a configuration; ``rollout_matching`` is resolved."""

    model: ModelConfig
    template: TemplateConfig
    rollout_matching: RolloutMatchingConfig
    global_max_length: Count
    use_cpu: bool
    seed: int

    @classmethod
    def of_run(cls, run: RunConfig) -> AnswerConfig:
        """How a checkpoint answers in the run's evaluation."""
        return cls(
            model=run.model,
            template=run.template,
            rollout_matching=resolved_rollout(run),
            global_max_length=run.global_max_length,
            use_cpu=run.training.use_cpu,
            seed=run.training.seed,
        )


def rollout_contract(config: RunConfig) -> dict[str, Any]:
    """``rollout_matching_cfg`` of the contract: :func:`resolved_rollout` as plain values, with the keys of packing and
    of the order of objects and fields."""
    training, custom = config.training, config.custom
    return {
        **resolved_rollout(config).model_dump(mode="json"),
        "packing_enabled": training.packing,
        "packing_length": config.global_max_length,
        "packing_buffer": training.packing_buffer,
        "packing_min_fill_ratio": training.packing_min_fill_ratio,
        "packing_drop_last": training.packing_drop_last,
        "object_ordering": custom.object_ordering,
        "object_field_order": custom.object_field_order,
    }
