"""Stage 2. ``rollout_matching``: how answers are generated and matched, and what the model learns from them;
``stage2_ab``: two-channel training, which mixes steps without rollouts (Channel-A) and with them (Channel-B)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from coordexp.config.objective import PipelineConfig
from coordexp.config.strict import FilePath, ListOf, StrictModel
from coordexp.config.vllm import VLLMConfig
from coordexp.settings import MatchingConfig, TargetPolicy, TransportConfig

_MATCHING, _TRANSPORT, _TARGET = MatchingConfig(), TransportConfig(), TargetPolicy()
Threshold = Annotated[float, Field(gt=0, le=1)]
CoordDecodeMode = Annotated[
    Literal["exp", "st"],
    Field(
        description="how bbox_geo decodes a coordinate: by its expectation, or the most likely bin with the "
        "expectation's gradient"
    ),
]


class DecodingConfig(StrictModel):
    """Sampling of rollouts."""

    temperature: float = Field(default=0.0, ge=0, description="sampling temperature; 0 decodes greedily")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass in (0, 1]; 1 keeps every token")
    top_k: int = Field(default=-1, ge=-1, description="number of most likely tokens kept, >= 1; -1 keeps every token")


class RepeatTerminateConfig(StrictModel):
    """The guard that ends an answer which repeats itself. One set of keys drives every backend."""

    enabled: bool = Field(default=False, description="force the end of an answer that one of these thresholds catches")
    min_new_tokens: int = Field(default=256, ge=0, description="nothing is ended before this many new tokens")
    max_consecutive_token_repeats: int = Field(
        default=64, ge=0, description="end after the same token this many times in a row; 0 = not checked"
    )
    ngram_size: int = Field(
        default=64, ge=0, description="length in tokens of the pattern that may repeat; 0 = not checked"
    )
    ngram_repeats: int = Field(
        default=2, ge=0, description="end after the pattern this many times in a row; 0 = not checked"
    )
    max_object_keys: int | None = Field(
        default=None, ge=1, description="object keys an answer may hold; the next one ends it; null = not checked"
    )


class OffloadConfig(StrictModel):
    """What leaves the device while a colocated engine generates. Does nothing with servers and with ``hf``."""

    enabled: bool = Field(default=False, description="move the parts below to the host's memory during rollouts")
    offload_model: bool = Field(default=False, description="the learner's weights")
    offload_optimizer: bool = Field(default=False, description="the optimizer's state")


class EvalDetectionConfig(StrictModel):
    """Detection figures of evaluation while training."""

    enabled: bool = Field(default=True, description="measure detection at every evaluation")
    metrics: Literal["f1ish", "coco", "both"] = Field(
        default="both",
        description="precision, recall and F1 at the thresholds below, COCO's average precision, or both",
    )
    use_segm: bool = Field(default=False, description="COCO figures of polygons' masks too, not of boxes only")
    iou_thrs: Annotated[ListOf[Threshold], Field(min_length=1)] | None = Field(
        default=None, description="IoU thresholds of average precision; null = 0.50, 0.55, … 0.95"
    )
    f1ish_iou_thrs: ListOf[Threshold] = Field(
        default=(0.5,),
        min_length=1,
        description="IoU thresholds of precision, recall and F1; the first names the plain figures",
    )
    score_mode: Literal["constant", "confidence"] = Field(
        default="constant", description="score of a prediction: constant_score, or its tokens' probability"
    )
    constant_score: float = Field(default=1.0, ge=0, le=1, description="score of every prediction in mode 'constant'")


class TargetConfig(StrictModel):
    """What the model is taught on its own answer. The keys below ``answer`` concern a rewritten one alone."""

    answer: Literal["as_written", "rewritten"] = Field(
        default=_TARGET.answer,
        description="keep the model's text, untaught, and append what it missed; or rewrite it in place: its order and "
        "coordinates, the annotations' descriptions, and the text of matched objects taught too",
    )
    unmatched: Literal["mask", "drop", "soft"] = Field(
        default=_TARGET.unmatched,
        description="objects that no annotation matches: left in the answer untaught; left out; or, where the learner "
        "is sure of one that overlaps nothing else, its text taught by that confidence (others are left untaught)",
    )
    soft_threshold: float = Field(
        default=_TARGET.soft_threshold,
        gt=0,
        le=1,
        description="least confidence of an object that becomes soft, with unmatched: soft",
    )
    complete_above: float | None = Field(
        default=_TARGET.complete_above,
        gt=0,
        le=1,
        description="least share of the objects in one step's answers, of all ranks, that annotations match, from "
        "which on the step takes them as complete: unmatched and duplicates: drop, missed: in_order; null = never",
    )
    duplicates: Literal["keep", "drop", "replace"] = Field(
        default=_TARGET.duplicates,
        description="unmatched objects that repeat an earlier one: treated as any other, left out, or replaced by the "
        "next missed object",
    )
    missed: Literal["append", "in_order"] = Field(
        default=_TARGET.missed,
        description="annotated objects that were missed: behind the answer, or in annotation order",
    )


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

    KEY_GROUPS: ClassVar[dict[str, str]] = {
        "decoding": "rollout_backend decode_batch_size decode_mode num_beams max_new_tokens repetition_penalty "
        "decoding repeat_terminate",
        "matching": "candidate_top_k maskiou_gate maskiou_resolution fp_cost fn_cost",
        "transport": "ot_cost ot_epsilon ot_iters",
        "objective": "target coord_decode_mode pipeline",
        "engine": "vllm offload rollouts_ahead",
        "figures and records": "eval_detection monitor_dump",
    }

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
    repeat_terminate: RepeatTerminateConfig = Field(
        default=RepeatTerminateConfig(), description="the guard against answers that repeat themselves"
    )
    coord_decode_mode: CoordDecodeMode = "exp"
    candidate_top_k: int = Field(
        default=_MATCHING.candidate_top_k, ge=1, description="ground-truth candidates per prediction, nearest first"
    )
    maskiou_gate: float = Field(default=_MATCHING.maskiou_gate, ge=0, le=1, description="least mask IoU of a match")
    maskiou_resolution: int = Field(
        default=_MATCHING.maskiou_resolution,
        ge=8,
        description="side of the canvas on which masks are compared, in pixels",
    )
    fp_cost: float = Field(
        default=_MATCHING.fp_cost, ge=0, description="assignment cost of leaving a prediction unmatched"
    )
    fn_cost: float = Field(
        default=_MATCHING.fn_cost, ge=0, description="assignment cost of leaving a ground-truth object unmatched"
    )
    ot_cost: Literal["l1", "l2"] = Field(
        default=_TRANSPORT.cost, description="distance between polygon points in optimal transport"
    )
    ot_epsilon: float = Field(
        default=_TRANSPORT.epsilon, gt=0, description="entropic regularisation of the transport, in bins"
    )
    ot_iters: int = Field(default=_TRANSPORT.iters, ge=1, description="Sinkhorn iterations")
    target: TargetConfig = Field(default=TargetConfig(), description="what the model is taught on its own answer")
    vllm: VLLMConfig = Field(default=VLLMConfig(), description="the vLLM engine; read when rollout_backend is 'vllm'")
    offload: OffloadConfig = Field(
        default=OffloadConfig(), description="what leaves the device while a colocated engine generates"
    )
    rollouts_ahead: Literal[0, 1] = Field(
        default=0,
        description="1: servers answer the next step's prompts while a step learns, so every answer is one step old; "
        "0: each step waits for answers of its own weights",
    )
    eval_detection: EvalDetectionConfig = Field(
        default=EvalDetectionConfig(), description="detection figures of evaluation while training"
    )
    monitor_dump: MonitorDumpConfig = Field(default=MonitorDumpConfig(), description="records of single samples")
    pipeline: PipelineConfig | None = Field(
        default=None, description="the objective; required by stage2_rollout_aligned and not allowed without it"
    )

    @property
    def is_colocated(self) -> bool:
        """Whether the engine shares the learner's process and device: where offload means something."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "colocate"

    @property
    def is_served(self) -> bool:
        """Whether servers answer, with weights of their own."""
        return self.rollout_backend == "vllm" and self.vllm.mode == "server"


