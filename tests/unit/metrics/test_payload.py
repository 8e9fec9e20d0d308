"""The metrics payload that all loggers share."""

import math

import numpy as np
import pytest

from coordexp.metrics import MetricsPayload
from coordexp.metrics.reduce import SCHEMA_VERSION


@pytest.mark.parametrize("value", [0, -1, 0.5, math.inf, np.float64(2.0)])
def test_payload_keeps_its_numbers_and_version(value):
    payload = MetricsPayload("train", 3, {"rollout/samples_total": value})
    assert (payload.schema_version, payload.mode, payload.global_step) == (SCHEMA_VERSION, "train", 3)
    assert payload.metrics == {"rollout/samples_total": value}


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"metrics": {"a": True}}, "True"),
        ({"metrics": {"a": np.bool_(True)}}, "metric a"),
        ({"metrics": {"a": "1"}}, "'1'"),
        ({"metrics": {"a": None}}, "metric a is None"),
        ({"metrics": {"": 1}}, "''"),
        ({"metrics": {3: 1}}, "3"),
        ({"schema_version": 2}, "schema 2"),
        ({"schema_version": "1"}, "schema '1'"),
        ({"schema_version": True}, "schema True"),
        ({"schema_version": 1.0}, r"schema 1\.0"),
        ({"schema_version": None}, "schema None"),
        ({"mode": "test"}, "test"),
        ({"global_step": True}, "step True"),
        ({"global_step": -1}, "step -1"),
        ({"global_step": 2.0}, r"step 2\.0"),
    ],
)
def test_other_values_are_refused(changes, value):
    fields = {"mode": "train", "global_step": 1, "metrics": {}} | changes
    with pytest.raises(ValueError, match=value):
        MetricsPayload(**fields)
