"""Stage 2. ``rollout_matching``: how answers are generated and matched, and what the model learns from them;
``stage2_ab``: two-channel training, which mixes steps without rollouts (Channel-A) and with them (Channel-B)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from coordexp.addresses import split_url
from coordexp.config.base import Count, ListOf, NonNegative, Positive, Probability, Share, StrictModel
from coordexp.config.engine_args import EngineArgs
from coordexp.config.objective import PipelineConfig
from coordexp.errors import ConfigError

FIELD_ORDER: Literal["desc_first", "geometry_first"] = "desc_first"
"""Default of ``custom.object_field_order``."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM refuses any other max_lora_rank


@dataclass(frozen=True, slots=True)
class MatchingConfig:
    """How predictions find their GT objects (keys ``rollout_matching.*`` of the same names).

    Attributes:
        candidate_top_k: GT candidates per prediction that get a mask IoU.
        maskiou_gate: pairs under this mask IoU can never match; a pair exactly at it can.
        maskiou_resolution: side of the virtual canvas in pixels.
        fp_cost, fn_cost: cost of leaving a prediction, or a GT object, alone; a pair costs 1 - IoU. With the defaults
            matching a feasible pair is always cheaper than leaving both alone; below a sum of 1 a pair can cost more.
    """

    candidate_top_k: int = 10
    maskiou_gate: float = 0.3
    maskiou_resolution: int = 256
    fp_cost: float = 1.0
    fn_cost: float = 1.0

    def __post_init__(self) -> None:
        if self.candidate_top_k < 1:
            raise ConfigError(f"candidate_top_k must be at least 1, got {self.candidate_top_k}")
        if not 0.0 <= self.maskiou_gate <= 1.0:
            raise ConfigError(f"maskiou_gate must lie in 0..1, got {self.maskiou_gate}")
        if self.maskiou_resolution < 2:
            raise ConfigError(f"maskiou_resolution must be at least 2, got {self.maskiou_resolution}")
        for name, cost in (("fp_cost", self.fp_cost), ("fn_cost", self.fn_cost)):
            if not (math.isfinite(cost) and cost >= 0):
                raise ConfigError(f"{name} must be a finite number >= 0, got {cost}")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How a polygon is aligned with its polygon (keys ``rollout_matching.ot_*``)."""

    cost: Literal["l1", "l2"] = "l2"
    epsilon: float | None = None
    iters: int = 30


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """How an answer becomes a target: the keys ``rollout_matching.target.*``, described in :class:`TargetConfig`."""

    answer: Literal["as_written", "rewritten"] = "as_written"
    unmatched: Literal["mask", "drop"] = "mask"
    duplicates: Literal["keep", "drop", "replace"] = "keep"
    missed: Literal["append", "in_order"] = "append"
    complete_above: float | None = None

    def for_complete(self) -> TargetPolicy:
        """The policy of a step whose annotations count as complete. Missed objects go where annotations have them:
        appended, they would teach the model to skip hard objects first."""
        return replace(self, unmatched="drop", duplicates="drop", missed="in_order", complete_above=None)


_MATCHING, _TRANSPORT, _TARGET = MatchingConfig(), TransportConfig(), TargetPolicy()
MOST_SKIPPING = 8  # answers at once; above, an engine on a GPU skips forced tokens only if the YAML has true


class DecodingConfig(StrictModel):
    """Sampling of rollouts."""

    temperature: NonNegative = 0.0
    """sampling temperature; 0 decodes greedily"""
    top_p: Share = 1.0
    """nucleus mass in (0, 1]; 1 keeps every token"""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """number of most likely tokens kept, >= 1; -1 keeps every token"""
    skip_forced_tokens: bool | None = None
    """write tokens that JSON leaves no choice about without a forward pass each; null = where answers stay the same:
    with transformers, and in greedy answers of vLLM, on GPUs only up to a decode_batch_size of 8, above which it may be
    slower. true: vLLM's samples too, which have the same distribution but differ for a seed. Not for beam search and
    swift rollout"""


class RepeatTerminateConfig(StrictModel):
    """The guard that ends an answer which repeats itself. One set of keys drives every backend."""

    enabled: bool = False
    """force the end of an answer that one of these thresholds catches"""
    min_new_tokens: Annotated[int, Field(ge=0)] = 256
    """nothing is ended before this many new tokens"""
    max_consecutive_token_repeats: Annotated[int, Field(ge=0)] = 64
    """end after the same token this many times in a row; 0 = not checked"""
    ngram_size: Annotated[int, Field(ge=0)] = 64
    """length in tokens of the pattern that may repeat; 0 = not checked"""
    ngram_repeats: Annotated[int, Field(ge=0)] = 2
    """end after the pattern this many times in a row; 0 = not checked"""
    max_object_keys: Count | None = None
    """object keys an answer may hold; the next one ends it; null = not checked"""


class OffloadConfig(StrictModel):
    """Parts that leave the device while a colocated engine generates. Does nothing with servers and with ``hf``."""

    enabled: bool = False
    """move the parts below to the host's memory during rollouts"""
    offload_model: bool = False
    """the trained model's weights"""
    offload_optimizer: bool = False
    """the optimizer's state"""


