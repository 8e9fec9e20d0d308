"""All keys of a run: :class:`RunConfig` and its smaller sections. :mod:`coordexp.config.checks` holds the rules between
keys, which :func:`coordexp.config.load_config` applies."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from coordexp.config.base import (
    Count,
    FilePath,
    ListOf,
    NonNegative,
    Positive,
    Probability,
    Seconds,
    Share,
    StrictModel,
)
from coordexp.config.datasets import TrainFiles
from coordexp.config.objective import Sigma
from coordexp.config.rollout import FIELD_ORDER, RolloutMatchingConfig, Stage2ABConfig
from coordexp.home import below_home


class ModelConfig(StrictModel):
    """The checkpoint and how it is run."""

    model: Annotated[str, Field(min_length=1), AfterValidator(below_home)]
    """folder of a Qwen3-VL checkpoint with the 1000 coordinate tokens, or such a model of the Hugging Face hub:
    OWNER/NAME, or OWNER/NAME@REVISION"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """number type in which weights are loaded"""
    attn_implementation: Literal["packed", "varlen", "flash", "sdpa"] = "packed"
    """attention of packed rows, and of their images in the vision tower: packed takes torch's varlen kernel on CUDA in
    half precision and computes segment by segment elsewhere; varlen is torch's kernel of this name, flash the package
    flash-attn, both on CUDA only; sdpa masks a full square"""
    fused_kernels: Literal["auto", True, False] = "auto"
    """RMSNorm, SwiGLU, rotary embeddings and LayerNorm in one kernel each while training: auto does so on GPUs if the
    package liger-kernel is installed (pip install 'coordexp[kernels]'), true requires both, false keeps the layers as
    they are"""

    @property
    def fuses_on_gpu(self) -> bool:
        """Whether training on a GPU of this machine uses fused kernels."""
        if self.fused_kernels == "auto":
            return importlib.util.find_spec("liger_kernel") is not None
        return self.fused_kernels


DEFAULT_PROMPT = (
    "Detect every object in the image. Answer with one JSON object that maps object_1, object_2, … to "
    '{"desc": …, "bbox_2d": [x1, y1, x2, y2]} or {"desc": …, "poly": [x, y, …]}, '
    "ordered from top to bottom, with coordinate tokens from <|coord_0|> to <|coord_999|>."
)


class TemplateConfig(StrictModel):
    """The text around the image."""

    system: str | None = None
    """system message; null takes that of the run that wrote model.model, if one did, and else sends none"""
    prompt: str | None = None
    """user text next to the image; null takes that of the run that wrote model.model, if one did, and else the built-in
    prompt"""
    allow_prompt_change: bool = False
    """use this prompt, system message and custom.object_field_order, nulls included, also if model.model was trained
    with others; false refuses such a checkpoint"""


class TunerConfig(StrictModel):
    """Full fine-tuning or adapters, and the parts of the model that stay as they are."""

    train_type: Literal["full", "lora"] = "full"
    """train the weights themselves, or low-rank adapters next to them"""
    lora_rank: Count = 8
    """rank of the adapters; read when train_type is 'lora'"""
    lora_alpha: Positive = 32.0
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout on the adapters' input; above 0, each adapter keeps its own copy of its input until the backward pass"""
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
    """Random views of training images: stage 1 only. Each follows from (training.seed, epoch, the sample's index).
    Objects with less than 0.3 of their area in view are left out, and counted."""

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


class DataConfig(StrictModel):
    """The loader of samples."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """processes that read and encode samples; 0 reads in the trainer's own"""
    augment: AugmentConfig | None = None
    """random views of training images and their objects; null = images as they are"""
    repeat_threshold: Share | None = None
    """repeat images of rare classes (LVIS's t): an epoch has an image max(1, sqrt(t / f)) times, f being the share of
    images with its rarest class; null repeats nothing"""


class CoordSoftCEW1Config(StrictModel):
    """The coordinate loss of stage 1: at coordinate tokens, soft cross-entropy and Wasserstein-1 over the 1000 bins,
    and a gate, instead of cross-entropy over the vocabulary."""

    enabled: bool = False
    """train coordinates by these terms alone; false trains them by plain cross-entropy"""
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
    target_sigma: Sigma = 2.0
    """width of the Gaussian target, in bins"""
    target_truncate: Positive | None = None
    """radius in bins beyond which the target is zero; null keeps the whole Gaussian"""


