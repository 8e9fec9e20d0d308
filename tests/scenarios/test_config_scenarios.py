"""Scenarios of the contract that the configuration alone settles: wrong YAML stops before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config import ConfigError, load_config
from support.config_samples import drop_key, set_key, stage2, write_yaml


def refusal(tmp_path: Path, raw: dict[str, Any]) -> str:
    """The text with which loading ``raw`` fails; that the same file without the mistake loads is checked first."""
    assert load_config(write_yaml(tmp_path, stage2(), "valid.yaml")).rollout_matching is not None
    with pytest.raises(ConfigError) as caught:
        load_config(write_yaml(tmp_path, raw))
    return str(caught.value)


@pytest.mark.scenario("Missing rollout pipeline fails fast")
@pytest.mark.parametrize("missing", ["rollout_matching.pipeline", "rollout_matching"])
def test_missing_pipeline(tmp_path: Path, missing: str) -> None:
    assert "rollout_matching.pipeline is required" in refusal(tmp_path, drop_key(stage2(), missing))


@pytest.mark.scenario("Multi-server pairing is strict and deterministic")
@pytest.mark.scenario("Legacy rollout server paired-list shape fails fast")
@pytest.mark.parametrize(("url", "port"), [("http://a:8000", 51216), (["http://a:8000", "http://b:8000"], [1, 2])])
def test_paired_server_lists(tmp_path: Path, url: object, port: object) -> None:
    server = {"mode": "server", "server": {"base_url": url, "group_port": port}}
    text = refusal(tmp_path, stage2(rollout_backend="vllm", vllm=server))
    for key in ("base_url", "group_port"):
        line = next(line for line in text.splitlines() if line.startswith(f"  rollout_matching.vllm.server.{key} "))
        assert "rollout_matching.vllm.server.servers[]" in line


@pytest.mark.scenario("Legacy decode key path fails fast")
def test_old_path_of_decode_batch_size(tmp_path: Path) -> None:
    text = refusal(tmp_path, set_key(stage2(), "custom.extra.rollout_matching.decode_batch_size", 4))
    assert "custom.extra.rollout_matching.decode_batch_size" in text
    assert "write rollout_matching.decode_batch_size instead" in text


@pytest.mark.scenario("Legacy rollout backend key path fails fast")
def test_old_path_of_rollout_backend(tmp_path: Path) -> None:
    text = refusal(tmp_path, set_key(stage2(), "custom.extra.rollout_matching.rollout_backend", "hf"))
    assert "custom.extra.rollout_matching.rollout_backend" in text
    assert "write rollout_matching.rollout_backend instead" in text


@pytest.mark.scenario("Unknown rollout key fails before rollout trainer execution")
def test_unknown_rollout_key(tmp_path: Path) -> None:
    text = refusal(tmp_path, stage2(unknown_rollout_key=1))
    assert "rollout_matching.unknown_rollout_key" in text and "unknown key" in text


@pytest.mark.scenario("Unknown nested decoding key fails before execution")
def test_unknown_decoding_key(tmp_path: Path) -> None:
    text = refusal(tmp_path, stage2(decoding={"unknown_decoding_key": 1}))
    assert "rollout_matching.decoding.unknown_decoding_key" in text and "unknown key" in text


@pytest.mark.parametrize(
    ("key", "value", "guidance"),
    [
        pytest.param(
            "rollout_generate_batch_size",
            4,
            "write rollout_matching.decode_batch_size instead",
            marks=pytest.mark.scenario("rollout_generate_batch_size fails fast when present"),
        ),
        pytest.param(
            "rollout_infer_batch_size",
            4,
            "write rollout_matching.decode_batch_size instead",
            marks=pytest.mark.scenario("rollout_infer_batch_size fails fast when present"),
        ),
        pytest.param(
            "post_rollout_pack_scope",
            "window",
            "post_rollout_pack_scope has no replacement",
            marks=pytest.mark.scenario("post_rollout_pack_scope fails fast when present"),
        ),
        pytest.param(
            "rollout_buffer",
            {"enabled": False},
            "rollout_buffer has no replacement",
            marks=pytest.mark.scenario("rollout_buffer fails fast when present"),
        ),
    ],
)
def test_removed_rollout_key(tmp_path: Path, key: str, value: object, guidance: str) -> None:
    text = refusal(tmp_path, stage2(**{key: value}))
    assert f"rollout_matching.{key} " in text and guidance in text and "unknown key" not in text


@pytest.mark.scenario("Legacy decoding keys fail fast")
@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("section", ["rollout_matching", "custom.extra.rollout_matching"])
def test_decoding_keys_outside_decoding(tmp_path: Path, section: str, key: str) -> None:
    text = refusal(tmp_path, set_key(stage2(), f"{section}.{key}", 1))
    assert f"{section}.{key}" in text and f"write rollout_matching.decoding.{key} instead" in text
