"""What a rollout's own prefix teaches: nothing but coordinates, unless Channel-B says that a match vouches for text."""

from __future__ import annotations

import pytest

from coordexp.config import parse_config
from coordexp.config.objective import PipelineConfig, TokenCEConfig
from coordexp.objective import SupervisionCounts, SupervisionTensors, build_pipeline
from coordexp.objective.modules import TokenCE
from coordexp.packing import build_row
from coordexp.records import TokenRole as R
from support.config_samples import stage2
from support.objective_rows import segments


def declared() -> PipelineConfig:
    config = parse_config(stage2()).rollout_matching
    assert config is not None and config.pipeline is not None
    return config.pipeline


def token_ce(*, channel_b_of_two: bool) -> TokenCE:
    pipeline = build_pipeline(declared(), "B", with_matched_prefix=channel_b_of_two)
    return next(entry.module for entry in pipeline.objective if isinstance(entry.module, TokenCE))


@pytest.mark.parametrize(
    ("channel_b_of_two", "with_text_loss"),
    [
        (False, {R.TAIL_STRUCT, R.CLOSE, R.EOS, R.TAIL_DESC}),  # rollout-aligned: no text of the prefix
        (True, {R.TAIL_STRUCT, R.CLOSE, R.EOS, R.TAIL_DESC, R.PREFIX_STRUCT}),
    ],
)
def test_which_roles_have_a_text_loss(channel_b_of_two: bool, with_text_loss: set[R]) -> None:
    found = SupervisionTensors.from_row(build_row(segments()))
    module = TokenCE(1.0, 1.0, 1.0, with_matched_prefix=token_ce(channel_b_of_two=channel_b_of_two).with_matched_prefix)
    wanted_N = module.wants(found).vocab_N
    assert wanted_N is not None
    assert {R(int(role)) for role in found.role_N[wanted_N]} == with_text_loss
    assert {R(int(role)) for role in found.role_N} >= with_text_loss | {R.PREFIX_COORD}
    # Descriptions of matched objects, and everything about unmatched ones, cannot even be asked for.
    assert not {R.PREFIX_DESC, R.PREFIX_MASKED} & {R(int(role)) for role in found.role_N}
    counts = SupervisionCounts.from_targets(segment.target for segment in segments())
    assert module.denominators(counts)["struct_ce"] == int(wanted_N.sum())


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.0, 1.0, 1.0)])
def test_the_mean_is_over_the_tokens_that_have_a_weight(weights: tuple[float, float, float]) -> None:
    """Structure, descriptions of the annotation, descriptions behind a rollout: what weighs nothing counts nowhere."""
    module = TokenCE(*weights)
    wanted_N = module.wants(SupervisionTensors.from_row(build_row(segments()))).vocab_N
    assert wanted_N is not None
    counts = SupervisionCounts.from_targets(segment.target for segment in segments())
    assert counts.desc_gt > 0 and counts.desc_rollout > 0
    assert set(module.denominators(counts).values()) == {int(wanted_N.sum())}


def test_the_weights_of_the_tail_are_those_that_are_declared() -> None:
    config = next(spec.config for spec in declared().objective if spec.name == "token_ce")
    assert isinstance(config, TokenCEConfig)
    module = token_ce(channel_b_of_two=True)
    assert (module.struct_ce_weight, module.desc_ce_weight, module.rollout_fn_desc_weight) == (
        config.struct_ce_weight, config.desc_ce_weight, config.rollout_fn_desc_weight,
    )  # fmt: skip


def test_a_weight_of_zero_turns_matched_structure_off_too() -> None:
    found = SupervisionTensors.from_row(build_row(segments()))
    module = TokenCE(0.0, 1.0, 1.0, with_matched_prefix=True)
    wanted_N = module.wants(found).vocab_N
    assert wanted_N is not None and {R(int(role)) for role in found.role_N[wanted_N]} == {R.TAIL_DESC}
    counts = SupervisionCounts.from_targets(segment.target for segment in segments())
    assert module.denominators(counts)["desc_ce"] == counts.desc_gt + counts.desc_rollout
