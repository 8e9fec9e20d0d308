"""``training``: arguments of ``transformers.TrainingArguments`` by their own names, and a few of ours. And the
processes of a run: ``deepspeed`` and ``fsdp`` spread the learner over several, ``launch`` starts all of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from coordexp.config import trainer_names
from coordexp.config.strict import FilePath, ListOf, StrictModel


def _no_as_text(value: object) -> object:
    return "no" if value is False else value  # YAML 1.1 reads a bare `no` as false


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _resume(value: object) -> bool | str | None:
    if value is None or value is False:
        return None
    if value is True or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("expected null, true or a checkpoint folder")


def _count_or_share(value: float) -> float:
    if value > 1 and not value.is_integer():
        raise ValueError(f"{value:g} is neither a number of steps nor a share below 1; write a whole number")
    return value


def _arguments(value: str) -> str:
    for argument in value.replace(" ", "").split(","):
        name, equals, given = argument.partition("=")
        if not (name and equals and given) or "=" in given:
            raise ValueError(f"'{argument}' is no name=value; write 'name=value,name=value'")
    return value


# A number of optimizer steps or, below 1, a share of all.
Steps = Annotated[float, AfterValidator(_count_or_share)]
_Logger = Annotated[str, AfterValidator(trainer_names.one_of(frozenset(trainer_names.LOGGERS) | {"none"}, "logger"))]
Strategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_no_as_text)]


class TrainingConfig(StrictModel):
    """One run of the optimizer."""

    KEY_GROUPS: ClassVar[dict[str, str]] = {
        "the run": "output_dir run_name stop_within_s seed use_cpu max_steps num_train_epochs resume_from_checkpoint",
        "batches": "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "effective_batch_size",
        "learning rates": "learning_rate vit_lr aligner_lr coord_lr lr_scheduler_type lr_scheduler_kwargs warmup_steps",
        "the optimizer": "optim optim_args master_weights weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "max_grad_norm",
        "precision and memory": "bf16 fp16 tf32 gradient_checkpointing torch_empty_cache_steps full_determinism",
        "processes": "ddp_backend ddp_bucket_cap_mb ddp_timeout",
        "logs": "logging_dir logging_steps logging_first_step report_to disable_tqdm",
        "checkpoints": "save_strategy save_steps save_total_limit save_only_model save_on_each_node "
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "evaluation": "eval_strategy eval_steps eval_delay eval_on_start",
        "packing": "packing packing_buffer packing_min_fill_ratio packing_drop_last",
    }

    output_dir: FilePath = Field(examples=["outputs/run"], description="folder of checkpoints, logs and the manifest")
    run_name: str | None = Field(default=None, description="name shown by loggers; null takes output_dir")
    seed: int = Field(default=42, ge=0, description="seed of data order, dropout and rollouts")
    use_cpu: bool = Field(default=False, description="train on the CPU even where there is a GPU")

    max_steps: int = Field(default=-1, ge=-1, description="optimizer steps; -1 counts epochs instead")
    num_train_epochs: float = Field(
        default=1.0, gt=0, description="passes over the training data; read when max_steps is -1"
    )
    per_device_train_batch_size: int = Field(default=1, ge=1, description="samples per device and micro-step")
    per_device_eval_batch_size: int = Field(
        default=1, ge=1, description="of TrainingArguments; rollouts batch by rollout_matching.decode_batch_size alone"
    )
    gradient_accumulation_steps: int | None = Field(
        default=None, ge=1, description="micro-steps per optimizer step; null follows effective_batch_size, or is 1"
    )
    effective_batch_size: int | None = Field(
        default=None, ge=1, description="samples per optimizer step over all devices; sets gradient_accumulation_steps"
    )

    learning_rate: float = Field(default=5e-5, ge=0, description="peak learning rate")
    vit_lr: float | None = Field(
        default=None, ge=0, description="peak learning rate of the vision tower; null = learning_rate"
    )
    aligner_lr: float | None = Field(
        default=None,
        ge=0,
        description="peak learning rate of the mergers that map image features into the language model; null = "
        "learning_rate",
    )
    coord_lr: float | None = Field(
        default=None,
        ge=0,
        description="peak learning rate of the coordinate tokens' own rows (tuner.train_coord_rows); null = "
        "learning_rate",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's decay of the first moment")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Adam's decay of the second moment")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="Adam's term for numerical stability")
    max_grad_norm: float = Field(default=1.0, ge=0, description="gradient norm to clip to; 0 = no clipping")
    optim: Annotated[str, AfterValidator(trainer_names.one_of(trainer_names.OPTIMIZERS, "optimizer"))] = Field(
        default="adamw_torch", min_length=1, description="optimizer, by transformers' name"
    )
    optim_args: Annotated[str, AfterValidator(_arguments)] | None = Field(
        default=None, min_length=1, description="further arguments of the optimizer, as 'name=value,name=value'"
    )
    master_weights: Literal["float32"] | None = Field(
        default=None,
        description="the optimizer keeps and steps float32 copies of weights that are stored in bfloat16, so that no "
        "update is too small for them; with full training and model.dtype: bfloat16. null = it steps the weights "
        "themselves",
    )
    lr_scheduler_type: Annotated[str, AfterValidator(trainer_names.one_of(trainer_names.SCHEDULES, "schedule"))] = (
        Field(default="linear", min_length=1, description="learning-rate schedule, by transformers' name")
    )
    lr_scheduler_kwargs: dict[str, Any] | None = Field(default=None, description="further arguments of the schedule")
    warmup_steps: Steps = Field(
        default=0.0, ge=0, description="steps of linear warm-up; a number below 1 is a share of all steps"
    )

    bf16: bool = Field(default=False, description="autocast to bfloat16")
    fp16: bool = Field(default=False, description="autocast to float16 with loss scaling")
    tf32: bool | None = Field(default=None, description="TensorFloat-32 on NVIDIA GPUs; null leaves it to torch")
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, more time"
    )
    torch_empty_cache_steps: int | None = Field(
        default=None, ge=1, description="return unused device memory every N steps; null = never"
    )
    full_determinism: bool = Field(
        default=False, description="deterministic kernels only: slower; the same run twice gives the same weights"
    )
    ddp_backend: Literal["nccl", "gloo"] | None = Field(
        default=None, description="what processes talk over; null leaves it to the device"
    )
    ddp_bucket_cap_mb: int | None = Field(
        default=None, ge=1, description="size of the buckets in which gradients are summed; null leaves it to torch"
    )
    ddp_timeout: int = Field(default=1800, ge=1, description="seconds after which a collective call of torchrun fails")

    logging_dir: FilePath | None = Field(
        default=None, description="folder of TensorBoard's files; null = runs in output_dir"
    )
    logging_steps: Steps = Field(
        default=1.0, gt=0, description="log every N steps; a number below 1 is a share of all steps"
    )
    logging_first_step: bool = Field(default=False, description="log the first step too")
    report_to: Annotated[ListOf[_Logger], BeforeValidator(_one_as_list, json_schema_input_type=str | ListOf[str])] = (
        Field(default=("tensorboard",), description="loggers, by transformers' names; [] or none for none")
    )
    disable_tqdm: bool | None = Field(default=None, description="no progress bar; null leaves it to transformers")

    save_strategy: Strategy = Field(default="steps", description="when to save: no, steps, epoch")
    save_steps: Steps = Field(
        default=500.0, gt=0, description="save every N steps; a number below 1 is a share of all steps"
    )
    save_total_limit: int | None = Field(
        default=None, ge=1, description="keep the newest N checkpoints; null keeps all"
    )
    save_only_model: bool = Field(
        default=False,
        description="checkpoints without optimizer and scheduler: small, but training cannot go on from them",
    )
    save_on_each_node: bool = Field(
        default=False, description="every node writes checkpoints, for nodes without a file system in common"
    )
    load_best_model_at_end: bool = Field(
        default=False, description="end with the checkpoint whose metric_for_best_model is best"
    )
    metric_for_best_model: str | None = Field(
        default=None,
        min_length=1,
        description="figure of evaluation that says which checkpoint is best, e.g. rollout/f1",
    )
    greater_is_better: bool | None = Field(
        default=None, description="is more of metric_for_best_model better? null: yes, unless its name ends in loss"
    )
    # One plain validator: a failed union of types would be reported once per member.
    resume_from_checkpoint: Annotated[
        bool | str | None, PlainValidator(_resume, json_schema_input_type=bool | str | None)
    ] = Field(
        default=None, description="null starts anew; true goes on from the newest checkpoint; or a checkpoint folder"
    )
    stop_within_s: float = Field(
        default=300.0,
        gt=0,
        description="seconds for a run that Ctrl-C, SIGTERM or SIGUSR1 ends to finish its step and save; then it ends "
        "without",
    )
    eval_strategy: Strategy = Field(default="no", description="when to evaluate on val_jsonl: no, steps, epoch")
    eval_steps: Steps | None = Field(
        default=None,
        gt=0,
        description="evaluate every N steps; a number below 1 is a share of all steps; null = logging_steps",
    )

    eval_delay: float = Field(default=0.0, ge=0, description="steps or epochs before the first evaluation")
    eval_on_start: bool = Field(default=False, description="evaluate once before the first step")

    packing: bool = Field(default=True, description="train on packed rows of up to global_max_length tokens")
    packing_buffer: int = Field(default=512, ge=1, description="most segments that may wait for a later row")
    packing_min_fill_ratio: float = Field(
        default=0.65, gt=0, le=1, description="warn when a row is filled less than this"
    )
    packing_drop_last: bool = Field(
        default=True, description="segments that wait at the end are not trained on; must be true with packing"
    )

    def accumulation_steps(self, world_size: int = 1) -> int:
        """Micro-steps per optimizer step. ``effective_batch_size`` must divide evenly, which
        :func:`coordexp.config.check_world_size` verifies."""
        if self.effective_batch_size is not None:
            return max(1, self.effective_batch_size // (self.per_device_train_batch_size * world_size))
        return self.gradient_accumulation_steps or 1

    def hf_arguments(self, world_size: int = 1) -> dict[str, Any]:
        """Keyword arguments for ``transformers.TrainingArguments``; our own keys are left out."""
        values = self.model_dump(mode="python", exclude=OWN_KEYS)
        values["output_dir"] = str(self.output_dir)
        for key in ("warmup_steps", "logging_steps", "save_steps", "eval_steps", "eval_delay"):
            if values[key] is not None and float(values[key]).is_integer():
                values[key] = int(values[key])  # transformers wants counts as integers, shares as floats
        values["gradient_accumulation_steps"] = self.accumulation_steps(world_size)
        values["report_to"] = [name for name in self.report_to if name != "none"] or "none"
        return values


# Keys that transformers does not know. resume_from_checkpoint is one of its fields, but Trainer.train takes it.
OWN_KEYS = {
    "vit_lr",
    "aligner_lr",
    "coord_lr",
    "logging_dir",
    "master_weights",
    "effective_batch_size",
    "packing",
    "packing_buffer",
    "packing_min_fill_ratio",
    "packing_drop_last",
    "resume_from_checkpoint",
    "stop_within_s",
}


def _file_or_mapping(value: object) -> str | dict[str, Any] | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    raise ValueError("expected a JSON file or a mapping")


class DeepSpeedConfig(StrictModel):
    """DeepSpeed, by its own configuration."""

    enabled: bool = Field(default=False, description="train under DeepSpeed; needs the package deepspeed")
    # One plain validator: a failed union of types would be reported once per member.
    config: Annotated[
        str | dict[str, Any] | None,
        PlainValidator(_file_or_mapping, json_schema_input_type=str | dict[str, Any] | None),
    ] = Field(default=None, description="DeepSpeed's configuration: a JSON file, or the mapping itself")


class FSDPConfig(StrictModel):
    """Fully sharded data parallel training (FSDP2): parameters, gradients and optimizer are split over processes."""

    enabled: bool = Field(default=False, description="shard over the processes of torchrun")
    reshard_after_forward: bool = Field(
        default=True, description="free gathered parameters after the forward pass: less memory, more communication"
    )
    cpu_offload: bool = Field(default=False, description="keep shards in the host's memory: less memory, much slower")
    transformer_layer_cls_to_wrap: ListOf[str] | None = Field(
        default=None, description="class names of the layers that are sharded one by one; null takes the model's own"
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute activations layer by layer; excludes training.gradient_checkpointing"
    )
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] = Field(
        default="FULL_STATE_DICT", description="how checkpoints are written: gathered into one, or shard by shard"
    )


class LaunchConfig(StrictModel):
    """The servers of ``rollout_matching.vllm.server.servers`` and the learner, on one machine."""

    server: Literal["coordexp", "swift"] = Field(
        default="coordexp", description="the program behind each server: 'coordexp serve' or 'swift rollout'"
    )
    server_devices: ListOf[ListOf[int]] = Field(
        default=(), description="devices of each server, in the order of servers[]; [] runs them on the CPU"
    )
    learner_devices: ListOf[int] = Field(
        default=(), description="devices of the learner, one process each; [] runs one process on the CPU"
    )
    wait_s: float = Field(
        default=900.0, gt=0, description="seconds that servers, and the engines of each, may take to start"
    )
    log_dir: FilePath | None = Field(
        default=None, description="folder of one log file per process; null = logs in training.output_dir"
    )