class ScheduleConfig(StrictModel):
    """Which optimizer steps are Channel-B: step s is, if floor((s + 1) * b_ratio) > floor(s * b_ratio)."""

    b_ratio: float = Field(
        ge=0, le=1, description="share of optimizer steps with rollouts: 0 is Channel-A alone, 1 is Channel-B alone"
    )


class ChannelBConfig(StrictModel):
    """Channel-B takes no keys: what it does is declared in ``stage2_ab.pipeline`` and ``rollout_matching``."""


class Stage2ABConfig(StrictModel):
    """Two-channel training; read by ``custom.trainer_variant: stage2_two_channel`` alone."""

    schedule: ScheduleConfig = Field(description="the mix of the two channels")
    n_softctx_iter: int = Field(
        default=2, ge=1, description="Channel-A's forward passes; 1 is plain teacher forcing on the ground truth"
    )
    softctx_grad_mode: Literal["unroll", "em_detach"] = Field(
        default="unroll",
        description="let gradients through all of Channel-A's passes, or detach the embeddings between them",
    )
    softctx_temperature: float = Field(
        default=1.0, gt=0, description="softmax temperature of the coordinates fed back to Channel-A's next pass"
    )
    coord_ctx_embed_mode: Literal["st", "soft", "hard"] = Field(
        default="st",
        description="what is fed back at a coordinate: the most likely token with the mean's gradient (st), the mean "
        "embedding (soft), or the most likely token (hard)",
    )
    coord_decode_mode: CoordDecodeMode = "exp"
    pipeline: PipelineConfig = Field(description="the objective of both channels; each module names its own")
    channel_b: ChannelBConfig = Field(default=ChannelBConfig(), description="takes no keys")