class EvalDetectionConfig(StrictModel):
    """Detection figures of evaluation while training."""

    enabled: bool = True
    """measure detection at every evaluation"""
    metrics: Literal["f1ish", "coco", "both"] = "both"
    """precision, recall and F1 at the thresholds below, COCO's average precision, or both"""
    use_segm: bool = False
    """COCO figures of polygons' masks too, not of boxes only"""
    f1ish_iou_thrs: Annotated[ListOf[Share], Field(min_length=1)] = (0.5,)
    """IoU thresholds of precision, recall and F1; the first names the plain figures"""
    score_mode: Literal["constant", "confidence"] | None = None
    """score of a prediction for average precision: its tokens' probability, as coordexp evaluate uses it (confidence),
    or constant_score; null = confidence, and constant where offload moves the model away while it answers"""
    constant_score: Probability = 1.0
    """score of every prediction in mode 'constant'"""

    @property
    def fixed_score(self) -> float | None:
        """Score of every prediction; None if each has its own. Needs a resolved section."""
        return self.constant_score if self.score_mode == "constant" else None

    def scored(self, constant_score: float | None) -> EvalDetectionConfig:
        """With average precision, by ``constant_score`` or (None) by each prediction's own score."""
        mode = "confidence" if constant_score is None else "constant"
        score = self.constant_score if constant_score is None else constant_score
        return self.model_copy(update={"metrics": "both", "score_mode": mode, "constant_score": score})


class TargetConfig(StrictModel):
    """How the model's own answer becomes its target. The keys after ``answer`` apply to rewritten answers only."""

    answer: Literal["as_written", "rewritten"] = _TARGET.answer
    """as_written keeps the model's text unsupervised and appends missed objects; rewritten keeps its order and
    coordinates, takes descriptions from the annotations, and also supervises the text of matched objects"""
    unmatched: Literal["mask", "drop"] = _TARGET.unmatched
    """predictions that match no annotation: kept unsupervised, or dropped"""
    complete_above: Share | None = _TARGET.complete_above
    """in a step with at least this share of matched predictions, over all ranks, annotations count as complete:
    unmatched: drop, duplicates: drop, missed: in_order; null = never"""
    duplicates: Literal["keep", "drop", "replace"] = _TARGET.duplicates
    """unmatched predictions that are copies: further attempts, by a mask IoU of at least 0.3, at an object that an
    earlier or a matched prediction or an annotation of the same name has. Treated as other unmatched ones, dropped, or
    replaced by the next missed object"""
    missed: Literal["append", "in_order"] = _TARGET.missed
    """missed annotated objects: appended to the answer, or in annotation order"""


class MonitorDumpConfig(StrictModel):
    """Records of single samples for looking at and replaying: answer, parse, match and target, one JSON line each, in
    rollout_records of training.output_dir."""

    enabled: bool = False
    """write rollouts_rank0.jsonl while stage 2 trains"""
    every_steps: Count | None = None
    """record the first step, and every N-th; null = training.logging_steps"""
    max_samples: Count = 16
    """most samples recorded of a step, all on the first process"""


def _with_host(url: str) -> str:
    try:
        host = split_url(url).hostname
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if not host:
        raise ValueError("names no host; write http://HOST:PORT")
    return url


MAX_PUSH_S = 3600.0  # longest call to engines for a push; servers refuse more
PushSeconds = Annotated[float, Field(gt=0, le=MAX_PUSH_S)]


class ServerEntry(StrictModel):
    """One rollout server."""

    base_url: Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(_with_host)]
    """URL prefix of the server, such as http://127.0.0.1:8000"""
    group_port: Annotated[int, Field(ge=1, le=65535)]
    """port of the group over which weights are pushed"""
    listen_host: Annotated[str, Field(pattern=r"^\S+$")] | None = None
    """address on which the server listens, if trainers reach it by another one (Kubernetes, NAT), or 0.0.0.0 for all of
    its machine; null = the host of base_url"""


