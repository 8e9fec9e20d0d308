"""``training``: arguments of ``transformers.TrainingArguments`` by their own names, and a few of ours. And the
processes of a run: ``deepspeed`` and ``fsdp`` spread the trainer over several, ``launch`` starts all of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from coordexp.config.base import Count, FilePath, ListOf, NonNegative, Positive, Share, StrictModel


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
            raise ValueError(f"'{argument}' is not name=value; write 'name=value,name=value'")
    return value


def _file_or_mapping(value: object) -> str | dict[str, Any] | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
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
    seed: Annotated[int, Field(ge=0)] = 42
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
    optim_args: Annotated[str, Field(min_length=1), AfterValidator(_arguments)] | None = None
    """further arguments of the optimizer, as 'name=value,name=value'"""
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
    tf32: bool | None = None
    """TensorFloat-32 on NVIDIA GPUs; null leaves it to torch"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    torch_empty_cache_steps: Count | None = None
    """return unused device memory every N steps; null = never"""
    full_determinism: bool = False
    """deterministic kernels only: slower; the same run twice gives the same weights"""
    ddp_backend: Literal["nccl", "gloo"] | None = None
    """communication library of the processes; null leaves it to the device"""
    ddp_bucket_cap_mb: Count | None = None
    """size of the buckets in which gradients are summed; null leaves it to torch"""
    ddp_timeout: Count = 1800
    """seconds after which a collective call of torchrun fails"""

    logging_dir: FilePath | None = None
    """folder of TensorBoard's files; null = runs in output_dir"""
    logging_steps: Steps = 1.0
    """log every N steps; a number below 1 is a share of all steps"""
    logging_first_step: bool = False
    """log the first step too"""
    report_to: Annotated[ListOf[str], BeforeValidator(_one_as_list, json_schema_input_type=str | ListOf[str])] = (
        "tensorboard",
    )
    """loggers, by transformers' names; [] or none for none"""

    save_strategy: Strategy = "steps"
    """when to save: no, steps, epoch"""
    save_steps: Steps = 500.0
    """save every N steps; a number below 1 is a share of all steps"""
    save_total_limit: Count | None = None
    """keep the newest N checkpoints; null keeps all"""
    save_only_model: bool = False
    """checkpoints without optimizer and scheduler: small, but training cannot resume from them"""
    save_on_each_node: bool = False
    """every node writes checkpoints, for nodes without a shared file system"""
    load_best_model_at_end: bool = False
    """end with the checkpoint that has the best metric_for_best_model"""
    metric_for_best_model: Annotated[str, Field(min_length=1)] | None = None
    """figure of evaluation that decides which checkpoint is best, e.g. rollout/f1"""
    greater_is_better: bool | None = None
    """is more of metric_for_best_model better? null: yes, unless its name ends in loss"""
    resume_from_checkpoint: _Resume = None
    """null starts from model.model; true resumes from the newest checkpoint; or a checkpoint folder"""
    stop_within_s: Positive = 300.0
    """seconds that a run ended by Ctrl-C, SIGTERM or SIGUSR1 has to finish its step and save; then it ends without"""

    eval_strategy: Strategy = "no"
    """when to evaluate on val_jsonl: no, steps, epoch"""
    eval_steps: Steps | None = None
    """evaluate every N steps; a number below 1 is a share of all steps; null = logging_steps"""
    eval_delay: NonNegative = 0.0
    """steps or epochs before the first evaluation"""
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
    *("vit_lr", "aligner_lr", "coord_lr", "logging_dir", "master_weights", "effective_batch_size", "packing"),
    *("packing_buffer", "packing_min_fill_ratio", "packing_drop_last", "resume_from_checkpoint", "stop_within_s"),
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
    reshard_after_forward: bool = True
    """free gathered parameters after the forward pass: less memory, more communication"""
    cpu_offload: bool = False
    """keep shards in the host's memory: less memory, much slower"""
    transformer_layer_cls_to_wrap: ListOf[str] | None = None
    """class names of the layers that are sharded one by one; null takes the model's own"""
    activation_checkpointing: bool = False
    """recompute activations layer by layer; excludes training.gradient_checkpointing"""
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] = "FULL_STATE_DICT"
    """how checkpoints are written: gathered into one, or shard by shard"""


class LaunchConfig(StrictModel):
    """The servers of ``rollout_matching.vllm.server.servers`` and the trainer, on one machine."""

    server: Literal["coordexp", "swift"] = "coordexp"
    """the program of each server: 'coordexp serve' or 'swift rollout'"""
    server_devices: ListOf[ListOf[int]] = ()
    """devices of each server, in the order of servers[]; [] runs them on the CPU"""
    learner_devices: ListOf[int] = ()
    """devices of the trainer, one process each; [] runs one process on the CPU"""
    wait_s: Positive = 900.0
    """seconds that servers, and the engines of each, may take to start"""
    log_dir: FilePath | None = None
    """folder of one log file per process; null = logs in training.output_dir"""
