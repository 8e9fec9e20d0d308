"""A default stands in one place. Public calls below ``config`` cannot read it there: theirs are compared with it."""

from __future__ import annotations

import inspect

import pytest

from coordexp.config.data import CustomConfig
from coordexp.config.rollout import DecodingConfig, RolloutMatchingConfig
from coordexp.config.strict import default_of
from coordexp.coords import serialize_append, serialize_objects
from coordexp.geometry import barycentric_targets, mask_iou
from coordexp.matching import MatchingConfig
from coordexp.rollouts.backend import DecodingOptions
from coordexp.targets import TransportConfig


def test_public_calls_default_to_the_keys() -> None:
    keys = {
        (serialize_append, "field_order"): default_of(CustomConfig, "object_field_order"),
        (serialize_objects, "field_order"): default_of(CustomConfig, "object_field_order"),
        (mask_iou, "resolution"): default_of(RolloutMatchingConfig, "maskiou_resolution"),
        **{(barycentric_targets, key): default_of(RolloutMatchingConfig, f"ot_{key}") for key in
           ("cost", "epsilon", "iters")},
    }  # fmt: skip
    found = {(call, name): inspect.signature(call).parameters[name].default for call, name in keys}
    assert found == keys


def test_records_that_may_be_built_without_a_yaml_take_its_defaults() -> None:
    section = RolloutMatchingConfig()
    fields = MatchingConfig.__dataclass_fields__
    assert {key: getattr(section, key) for key in fields} == {key: getattr(MatchingConfig(), key) for key in fields}
    assert TransportConfig() == TransportConfig(section.ot_cost, section.ot_epsilon, section.ot_iters)


def test_decoding_options_have_no_default_of_their_own() -> None:
    parameters = inspect.signature(DecodingOptions).parameters.values()
    assert {one.name for one in parameters if one.default is not one.empty} == set()


def test_a_required_key_has_no_default() -> None:
    with pytest.raises(AssertionError, match="train_jsonl has no default"):
        default_of(CustomConfig, "train_jsonl")
    assert default_of(DecodingConfig, "top_k") == -1
