"""Scenarios of the contract that the configuration alone settles: wrong YAML stops before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import mark

from coordexp.config import ConfigError, load_config
from support.config_samples import drop_key, set_key, stage2, write_yaml


def refusal(tmp_path: Path, raw: dict[str, Any]) -> str:
    """The text with which loading ``raw`` fails; that the same file without the mistake loads is checked first."""
    assert load_config(write_yaml(tmp_path, stage2(), "valid.yaml")).rollout_matching is not None
    with pytest.raises(ConfigError) as caught:
        load_config(write_yaml(tmp_path, raw))
    return str(caught.value)


@mark.scenario("Missing rollout pipeline fails fast")
@mark.parametrize("missing", ["rollout_matching.pipeline", "rollout_matching"])
def test_missing_pipeline(tmp_path: Path, missing: str) -> None:
    assert "rollout_matching.pipeline is required" in refusal(tmp_path, drop_key(stage2(), missing))


@mark.scenario("Multi-server pairing is strict and deterministic")
@mark.scenario("Legacy rollout server paired-list shape fails fast")
@mark.parametrize(("url", "port"), [("http://a:8000", 51216), (["http://a:8000", "http://b:8000"], [1, 2])])
def test_paired_server_lists(tmp_path: Path, url: object, port: object) -> None:
    server = {"mode": "server", "server": {"base_url": url, "group_port": port}}
    text = refusal(tmp_path, stage2(rollout_backend="vllm", vllm=server))
    for key in ("base_url", "group_port"):
        line = next(line for line in text.splitlines() if line.startswith(f"  rollout_matching.vllm.server.{key} "))
        assert "rollout_matching.vllm.server.servers[]" in line


MICROBATCH = "write rollout_matching.decode_batch_size instead"
UNKNOWN = "unknown key"
REFUSED = [
    (mark.scenario("Legacy decode key path fails fast"),
     "custom.extra.rollout_matching.decode_batch_size", 4, MICROBATCH),
    (mark.scenario("Legacy rollout backend key path fails fast"),
     "custom.extra.rollout_matching.rollout_backend", "hf", "write rollout_matching.rollout_backend instead"),
    (mark.scenario("Unknown rollout key fails before rollout trainer execution"),
     "rollout_matching.unknown_rollout_key", 1, UNKNOWN),
    (mark.scenario("Unknown nested decoding key fails before execution"),
     "rollout_matching.decoding.unknown_decoding_key", 1, UNKNOWN),
    (mark.scenario("rollout_generate_batch_size fails fast when present"),
     "rollout_matching.rollout_generate_batch_size", 4, MICROBATCH),
    (mark.scenario("rollout_infer_batch_size fails fast when present"),
     "rollout_matching.rollout_infer_batch_size", 4, MICROBATCH),
    (mark.scenario("post_rollout_pack_scope fails fast when present"),
     "rollout_matching.post_rollout_pack_scope", "window", "post_rollout_pack_scope has no replacement"),
    (mark.scenario("rollout_buffer fails fast when present"),
     "rollout_matching.rollout_buffer", {"enabled": False}, "rollout_buffer has no replacement"),
    *((mark.scenario("Legacy decoding keys fail fast"),
       f"{section}.{key}", 1, f"write rollout_matching.decoding.{key} instead")
      for section in ("rollout_matching", "custom.extra.rollout_matching")
      for key in ("temperature", "top_p", "top_k")),
]  # fmt: skip


@mark.parametrize(
    ("key", "value", "guidance"), [pytest.param(*row, marks=scenario, id=row[0]) for scenario, *row in REFUSED]
)
def test_a_removed_or_unknown_key_is_refused_with_its_replacement(
    tmp_path: Path, key: str, value: object, guidance: str
) -> None:
    text = refusal(tmp_path, set_key(stage2(), key, value))
    assert f"{key} " in text and guidance in text
    assert (UNKNOWN in text) is (guidance == UNKNOWN)