class ServerConfig(StrictModel):
    """Servers that answer rollout requests, in the order in which requests are dealt out."""

    timeout_s: PushSeconds = 240.0
    """seconds to wait for servers to answer and for their group. A call that has produced no new token for as long is
    ended too, on servers that report progress: coordexp serve, and swift rollout with the plugin"""
    infer_timeout_s: Annotated[float, Field(le=1e9)] | None = None
    """seconds that one call may take; null or <= 0 sets no limit, and timeout_s still ends a call without progress"""
    servers: Annotated[ListOf[ServerEntry], Field(min_length=1)]
    """one entry per server"""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """name of the environment variable that holds the servers' bearer token; null sends none"""
    images: Literal["path", "base64"] = "path"
    """send an image as its path, for servers that see the same files, or as its bytes"""
    retries: Annotated[int, Field(ge=0)] = 1
    """further attempts after a request that failed; each is counted"""
    closed_names: bool = False
    """servers take a list of class names with a request (--classes)"""


class SyncConfig(StrictModel):
    """How new weights reach the rollout engine."""

    mode: Literal["full", "adapter", "auto"] = "full"
    """push merged weights, adapters only, or adapters where enable_lora allows it"""
    fallback_to_full: bool = True
    """continue with full pushes if an adapter push fails"""
    bucket_mb: Count = 512
    """size of the buckets in which weights are sent, in 2^20 bytes"""
    checksum_every: Annotated[int, Field(ge=0)] = 0
    """compare checksums on every N-th push; 0 does so on the first push only"""
    timeout_s: PushSeconds = 120.0
    """seconds that one push may take"""

    def resolved(self, enable_lora: bool) -> Literal["full", "adapter"]:
        """The mode that ``auto`` means."""
        if self.mode == "auto":
            return "adapter" if enable_lora else "full"
        return self.mode

    @property
    def settled_mode(self) -> Literal["full", "adapter"]:
        """``mode`` of a resolved section, which is never ``auto``."""
        assert self.mode != "auto", "resolved_rollout() settles it"
        return self.mode


def _not_level_2(value: object) -> object:
    if value == 2:
        raise ValueError(
            "vLLM's level 2 forgets what is neither a weight nor a registered buffer, and its Qwen3-VL reads such "
            "memory in every step (deepstack_input_embeds), so answers would be wrong; write 1"
        )
    return value


class VLLMConfig(StrictModel):
    """The vLLM engine, in the trainer's own processes or on servers."""

    mode: Literal["colocate", "server"] = "colocate"
    """an engine on the trainer's own devices, or servers started elsewhere"""
    tensor_parallel_size: Count = 4
    """devices that share one engine; colocated, it divides the number of processes"""
    gpu_memory_utilization: Share = 0.45
    """share of device memory the engine may take"""
    max_model_len: Count | None = None
    """longest prompt with its answer, in tokens; null = global_max_length"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """number type of the engine's weights; null = model.dtype"""
    enable_lora: bool = False
    """let the engine load adapters"""
    max_lora_rank: Count | None = None
    """largest adapter rank the engine makes room for, one that vLLM allows; null = the smallest for tuner.lora_rank"""
    sleep_level: Annotated[Literal[0, 1], BeforeValidator(_not_level_2, json_schema_input_type=Literal[0, 1])] = 0
    """colocated, between rollouts: 0 keeps everything, 1 frees the cache and moves weights to the host"""
    enforce_eager: bool = False
    """run without CUDA graphs: slower, starts at once"""
    engine_args: EngineArgs = Field(default={})
    """further arguments of vLLM's engine by its own names, such as max_num_seqs, kv_cache_dtype, cpu_offload_gb"""
    server: ServerConfig | None = None
    """servers of mode 'server'"""
    sync: SyncConfig = SyncConfig()
    """weight pushes"""

    def adapter_rank(self, lora_rank: int) -> int:
        """The rank that an engine makes room for, to take adapters of rank ``lora_rank``."""
        return self.max_lora_rank or next((rank for rank in ADAPTER_RANKS if rank >= lora_rank), lora_rank)

    @property
    def given_args(self) -> dict[str, Any]:
        """``engine_args`` without null ones, as a file has them to undo those that it extends."""
        return {name: value for name, value in self.engine_args.items() if value is not None}


