"""``rollout_matching.vllm``: the vLLM engine, in the learner's own processes or behind servers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from coordexp.config.strict import ListOf, StrictModel

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room; it refuses every other number


def _not_forgetting(value: object) -> object:
    if value == 2:
        raise ValueError(
            "vLLM's level 2 forgets what is neither a weight nor a registered buffer, and its Qwen3-VL reads such "
            "memory in every step (deepstack_input_embeds), so answers would be wrong; write 1"
        )
    return value


class ServerEntry(StrictModel):
    """One rollout server."""

    base_url: str = Field(
        pattern=r"^https?://\S+$", description="URL prefix of the server, such as http://127.0.0.1:8000"
    )
    group_port: int = Field(ge=1, le=65535, description="port of the group over which weights are pushed")
    listen_host: str | None = Field(
        default=None,
        pattern=r"^\S+$",
        description="address on which the server listens, where learners reach it by another one (Kubernetes, NAT), or "
        "0.0.0.0 for all of its machine; null = the host of base_url",
    )


class ServerConfig(StrictModel):
    """Servers that answer rollout requests, in the order in which requests are dealt out."""

    timeout_s: float = Field(
        default=240.0, gt=0, description="seconds to wait for servers to answer and for their group"
    )
    infer_timeout_s: float | None = Field(
        default=None, description="seconds to wait for one answer; null or <= 0 waits on"
    )
    servers: ListOf[ServerEntry] = Field(min_length=1, description="one entry per server")
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="name of the environment variable that holds the servers' bearer token; null sends none",
    )
    images: Literal["path", "base64"] = Field(
        default="path", description="send an image as its path, for servers that see the same files, or as its bytes"
    )
    retries: int = Field(default=1, ge=0, description="further attempts after a request that failed; each is counted")
    closed_names: bool = Field(
        default=False,
        description="servers take a closed list of class names with a request (--classes); without vLLM's "
        "asynchronous scheduling",
    )


class SyncConfig(StrictModel):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = Field(
        default="full", description="push merged weights, adapters only, or adapters where enable_lora allows it"
    )
    fallback_to_full: bool = Field(default=True, description="go on with full pushes when an adapter push fails")
    bucket_mb: int = Field(default=512, ge=1, description="size of the buckets in which weights travel, in 2^20 bytes")
    checksum_every: int = Field(
        default=0, ge=0, description="compare checksums on every N-th push; 0 does so on the first push only"
    )
    timeout_s: float = Field(default=120.0, gt=0, description="seconds that one push may take")

    def resolved(self, enable_lora: bool) -> Literal["full", "adapter"]:
        """The mode that ``auto`` stands for."""
        if self.mode == "auto":
            return "adapter" if enable_lora else "full"
        return self.mode

    @property
    def settled_mode(self) -> Literal["full", "adapter"]:
        """``mode`` of a resolved section, in which ``auto`` has been replaced by what it stands for."""
        assert self.mode != "auto", "resolved_rollout() settles it"
        return self.mode


class MMLimitConfig(StrictModel):
    """Images and videos of one prompt that the engine makes room for."""

    image: int = Field(default=1, ge=1, description="images of one prompt")
    video: int = Field(default=0, ge=0, description="videos of one prompt; no sample has one")


class VLLMConfig(StrictModel):
    """The vLLM engine."""

    KEY_GROUPS: ClassVar[dict[str, str]] = {
        "where": "mode server tensor_parallel_size disable_custom_all_reduce",
        "memory": "gpu_memory_utilization max_model_len max_num_seqs max_num_batched_tokens kv_cache_dtype "
        "cpu_offload_gb sleep_level",
        "weights": "dtype enable_lora max_lora_rank sync",
        "running": "enable_prefix_caching enforce_eager mm_encoder_tp_mode limit_mm_per_prompt",
    }

    mode: Literal["colocate", "server"] = Field(
        default="colocate", description="an engine on the learner's own devices, or servers started elsewhere"
    )
    tensor_parallel_size: int = Field(
        default=4, ge=1, description="devices that share one engine; colocated, it divides the number of processes"
    )
    gpu_memory_utilization: float = Field(
        default=0.45, gt=0, le=1, description="share of device memory the engine may take"
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest prompt with its answer, in tokens; null = global_max_length"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="number type of the engine's weights; null = model.dtype"
    )
    enable_lora: bool = Field(default=False, description="let the engine load adapters")
    max_lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="largest rank of adapters the engine makes room for, one of those vLLM knows; null = the smallest "
        "from tuner.lora_rank on",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="keep what was computed for a prompt's beginning; emptied with every push of weights"
    )
    sleep_level: Annotated[Literal[0, 1], BeforeValidator(_not_forgetting, json_schema_input_type=Literal[0, 1])] = (
        Field(
            default=0,
            description="colocated, between rollouts: 0 keeps everything, 1 frees the cache and moves weights to the "
            "host",
        )
    )
    enforce_eager: bool = Field(default=False, description="run without CUDA graphs: slower, starts at once")
    disable_custom_all_reduce: bool = Field(
        default=True, description="leave tensor-parallel sums to NCCL instead of vLLM's own kernel"
    )
    max_num_seqs: int | None = Field(
        default=None, ge=1, description="sequences decoded at once; null leaves it to vLLM"
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one engine step; null leaves it to vLLM"
    )
    kv_cache_dtype: str | None = Field(
        default=None, min_length=1, description="number type of the cache, by vLLM's name; null leaves it to vLLM"
    )
    cpu_offload_gb: float | None = Field(
        default=None, ge=0, description="weights kept in the host's memory, in 2^30 bytes; null = none"
    )
    mm_encoder_tp_mode: Literal["weights", "data"] | None = Field(
        default=None,
        description="split the vision tower's weights, or its images, over devices; null leaves it to vLLM",
    )
    limit_mm_per_prompt: MMLimitConfig = Field(
        default=MMLimitConfig(), description="images and videos of one prompt that the engine makes room for"
    )
    server: ServerConfig | None = Field(default=None, description="servers of mode 'server'")
    sync: SyncConfig = Field(default=SyncConfig(), description="weight pushes")

    def adapter_rank(self, lora_rank: int) -> int:
        """The rank that an engine makes room for, to take adapters of rank ``lora_rank``."""
        return self.max_lora_rank or next((rank for rank in ADAPTER_RANKS if rank >= lora_rank), lora_rank)
