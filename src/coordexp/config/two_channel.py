"""``stage2_ab``: two-channel training, which mixes steps without rollouts (Channel-A) and with them (Channel-B)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coordexp.config.objective import PipelineConfig
from coordexp.config.strict import StrictModel


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
    coord_decode_mode: Literal["exp", "st"] = Field(
        default="exp",
        description="how bbox_geo decodes a coordinate: by its expectation, or the most likely bin with the "
        "expectation's gradient",
    )
    pipeline: PipelineConfig = Field(description="the objective of both channels; each module names its own")
    channel_b: ChannelBConfig = Field(default=ChannelBConfig(), description="takes no keys")
