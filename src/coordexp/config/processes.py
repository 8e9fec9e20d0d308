"""Processes of a run: ``deepspeed`` and ``fsdp`` spread the learner over several, ``launch`` starts all of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from coordexp.config.strict import FilePath, ListOf, StrictModel


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
    wait_s: float = Field(default=900.0, gt=0, description="seconds that servers may take to start")
    log_dir: FilePath | None = Field(
        default=None, description="folder of one log file per process; null = logs in training.output_dir"
    )
