"""What the trainings differ in: where a step's rows come from, and what is learned from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.config.objective import Channel
from coordexp.config.rollout import RolloutMatchingConfig, Stage2ABConfig
from coordexp.coords import CoordVocab
from coordexp.errors import ConfigError
from coordexp.matching import MatchingConfig
from coordexp.modeling.self_context import SelfContext
from coordexp.objective import ObjectivePipeline, build_pipeline, sft_pipeline
from coordexp.packing import CarryBuffer
from coordexp.recording.writer import RolloutLog
from coordexp.rollouts import RolloutBackend
from coordexp.targets import SupervisionWeights, TargetPolicy, TransportConfig
from coordexp.training.ahead import RolloutsAhead
from coordexp.training.objective_step import SelfContextObjective, TeacherForcing, TrainingObjective
from coordexp.training.sources import GroundTruthSource, RolloutSource, SegmentSource
from coordexp.training.two_channel import ChannelSchedule, DrainingBuilder, TwoChannelBuilder
from coordexp.training.window import WindowBuilder


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training. ``objectives`` by channel, or under None where there are no channels; ``rollouts`` is the source
    whose samples can be recorded, ``ahead`` what asks for its windows a step before they are taken."""

    window_builder: WindowBuilder | TwoChannelBuilder
    objectives: Mapping[Channel | None, TrainingObjective]
    rollouts: RolloutSource | None = None
    ahead: RolloutsAhead | None = None


def build_recipe(
    config: RunConfig,
    rollout: RolloutMatchingConfig,
    vocab: CoordVocab,
    backend: RolloutBackend,
    buffer: CarryBuffer | None,
) -> Recipe:
    """The training that ``custom.trainer_variant`` names. ``buffer``: segments that wait, None without packing."""
    variant = config.custom.trainer_variant
    field_order = config.custom.object_field_order
    if variant is None:
        coord_loss = config.custom.coord_soft_ce_w1
        pipeline = sft_pipeline(coord_loss)
        truth = GroundTruthSource(vocab, field_order, SupervisionWeights.for_sft(coord_loss))
        return Recipe(_carrying(config, truth, buffer), {None: TeacherForcing(pipeline, vocab.coord_token_ids)})
    rollouts = _rollout_source(config, rollout, vocab, backend)
    if variant == "stage2_two_channel":
        assert config.stage2_ab is not None, "the schema requires stage2_ab for this variant"
        weights_a = SupervisionWeights.from_pipeline(config.stage2_ab.pipeline, "A")
        truth = GroundTruthSource(vocab, field_order, weights_a)
        schedule = ChannelSchedule.from_ratio(config.stage2_ab.schedule.b_ratio)
        ahead = RolloutsAhead(rollouts, lambda step: schedule.channel(step) == "B") if rollout.rollouts_ahead else None
        builder = TwoChannelBuilder(
            schedule,
            channel_a=_carrying(config, truth, buffer),
            channel_b=DrainingBuilder(
                ahead or rollouts, None if buffer is None else buffer.capacity, config.training.packing_min_fill_ratio
            ),
        )
        channel_b = rollout_pipeline(config, rollout)
        return Recipe(builder, _by_channel(config.stage2_ab, channel_b, vocab), rollouts, ahead)
    pipeline = rollout_pipeline(config, rollout)
    ahead = RolloutsAhead(rollouts, lambda step: True) if rollout.rollouts_ahead else None
    builder = _carrying(config, ahead or rollouts, buffer)
    return Recipe(builder, {None: TeacherForcing(pipeline, vocab.coord_token_ids)}, rollouts, ahead)


def rollout_pipeline(config: RunConfig, rollout: RolloutMatchingConfig) -> ObjectivePipeline:
    """The objective of rollouts: of rollout matching, or of Channel-B if training has two channels.

    Raises:
        ConfigError: ``config`` declares none; stage 1 has no rollouts.
    """
    section = _rollout_section(config, rollout)
    return build_pipeline(section.pipeline, "B", decode=section.coord_decode_mode)


def rollout_weights(config: RunConfig, rollout: RolloutMatchingConfig) -> SupervisionWeights:
    """Token weights of the targets that :func:`rollout_pipeline` trains on."""
    two_channels = config.custom.trainer_variant == "stage2_two_channel"
    return SupervisionWeights.from_pipeline(
        _rollout_section(config, rollout).pipeline, "B", with_matched_prefix=two_channels
    )


def _rollout_section(config: RunConfig, rollout: RolloutMatchingConfig) -> Any:
    two_channels = config.custom.trainer_variant == "stage2_two_channel"
    section = config.stage2_ab if two_channels else rollout
    if section is None or section.pipeline is None:
        raise ConfigError(
            "rollout_matching.pipeline: missing, so rollouts have no objective; give the configuration of a stage-2 run"
        )
    return section


def _by_channel(
    stage2_ab: Stage2ABConfig, channel_b: ObjectivePipeline, vocab: CoordVocab
) -> dict[Channel | None, TrainingObjective]:
    ids = vocab.coord_token_ids
    channel_a = build_pipeline(stage2_ab.pipeline, "A", decode=stage2_ab.coord_decode_mode)
    self_context = SelfContext(
        stage2_ab.n_softctx_iter,
        stage2_ab.coord_ctx_embed_mode,
        stage2_ab.softctx_grad_mode,
        stage2_ab.softctx_temperature,
    )
    # With one forward there is nothing to feed back: plain SFT, by the very code that does plain SFT.
    plain = self_context.iterations == 1
    return {
        "A": TeacherForcing(channel_a, ids) if plain else SelfContextObjective(channel_a, ids, self_context),
        "B": TeacherForcing(channel_b, ids),
    }


def _carrying(config: RunConfig, source: SegmentSource, buffer: CarryBuffer | None) -> WindowBuilder:
    return WindowBuilder(source, buffer, config.training.packing_min_fill_ratio)


def _rollout_source(
    config: RunConfig,
    rollout: RolloutMatchingConfig,
    vocab: CoordVocab,
    backend: RolloutBackend,
) -> RolloutSource:
    return RolloutSource(
        backend=backend,
        vocab=vocab,
        matching=MatchingConfig(
            rollout.candidate_top_k,
            rollout.maskiou_gate,
            rollout.maskiou_resolution,
            rollout.fp_cost,
            rollout.fn_cost,
        ),
        transport=TransportConfig(rollout.ot_cost, rollout.ot_epsilon, rollout.ot_iters),
        policy=TargetPolicy(**rollout.target.model_dump()),
        weights=rollout_weights(config, rollout),
        field_order=config.custom.object_field_order,
        training_seed=config.training.seed,
        decode_flag=_decode_flag(rollout),
        drop_unclosed=config.custom.trainer_variant == "stage2_two_channel",
        log=RolloutLog(Path(config.training.output_dir), distributed.rank()),
    )


def _decode_flag(rollout: RolloutMatchingConfig) -> str:
    if rollout.decode_mode == "beam":
        return "rollout/decode_beam"
    return "rollout/decode_sample" if rollout.decoding.temperature > 0 else "rollout/decode_greedy"