FieldOrder = Literal["desc_first", "geometry_first"]
ObjectOrdering = Literal["sorted", "sorted_x", "random", "file"]


class CustomConfig(StrictModel):
    """The training variant and its datasets."""

    trainer_variant: Literal["stage2_rollout_aligned", "stage2_two_channel"] | None = None
    """null trains stage 1 (plain SFT), 'stage2_rollout_aligned' by rollout matching, 'stage2_two_channel' by rollout
    matching on some steps and self-context on the others"""
    train_jsonl: TrainFiles
    """JSONL of the training samples; or a list of such files, each a path, or a path with a weight"""
    val_jsonl: FilePath | None = None
    """JSONL of the validation samples; null evaluates nothing"""
    train_sample_limit: Count | None = None
    """use only the first N training samples, of each file; null = all"""
    val_sample_limit: Count | None = None
    """use only the first N validation samples; null = all"""
    object_field_order: FieldOrder = FIELD_ORDER
    """order of the fields within one object's text"""
    object_ordering: ObjectOrdering = "sorted"
    """objects of an answer from top to bottom then left to right, from left to right then top to bottom (sorted_x),
    shuffled again each epoch, or as in the file"""
    coord_soft_ce_w1: CoordSoftCEW1Config | None = None
    """coordinate loss of stage 1; null = off. Stage 2 declares its losses in a pipeline instead"""

    @property
    def data_paths(self) -> dict[str, Path | None]:
        """Every JSONL of the run, by its key."""
        many = len(self.train_jsonl) > 1
        train = {f"train_jsonl[{at}]" if many else "train_jsonl": file.path for at, file in enumerate(self.train_jsonl)}
        return {f"custom.{key}": path for key, path in {**train, "val_jsonl": self.val_jsonl}.items()}


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _resume(value: object) -> bool | str | None:
    if value is None or value is False:
        return None
    if isinstance(value, str) and value.lower() in ("no", "off", "yes", "on"):
        raise ValueError(f"{value} is text in YAML; write true or null (./{value} for a folder of that name)")
    if value is True:
        return True
    if isinstance(value, str) and value.strip():
        return below_home(value)
    raise ValueError("expected null, true or a checkpoint folder")


def _count_or_share(value: float) -> float:
    if value > 1 and not value.is_integer():
        raise ValueError(f"{value:g} is neither a number of steps nor a share below 1; write a whole number")
    return value