class RolloutMatchingConfig(StrictModel):
    """Rollouts, matching and the objective of stage 2; evaluation decodes by the same keys."""

    rollout_backend: Literal["hf", "vllm"] = "vllm"
    """the engine that generates: transformers or vLLM"""
    decode_batch_size: Count = 1
    """sequences decoded at once per rollout device"""
    decode_mode: Literal["greedy", "beam"] = "greedy"
    """token by token (sampling if decoding.temperature > 0), or beam search"""
    num_beams: Count = 1
    """beams of decode_mode 'beam'; only the best one is used"""
    max_new_tokens: Count = 512
    """longest answer, in tokens"""
    repetition_penalty: Positive = 1.0
    """factor on logits of tokens already written; 1 = none"""
    decoding: DecodingConfig = DecodingConfig()
    """sampling"""
    repeat_terminate: RepeatTerminateConfig = RepeatTerminateConfig()
    """the guard against answers that repeat themselves"""
    candidate_top_k: Count = _MATCHING.candidate_top_k
    """ground-truth candidates per prediction, nearest first"""
    maskiou_gate: Probability = _MATCHING.maskiou_gate
    """least mask IoU of a match"""
    maskiou_resolution: Annotated[int, Field(ge=8)] = _MATCHING.maskiou_resolution
    """side of the canvas on which masks are compared, in pixels"""
    fp_cost: NonNegative = _MATCHING.fp_cost
    """assignment cost of leaving a prediction unmatched"""
    fn_cost: NonNegative = _MATCHING.fn_cost
    """assignment cost of leaving a ground-truth object unmatched"""
    ot_cost: Literal["l1", "l2"] = _TRANSPORT.cost
    """distance between polygon points in optimal transport"""
    ot_epsilon: Positive | None = _TRANSPORT.epsilon
    """blur of the transport: null = relative to the annotated polygon, which is then its own target; a number is in
    bins, and shrinks polygons that are not much larger"""
    ot_iters: Annotated[int, Field(ge=1, le=100_000)] = _TRANSPORT.iters
    """Sinkhorn iterations"""
    target: TargetConfig = TargetConfig()
    """targets made of the model's own answer"""
    vllm: VLLMConfig = VLLMConfig()
    """the vLLM engine; read when rollout_backend is 'vllm'"""
    offload: OffloadConfig = OffloadConfig()
    """parts that leave the device while a colocated engine generates"""
    rollouts_ahead: Literal[0, 1] = 0
    """1: servers answer the next step's prompts while a step learns, so every answer is one step old; 0: each step
    waits for answers of its own weights"""
    eval_detection: EvalDetectionConfig = EvalDetectionConfig()
    """detection figures of evaluation while training"""
    monitor_dump: MonitorDumpConfig = MonitorDumpConfig()
    """records of single samples"""
    pipeline: PipelineConfig | None = None
    """the objective; required by stage2_rollout_aligned and not allowed without it"""

    @property
    def is_colocated(self) -> bool:
        """Whether the engine shares the trainer's process and device: only then offload does anything."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "colocate"

    @property
    def is_served(self) -> bool:
        """Whether servers answer, with weights of their own."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "server"

    def skips_forced_tokens(self, on_gpu: bool) -> bool:
        """``decoding.skip_forced_tokens`` of transformers and of engines that CoordExp starts, on a GPU or on a CPU;
        null skips if that changes no answer, no other key excludes it, and it is not likely to be slower."""
        if self.decoding.skip_forced_tokens is not None:
            return self.decoding.skip_forced_tokens
        if self.rollout_backend == "hf":
            return self.num_beams == 1
        if self.decoding.temperature > 0 or self.vllm.given_args.get("async_scheduling"):
            return False
        # Engine steps with drafts wait for the host and replay no full CUDA graph. With few answers a step takes as
        # long as reading the weights, so fewer steps are faster all the same.
        return not on_gpu or self.decode_batch_size <= MOST_SKIPPING


class ScheduleConfig(StrictModel):
    """Which optimizer steps are Channel-B: step s is, if floor((s + 1) * b_ratio) > floor(s * b_ratio)."""

    b_ratio: Probability
    """share of optimizer steps with rollouts: 0 is Channel-A alone, 1 is Channel-B alone"""


class Stage2ABConfig(StrictModel):
    """Two-channel training; read by ``custom.trainer_variant: stage2_two_channel`` alone."""

    schedule: ScheduleConfig
    """the mix of the two channels"""
    n_softctx_iter: Annotated[int, Field(ge=1, le=1000)] = 2
    """Channel-A's forward passes; 1 is plain teacher forcing on the ground truth"""
    softctx_grad_mode: Literal["unroll", "em_detach"] = "unroll"
    """let gradients through all of Channel-A's passes, or detach the embeddings between them"""
    softctx_temperature: Positive = 1.0
    """softmax temperature of the coordinates fed back to Channel-A's next pass"""
    coord_ctx_embed_mode: Literal["st", "soft", "hard"] = "st"
    """input of the next pass at a coordinate: the most likely token with the mean's gradient (st), the mean embedding
    (soft), or the most likely token (hard)"""
    pipeline: PipelineConfig
    """the objective of both channels; each module names its own"""
