"""Lengths that a checkpoint cannot have are refused where they are written, before anything is loaded or started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp.checkpoints.folder import Checkpoint, check_lengths, length_advice, num_positions
from coordexp.config import RunConfig, parse_config
from coordexp.errors import ConfigError
from coordexp.training.checked_run import check_run
from support.config_samples import set_key, stage2
from support.tiny_run import run_config


def checkpoint(folder: Path, **text: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 16384,
          "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({}, None),
    ],
)  # fmt: skip
def test_the_limit_is_the_text_models(text: dict[str, Any], limit: int | None, tmp_path: Path) -> None:
    assert num_positions(checkpoint(tmp_path, **text)) == limit


def test_unreadable_checkpoints_have_no_limit(tmp_path: Path) -> None:
    assert num_positions(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert num_positions(tmp_path) is None


def config_of(folder: Path, **keys: Any) -> RunConfig:
    raw = stage2()
    given = {"model__model": str(checkpoint(folder, max_position_embeddings=4096)), "global_max_length": 2048}
    for key, value in (given | keys).items():
        raw = set_key(raw, key.replace("__", "."), value)
    return parse_config(raw, "run.yaml")


VLLM = {"rollout_matching__rollout_backend": "vllm", "rollout_matching__max_new_tokens": 100}
TOO_LONG = [
    (VLLM | {"global_max_length": 5000}, "global_max_length: 5000 is more than an engine can have, .* 4096 or less"),
    (VLLM | {"rollout_matching__vllm__max_model_len": 9000}, r"rollout_matching\.vllm\.max_model_len: 9000 .* 4096"),
    ({"rollout_matching__max_new_tokens": 4096, "global_max_length": 9000},
     r"rollout_matching\.max_new_tokens: 4096 leaves no room for a prompt; write less than 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), TOO_LONG)
def test_longer_than_the_checkpoint_is_refused_with_key_value_and_limit(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message + ".*4096 positions"):
        check_lengths(config_of(tmp_path, **keys))


@pytest.mark.parametrize(
    "keys",
    [{}, VLLM | {"global_max_length": 4096}, VLLM | {"global_max_length": 1000, "model__model": "elsewhere"},
     {"rollout_matching__rollout_backend": "hf", "global_max_length": 9000}],
)  # fmt: skip
def test_lengths_that_fit_or_are_unknown_pass(keys: dict[str, Any], tmp_path: Path) -> None:
    check_lengths(config_of(tmp_path, **keys))


def test_another_checkpoint_has_its_own_limit(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = config_of(tmp_path, **VLLM, global_max_length=4096)
    check_lengths(config)
    with pytest.raises(ConfigError, match=r"global_max_length: 4096 .*2048"):
        check_lengths(config, checkpoint(other, max_position_embeddings=2048))


def test_rows_beyond_the_positions_are_advised_against(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout_matching__rollout_backend="hf", global_max_length=9000)
    opened = Checkpoint.open(config.model.model)
    (said,) = length_advice(config, opened)
    assert said.startswith("global_max_length: 9000 is more than the 4096 positions")
    assert not list(length_advice(config_of(tmp_path, global_max_length=4096), opened))


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens: 8192"):
        check_run(run_config(tmp_path, 2, rollout_matching__max_new_tokens=8192, global_max_length=9000))