def _file_or_mapping(value: object) -> str | dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip():
        return below_home(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    raise ValueError("expected a JSON file or a mapping")


# A number of optimizer steps or, below 1, a share of all.
Steps = Annotated[float, Field(gt=0), AfterValidator(_count_or_share)]
Strategy = Literal["no", "steps", "epoch"]
# One plain validator each: a failed union of types would be reported once per member.
_Resume = Annotated[bool | str | None, PlainValidator(_resume, json_schema_input_type=bool | str | None)]
_JSON = Annotated[
    str | dict[str, Any] | None, PlainValidator(_file_or_mapping, json_schema_input_type=str | dict[str, Any] | None)
]


class TrainingConfig(StrictModel):
    """One run of the optimizer."""

    output_dir: FilePath
    """folder of checkpoints, logs and the manifest"""
    run_name: str | None = None
    """name shown by loggers; null takes output_dir"""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42
    """seed of data order, dropout and rollouts"""
    use_cpu: bool = False
    """train on the CPU even where there is a GPU"""

    max_steps: Annotated[int, Field(ge=-1)] = -1
    """optimizer steps; -1 counts epochs instead"""
    num_train_epochs: Positive = 1.0
    """passes over the training data; read when max_steps is -1"""
    per_device_train_batch_size: Count = 1
    """samples per device and micro-step"""
    per_device_eval_batch_size: Count = 1
    """not used: rollouts of training and evaluation batch by rollout_matching.decode_batch_size alone"""
    gradient_accumulation_steps: Count | None = None
    """micro-steps per optimizer step; null follows effective_batch_size, or is 1"""
    effective_batch_size: Count | None = None
    """samples per optimizer step over all devices; sets gradient_accumulation_steps"""

    learning_rate: NonNegative = 5e-5
    """peak learning rate"""
    vit_lr: NonNegative | None = None
    """peak learning rate of the vision tower; null = learning_rate"""
    aligner_lr: NonNegative | None = None
    """peak learning rate of the mergers that map image features into the language model; null = learning_rate"""
    coord_lr: NonNegative | None = None
    """peak learning rate of the coordinate tokens' own rows (tuner.train_coord_rows); null = learning_rate"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the first moment"""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay of the second moment"""
    adam_epsilon: Positive = 1e-8
    """Adam's term for numerical stability"""
    max_grad_norm: NonNegative = 1.0
    """gradient norm to clip to; 0 = no clipping"""
    optim: Annotated[str, Field(min_length=1)] = "adamw_torch"
    """optimizer, by transformers' name"""
    master_weights: Literal["float32"] | None = None
    """the optimizer keeps and steps float32 copies of weights that are stored in bfloat16, so that no update is too
    small for them; with full training and model.dtype: bfloat16. null = it steps the weights themselves"""
    lr_scheduler_type: Annotated[str, Field(min_length=1)] = "linear"
    """learning-rate schedule, by transformers' name"""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """further arguments of the schedule"""
    warmup_steps: Annotated[float, Field(ge=0), AfterValidator(_count_or_share)] = 0.0
    """steps of linear warm-up; a number below 1 is a share of all steps"""

    bf16: bool = False
    """autocast to bfloat16"""
    fp16: bool = False
    """autocast to float16 with loss scaling"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    gradient_checkpointing_every: Count | Literal["auto"] = 1
    """recompute those of every N-th layer only, and keep the others': 1 = of all layers, auto = of as few layers as the
    estimate of memory allows on the GPU, maybe none; with gradient_checkpointing"""
    full_determinism: bool = False
    """deterministic kernels only: slower; the same run twice gives the same weights"""
    ddp_timeout: Annotated[int, Field(ge=1, le=10**9)] = 1800
    """seconds after which a collective call of torchrun fails; by NCCL at most 600"""

    logging_steps: Steps = 1.0
    """log every N steps; a number below 1 is a share of all steps"""
    report_to: Annotated[ListOf[str], BeforeValidator(_one_as_list, json_schema_input_type=str | ListOf[str])] = (
        "tensorboard",
    )
    """loggers, by transformers' names; [] or none for none"""

    save_strategy: Strategy = "steps"
    """when to save: no, steps, epoch"""
    save_steps: Steps = 500.0
    """save every N steps; a number below 1 is a share of all steps"""
    save_total_limit: Count | None = None
    """keep N checkpoints: the newest, the best one by metric_for_best_model (with 1, both), then the next newest; null
    keeps all"""
    save_only_model: bool = False
    """checkpoints without optimizer and scheduler: small, but training cannot resume from them"""
    load_best_model_at_end: bool = False
    """end with the checkpoint that has the best metric_for_best_model"""
    metric_for_best_model: Annotated[str, Field(min_length=1)] | None = None
    """figure of evaluation that decides which checkpoint is best, e.g. rollout/f1. More is better, but for losses and
    shares of faults (lost_rate …)"""
    resume_from_checkpoint: _Resume = None
    """null starts from model.model; true resumes from the newest checkpoint; or a checkpoint folder"""
    resume_with_changes: bool = False
    """resume although keys that change what is learned differ from the checkpoint's; the manifest records them"""
    overwrite_output_dir: bool = False
    """start a new run in an output_dir with the results of another one, whose model and checkpoints are deleted"""
    stop_within_s: Seconds = 300.0
    """seconds that a run ended by Ctrl-C, SIGTERM or SIGUSR1 has to finish its step and save; then it ends without"""

    eval_strategy: Strategy = "no"
    """when to evaluate on val_jsonl: no, steps, epoch"""
    eval_steps: Steps | None = None
    """evaluate every N steps; a number below 1 is a share of all steps; null = logging_steps"""
    eval_on_start: bool = False
    """evaluate once before the first step"""

    packing: bool = True
    """train on packed rows of up to global_max_length tokens"""
    packing_buffer: Count = 512
    """most segments that may wait for a later row"""
    packing_min_fill_ratio: Share = 0.65
    """warn when a row is filled less than this"""
    packing_drop_last: Literal[True] = True
    """segments that wait at the end are not trained on: no step is added for them"""

    def accumulation_steps(self, world_size: int = 1) -> int:
        """Micro-steps per optimizer step. ``effective_batch_size`` must divide evenly, which
        :func:`coordexp.config.check_world_size` verifies."""
        if self.effective_batch_size is not None:
            return max(1, self.effective_batch_size // (self.per_device_train_batch_size * world_size))
        return self.gradient_accumulation_steps or 1

    def samples_per_step(self, world_size: int) -> int:
        """Samples of an optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.accumulation_steps(world_size) * world_size

    def hf_arguments(self, world_size: int = 1) -> dict[str, Any]:
        """Keyword arguments for ``transformers.TrainingArguments``; our own keys are left out."""
        values = self.model_dump(mode="python", exclude=OWN_KEYS)
        values["output_dir"] = str(self.output_dir)
        values["run_name"] = self.run_name or values["output_dir"]  # without one, W&B and MLflow draw a name
        for key in ("warmup_steps", "logging_steps", "save_steps", "eval_steps"):
            if values[key] is not None and float(values[key]).is_integer():
                values[key] = int(values[key])  # transformers wants counts as integers, shares as floats
        values["gradient_accumulation_steps"] = self.accumulation_steps(world_size)
        values["report_to"] = [name for name in self.report_to if name != "none"] or "none"
        values["greater_is_better"] = self.more_is_better
        return values

    @property
    def more_is_better(self) -> bool | None:
        """Of ``metric_for_best_model``; None without one."""
        if self.metric_for_best_model is None:
            return None
        of_interval = self.metric_for_best_model.removesuffix("_low").removesuffix("_high")
        return not of_interval.endswith(LESS_IS_BETTER)


# How the names of figures end of which less is better; so do those of their intervals, before _low or _high.
LESS_IS_BETTER = (
    *("loss", "lost_rate", "false_gained_rate", "duplicate_rate", "giant_rate"),
    *("invalid_rate", "truncated_rate", "terminated_rate", "empty_rate"),
)
# Keys that transformers does not know. resume_from_checkpoint is one of its fields, but Trainer.train takes it.
OWN_KEYS = {
    *("vit_lr", "aligner_lr", "coord_lr", "master_weights", "effective_batch_size", "packing"),
    *("packing_buffer", "packing_min_fill_ratio", "packing_drop_last", "resume_from_checkpoint", "stop_within_s"),
    *("gradient_checkpointing_every", "resume_with_changes", "overwrite_output_dir"),
}


class DeepSpeedConfig(StrictModel):
    """DeepSpeed, by its own configuration."""

    enabled: bool = False
    """train under DeepSpeed; needs the package deepspeed"""
    config: _JSON = None
    """DeepSpeed's configuration: a JSON file, or the mapping itself"""


class FSDPConfig(StrictModel):
    """Fully sharded data parallel training (FSDP2): parameters, gradients and optimizer are split over processes."""

    enabled: bool = False
    """shard over the processes of torchrun"""
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] = "FULL_STATE_DICT"
    """how checkpoints are written: gathered into one, in the main memory of the first process, or shard by shard, for a
    resume alone. The model at the end of the run is always gathered"""


class LaunchConfig(StrictModel):
    """The servers of ``rollout_matching.vllm.server.servers`` and the trainer, on one machine."""

    server: Literal["coordexp", "swift"] = "coordexp"
    """the program of each server: 'coordexp serve' or 'swift rollout'"""
    server_devices: ListOf[ListOf[int]] = ()
    """devices of each server, in the order of servers[]; [] runs them on the CPU"""
    learner_devices: ListOf[int] = ()
    """devices of the trainer, one process each; [] runs one process on the CPU"""
    wait_s: Seconds = 900.0
    """seconds that servers, and the engines of each, may take to start"""


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
