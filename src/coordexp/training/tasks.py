"""Configuration → the tasks of a run's optimizer steps, by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordexp.config import RunConfig
from coordexp.config.objective import Channel, PipelineConfig
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.errors import ConfigError
from coordexp.matching import MatchingConfig
from coordexp.modeling.self_context import SelfContext
from coordexp.objective import RowObjective, build_pipeline, sft_pipeline
from coordexp.packing import CarryBuffer
from coordexp.rollouts import RolloutBackend
from coordexp.targets import SupervisionWeights, TargetPolicy, TransportConfig
from coordexp.training.batches import ChannelSchedule
from coordexp.training.rows import RowPlanner
from coordexp.training.step import Task
from coordexp.training.step_answers import AnswerReader, RolloutQueue, TargetOptions


def build_tasks(
    config: RunConfig,
    rollout: RolloutMatchingConfig,
    vocab: CoordVocab,
    backend: RolloutBackend,
    buffer: CarryBuffer | None,
) -> tuple[Mapping[Channel | None, Task], ChannelSchedule | None]:
    """The tasks of ``custom.trainer_variant``, and the schedule that chooses between two of them. ``buffer``: waiting
    segments; None without packing."""
    variant, min_fill_ratio = config.custom.trainer_variant, config.training.packing_min_fill_ratio
    capacity = None if buffer is None else buffer.capacity
    carrying = RowPlanner(buffer, capacity=capacity, min_fill_ratio=min_fill_ratio)
    transport = TransportConfig(rollout.ot_cost, rollout.ot_epsilon, rollout.ot_iters)
    policy = TargetPolicy(**rollout.target.model_dump())
    targets = TargetOptions(vocab, config.custom.object_field_order, transport, policy)
    if variant is None:
        coord_loss = config.custom.coord_soft_ce_w1
        targets = replace(targets, weights=SupervisionWeights.for_sft(coord_loss))
        return {None: Task(RowObjective(sft_pipeline(coord_loss), vocab.coord_token_ids), carrying, targets)}, None

    matching = MatchingConfig(
        rollout.candidate_top_k, rollout.maskiou_gate, rollout.maskiou_resolution, rollout.fp_cost, rollout.fn_cost
    )
    decode_metric = "rollout/decode_sample" if rollout.decoding.temperature > 0 else "rollout/decode_greedy"
    if rollout.decode_mode == "beam":
        decode_metric = "rollout/decode_beam"
    queue = RolloutQueue(
        backend,
        AnswerReader(vocab, matching),
        config.training.seed,
        ahead=rollout.rollouts_ahead > 0,
        decode_metric=decode_metric,
    )
    two_channels = variant == "stage2_two_channel"
    pipeline = rollout_pipeline(config)
    weights = SupervisionWeights.from_pipeline(pipeline, "B", with_matched_prefix=two_channels)
    targets = replace(targets, weights=weights)
    objective = RowObjective(build_pipeline(pipeline), vocab.coord_token_ids)
    if not two_channels:
        return {None: Task(objective, carrying, targets, queue)}, None

    two = config.stage2_ab
    assert two is not None, "the schema requires stage2_ab for this variant"
    draining = RowPlanner(None, capacity=capacity, drain=True, min_fill_ratio=min_fill_ratio)
    from_truth = replace(targets, weights=SupervisionWeights.from_pipeline(two.pipeline, "A"))
    self_context = SelfContext(
        two.n_softctx_iter, two.coord_ctx_embed_mode, two.softctx_grad_mode, two.softctx_temperature
    )
    objective_a = RowObjective(
        build_pipeline(two.pipeline, "A"),
        vocab.coord_token_ids,
        None if self_context.iterations == 1 else self_context,  # a single forward has no self-context
    )
    tasks: dict[Channel | None, Task] = {
        "A": Task(objective_a, carrying, from_truth, channel="A"),
        "B": Task(objective, draining, replace(targets, drop_unclosed=True), queue, channel="B"),
    }
    return tasks, ChannelSchedule.from_ratio(two.schedule.b_ratio)


def rollout_pipeline(config: RunConfig) -> PipelineConfig:
    """The declared objective of rollouts: of rollout matching, or of two-channel training, in its Channel-B. Raises
    ConfigError if ``config`` declares none; stage 1 has no rollouts."""
    two_channels = config.custom.trainer_variant == "stage2_two_channel"
    section = config.stage2_ab if two_channels else config.rollout_matching
    if section is None or section.pipeline is None:
        raise ConfigError(
            "rollout_matching.pipeline: missing, so rollouts have no objective; give the configuration of a stage-2 run"
        )
    return section.pipeline
