"""The shipped configurations that a GPU would run, and what each row changes besides model, data and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OFFLOAD = {
    "rollout_matching.offload.enabled": True,
    "rollout_matching.offload.offload_model": True,
    "rollout_matching.offload.offload_optimizer": True,
}
_LORA = {
    "tuner": {
        "train_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["all-linear"],
        "freeze_vit": True, "train_coord_rows": True,
    },
    "training.master_weights": None,
}  # fmt: skip


_FSDP = {"fsdp.enabled": True, "training.master_weights": None}
SERVERS = {
    "server.yaml": 1,
    "rewritten_server.yaml": 1,
    "server_multi_node.yaml": 2,
    "server_3v1.yaml": 3,
    "prod.yaml": 3,
}


@dataclass(frozen=True, slots=True)
class Row:
    """``config``: a file in configs/. ``what``: its changes, in words. ``resumed``: train, then resume from the
    first step's checkpoint. ``fsdp``: in the only process of a group, which the product refuses (FSDP shards over
    several): all else of FSDP is real. ``same_on_cpu``: on the CPU its losses are those of the file as shipped, with
    which they are compared. ``failed``: how the same start failed on an H100 at commit b290dcee."""

    config: str
    what: str = "as shipped"
    changes: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    fsdp: bool = False
    same_on_cpu: bool = False
    failed: str | None = None

    @property
    def name(self) -> str:
        return f"{self.config.removesuffix('.yaml')}, {self.what}"

    @property
    def file(self) -> str:
        return self.name.replace("/", "-").replace(", ", "-").replace(" ", "_")

    @property
    def on_cpu(self) -> Row:
        """The row that runs on the CPU for this one."""
        return Row(self.config) if self.same_on_cpu else self

    @property
    def engine(self) -> bool:
        """Whether an engine in the trainer's process answers."""
        return "colocate" in self.config

    @property
    def servers(self) -> int:
        """How many servers answer, as many as in the file."""
        return SERVERS.get(self.config.rpartition("/")[2], 0)

    @property
    def reads_every_token(self) -> bool:
        """Whether the host reads each token of an answer from the device."""
        return "sampled" in self.what or self.changes.get("rollout_matching.decoding.skip_forced_tokens") is False


ROWS = (
    Row("stage1/sft.yaml", failed="at its first line: float32 masters were made while the weights were on the CPU"),
    Row("stage1/sft.yaml", "resumed", resumed=True, same_on_cpu=True),
    Row("stage1/sft.yaml", "all layers recomputed", {"training.gradient_checkpointing_every": 1}, same_on_cpu=True),
    Row("stage1/sft.yaml", "float32 weights", {"model.dtype": "float32", "training.master_weights": None}),
    Row("stage1/sft.yaml", "scored answers", {"rollout_matching.eval_detection.score_mode": "confidence"},
        same_on_cpu=True),
    Row("stage1/sft.yaml", "FSDP, resumed", _FSDP, resumed=True, fsdp=True),
    Row("stage1/lora.yaml"),
    Row("stage2_rollout_aligned/hf.yaml"),
    Row("stage2_rollout_aligned/rewritten.yaml"),
    Row("stage2_rollout_aligned/rewritten.yaml", "sampled", {"rollout_matching.decoding.temperature": 0.7}),
    Row("stage2_rollout_aligned/rewritten.yaml", "every token decoded",
        {"rollout_matching.decoding.skip_forced_tokens": False}, same_on_cpu=True),
    Row("stage2_rollout_aligned/rewritten.yaml", "FSDP", _FSDP, fsdp=True),
    Row("stage2_rollout_aligned/lora.yaml"),
    Row("stage2_rollout_aligned/colocate.yaml"),
    Row("stage2_rollout_aligned/colocate.yaml", "offloaded", _OFFLOAD, same_on_cpu=True),
    Row("stage2_rollout_aligned/colocate.yaml", "offloaded, LoRA", {**_OFFLOAD, **_LORA}),
    Row("stage2_rollout_aligned/colocate.yaml", "resumed", resumed=True, same_on_cpu=True),
    Row("stage2_rollout_aligned/rewritten_colocate.yaml"),
    Row("stage2_rollout_aligned/server.yaml"),
    Row("stage2_rollout_aligned/server_3v1.yaml"),
    Row("stage2_rollout_aligned/server_multi_node.yaml"),
    Row("stage2_rollout_aligned/rewritten_server.yaml"),
    Row("stage2_rollout_aligned/rewritten_server.yaml", "one step ahead", {"rollout_matching.rollouts_ahead": 1}),
    Row("stage2_two_channel/base.yaml"),
    Row("stage2_two_channel/mixed.yaml", "every second step", {"stage2_ab.schedule.b_ratio": 0.5}),
    Row("stage2_two_channel/a_only.yaml"),
    Row("stage2_two_channel/b_only.yaml"),
    Row("stage2_two_channel/prod.yaml"),
)  # fmt: skip
