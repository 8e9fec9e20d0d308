"""``launch``: which processes ``coordexp launch`` starts, and on which devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.strict import FilePath, ListOf, StrictModel


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
