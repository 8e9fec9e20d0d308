"""Defaults and shipped values that the specification states, as literals: a changed default must fail here, not only in
generated files. The last column names the specification's text and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config import RunConfig, load_config, parse_config
from coordexp.config.resolved import resolved_rollout
from support.config_samples import drop_key, set_key, stage2

CONFIGS = Path(__file__).parents[3] / "configs"
RM = "rollout_matching"
SERVER = f"{RM}.vllm.server"

# Key, default, text:line.
DEFAULTS = [
    (f"{RM}.rollout_backend", "vllm", "000:169"),
    (f"{RM}.vllm.mode", "colocate", "000:176"),
    (f"{RM}.vllm.gpu_memory_utilization", 0.45, "000:189"),
    (f"{RM}.vllm.tensor_parallel_size", 4, "000:190"),
    (f"{SERVER}.timeout_s", 240.0, "000:214"),
    (f"{SERVER}.infer_timeout_s", None, "000:216"),
    (f"{RM}.vllm.sync.mode", "full", "000:238"),
    (f"{RM}.vllm.sync.fallback_to_full", True, "000:239"),
    (f"{RM}.decode_batch_size", 1, "000:409"),
    (f"{RM}.offload.enabled", False, "000:549"),
    (f"{RM}.offload.offload_model", False, "000:550"),
    (f"{RM}.offload.offload_optimizer", False, "000:551"),
    (f"{RM}.maskiou_resolution", 256, "000:796"),
    (f"{RM}.decoding.temperature", 0.0, "000:903"),
    (f"{RM}.decoding.top_p", 1.0, "000:904"),
    (f"{RM}.decoding.top_k", -1, "000:905"),
    (f"{RM}.fp_cost", 1.0, "ruling 15"),
    (f"{RM}.fn_cost", 1.0, "ruling 15"),
    (f"{RM}.repeat_terminate.enabled", False, "ruling 18"),
    (f"{RM}.repeat_terminate.min_new_tokens", 256, "ruling 18"),
    (f"{RM}.repeat_terminate.max_consecutive_token_repeats", 64, "ruling 18"),
    (f"{RM}.repeat_terminate.ngram_size", 64, "ruling 18"),
    (f"{RM}.repeat_terminate.ngram_repeats", 2, "ruling 18"),
    (f"{RM}.repeat_terminate.max_object_keys", None, "ruling 18"),
    (f"{RM}.target.answer", "as_written", "ruling 21"),
    (f"{RM}.ot_epsilon", None, "ruling 22"),
    ("training.packing_drop_last", True, "000:126"),
]

# File, key, value, text:line.
SHIPPED = [
    ("stage2_rollout_aligned/base.yaml", f"{RM}.pipeline.objective.0.config.rollout_fn_desc_weight", 0.0, "ruling 8"),
    ("stage2_rollout_aligned/hf.yaml", f"{RM}.target.answer", "as_written", "ruling 21"),
    ("stage2_rollout_aligned/colocate.yaml", f"{RM}.target.answer", "as_written", "ruling 21"),
    ("stage2_rollout_aligned/server.yaml", f"{RM}.target.answer", "as_written", "ruling 21"),
    ("stage2_rollout_aligned/server_3v1.yaml", f"{RM}.target.answer", "as_written", "ruling 21"),
    ("stage2_rollout_aligned/server_multi_node.yaml", f"{RM}.target.answer", "as_written", "ruling 21"),
    ("stage2_rollout_aligned/rewritten.yaml", f"{RM}.target.answer", "rewritten", "ruling 21"),
    ("stage2_rollout_aligned/base.yaml", "training.packing_drop_last", True, "000:126"),
    ("stage2_two_channel/base.yaml", f"{RM}.decode_batch_size", 4, "000:410"),
    ("stage2_two_channel/prod.yaml", f"{RM}.decode_batch_size", 64, "shipped value"),
    ("stage2_two_channel/base.yaml", "custom.trainer_variant", "stage2_two_channel", "ruling 2"),
    ("stage2_rollout_aligned/base.yaml", "custom.trainer_variant", "stage2_rollout_aligned", "ruling 2"),
]


def value_of(config: RunConfig, key: str) -> Any:
    here: Any = config
    for part in key.split("."):
        here = here[int(part)] if part.isdigit() else getattr(here, part)
    return here


@pytest.mark.parametrize(("key", "value", "stated"), DEFAULTS, ids=[key for key, *_ in DEFAULTS])
def test_defaults_are_those_of_the_specification(key: str, value: Any, stated: str) -> None:
    config = drop_key(stage2(), f"{RM}.rollout_backend")
    if key.startswith(SERVER):
        server = {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]}
        config = set_key(config, f"{RM}.vllm", {"mode": "server", "server": server})
    found = value_of(parse_config(config), key)
    assert (found, type(found)) == (value, type(value)), stated


@pytest.mark.parametrize(
    ("name", "key", "value", "stated"), SHIPPED, ids=[f"{name}:{key}" for name, key, *_ in SHIPPED]
)
def test_shipped_values_are_those_of_the_specification(name: str, key: str, value: Any, stated: str) -> None:
    assert value_of(load_config(CONFIGS / name), key) == value, stated


def test_auto_sync_pushes_adapters_where_the_engine_takes_them() -> None:
    """000:236."""
    config = set_key(drop_key(stage2(), f"{RM}.rollout_backend"), f"{RM}.vllm.sync.mode", "auto")
    assert resolved_rollout(parse_config(config)).vllm.sync.mode == "full"
