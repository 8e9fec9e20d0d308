"""The neutral metrics payload: what loggers may rely on."""

import math

import numpy as np
import pytest

from coordexp.metrics import MetricsPayload
from coordexp.metrics.reduce import SCHEMA_VERSION


def test_a_payload_keeps_its_numbers_and_says_its_version():
    payload = MetricsPayload("train", 3, {"loss/token_ce/struct_ce": 0.5, "rollout/samples_total": 4})
    assert (payload.schema_version, payload.mode, payload.global_step) == (SCHEMA_VERSION, "train", 3)
    assert payload.metrics == {"loss/token_ce/struct_ce": 0.5, "rollout/samples_total": 4}


@pytest.mark.parametrize("value", [0, -1, 0.5, math.nan, math.inf, np.float64(2.0)])
def test_numbers_are_welcome(value):
    MetricsPayload("eval", 0, {"a": value})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"metrics": {"a": True}}, "metric a is True; metrics are numbers"),
        ({"metrics": {"a": np.bool_(True)}}, "metrics are numbers"),
        ({"metrics": {"a": "1"}}, "metric a is '1'"),
        ({"metrics": {"a": None}}, "metric a is None"),
        ({"metrics": {"": 1}}, "non-empty strings, not ''"),
        ({"metrics": {3: 1}}, "non-empty strings, not 3"),
        ({"schema_version": 2}, "schema 2; this version speaks 1"),
        ({"schema_version": "1"}, "schema '1'"),
        ({"schema_version": True}, "schema True"),
        ({"schema_version": 1.0}, r"schema 1\.0"),
        ({"schema_version": None}, "schema None"),
        ({"mode": "test"}, "mode 'test'; expected 'train' or 'eval'"),
        ({"global_step": True}, "step True"),
        ({"global_step": -1}, "step -1"),
        ({"global_step": 2.0}, r"step 2\.0"),
    ],
)
def test_anything_else_is_refused(changes, complaint):
    fields = {"mode": "train", "global_step": 1, "metrics": {}} | changes
    with pytest.raises(ValueError, match=complaint):
        MetricsPayload(**fields)
