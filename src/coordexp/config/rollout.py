"""``rollout_matching``: how answers are generated and matched, and what the model learns from them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.objective import PipelineConfig
from coordexp.config.strict import FilePath, ListOf, StrictModel


class DecodingConfig(StrictModel):
    """Sampling of rollouts."""

    temperature: float = Field(default=0.0, ge=0, description="sampling temperature; 0 decodes greedily")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass in (0, 1]; 1 keeps every token")
    top_k: int = Field(default=-1, ge=-1, description="number of most likely tokens kept, >= 1; -1 keeps every token")


class ServerEntry(StrictModel):
    """One rollout server."""

    base_url: str = Field(
        pattern=r"^https?://\S+$", description="URL prefix of the server, such as http://127.0.0.1:8000"
    )
    group_port: int = Field(ge=1, le=65535, description="port of the group over which weights are pushed")


class ServerConfig(StrictModel):
    """Servers that answer rollout requests, in the order in which requests are dealt out."""

    timeout_s: float = Field(
        default=240.0, gt=0, description="seconds to wait for servers to answer and for their group"
    )
    infer_timeout_s: float | None = Field(
        default=None, description="seconds to wait for one answer; null or <= 0 waits on"
    )
    servers: ListOf[ServerEntry] = Field(min_length=1, description="one entry per server")


class SyncConfig(StrictModel):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = Field(
        default="full", description="push merged weights, adapters only, or adapters where enable_lora allows it"
    )
    fallback_to_full: bool = Field(default=True, description="go on with full pushes when an adapter push fails")

    def resolved(self, enable_lora: bool) -> Literal["full", "adapter"]:
        """The mode that ``auto`` stands for."""
        if self.mode == "auto":
            return "adapter" if enable_lora else "full"
        return self.mode


class VLLMConfig(StrictModel):
    """The vLLM engine."""

    mode: Literal["colocate", "server"] = Field(
        default="colocate", description="an engine on the learner's own devices, or servers started elsewhere"
    )
    tensor_parallel_size: int = Field(default=4, ge=1, description="devices that share one engine")
    gpu_memory_utilization: float = Field(
        default=0.45, gt=0, le=1, description="share of device memory the engine may take"
    )
    enable_lora: bool = Field(default=False, description="let the engine load adapters")
    server: ServerConfig | None = Field(default=None, description="servers of mode 'server'")
    sync: SyncConfig = Field(default=SyncConfig(), description="weight pushes")


class MonitorDumpConfig(StrictModel):
    """Records of single samples for looking at and replaying: answer, parse, match and target, one JSON line each."""

    enabled: bool = Field(default=False, description="write rollouts_rank{r}.jsonl while stage 2 trains")
    every_steps: int | None = Field(
        default=None, ge=1, description="record every N optimizer steps; null = training.logging_steps"
    )
    dump_first_step: bool = Field(default=True, description="record the first step of the run too")
    only_world_process_zero: bool = Field(default=True, description="record on the first process only, not on each")
    max_samples: int = Field(default=16, ge=1, description="most samples recorded of a step, on each process")
    max_pending: int = Field(
        default=64, ge=1, description="most records waiting to be written; further ones are dropped and counted"
    )
    min_free_gb: float = Field(
        default=2.0, ge=0, description="write nothing while the disk has less room, in 10^9 bytes"
    )
    out_dir: FilePath | None = Field(
        default=None, description="folder of the records; null = rollout_records in training.output_dir"
    )


class RolloutMatchingConfig(StrictModel):
    """Rollouts, matching and the objective of stage 2; evaluation decodes by the same keys."""

    rollout_backend: Literal["hf", "vllm"] = Field(default="vllm", description="what generates: transformers or vLLM")
    decode_batch_size: int = Field(default=1, ge=1, description="sequences decoded at once per rollout device")
    decode_mode: Literal["greedy", "beam"] = Field(
        default="greedy", description="token by token (sampling if decoding.temperature > 0), or beam search"
    )
    num_beams: int = Field(default=1, ge=1, description="beams of decode_mode 'beam'; only the best one is used")
    max_new_tokens: int = Field(default=512, ge=1, description="longest answer, in tokens")
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="factor on logits of tokens already written; 1 = none"
    )
    decoding: DecodingConfig = Field(default=DecodingConfig(), description="sampling")
    candidate_top_k: int = Field(default=10, ge=1, description="ground-truth candidates per prediction, nearest first")
    maskiou_gate: float = Field(default=0.3, ge=0, le=1, description="least mask IoU of a match")
    maskiou_resolution: int = Field(
        default=256, ge=8, description="side of the canvas on which masks are compared, in pixels"
    )
    fp_cost: float = Field(default=1.0, ge=0, description="assignment cost of leaving a prediction unmatched")
    fn_cost: float = Field(default=1.0, ge=0, description="assignment cost of leaving a ground-truth object unmatched")
    ot_cost: Literal["l1", "l2"] = Field(
        default="l2", description="distance between polygon points in optimal transport"
    )
    ot_epsilon: float = Field(default=10.0, gt=0, description="entropic regularisation of the transport, in bins")
    ot_iters: int = Field(default=30, ge=1, description="Sinkhorn iterations")
    vllm: VLLMConfig = Field(default=VLLMConfig(), description="the vLLM engine; read when rollout_backend is 'vllm'")
    monitor_dump: MonitorDumpConfig = Field(default=MonitorDumpConfig(), description="records of single samples")
    pipeline: PipelineConfig | None = Field(
        default=None, description="the objective; required by stage2_rollout_aligned and not allowed without it"
    )
