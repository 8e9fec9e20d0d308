"""``rollout_matching.vllm.engine_args``: vLLM's arguments by their own names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from coordexp.config import ConfigError, parse_config
from coordexp.config.engine_args import ENGINE_ARGS
from coordexp.config.rollout import VLLMConfig
from support.config_samples import set_key, stage2

KEY = "rollout_matching.vllm.engine_args"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_backend": 1}, "attention_backend: expected string, got 1"),
        ({"block_size": True}, "block_size: expected integer, got True"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill: expected boolean, got 1"),
        ({"compilation_config": 3}, "compilation_config: expected object, got 3"),
        ({"atention_backend": "FLASH_ATTN"}, "did you mean 'attention_backend'?"),
        ({"quantization": "fp8"}, "'quantization' is not an argument that a run may set; possible here: "),
        ({"seed": 1}, "'seed' is not an argument that a run may set"),
        ({"max_num_seqs": 4}, "'max_num_seqs' is not an argument that a run may set"),
    ],
    ids=str,
)
def test_other_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_config(set_key(stage2(), KEY, given))
    assert KEY in str(caught.value)


def test_null_leaves_an_argument_to_vllm() -> None:
    config = parse_config(set_key(stage2(), KEY, {"block_size": None, "cpu_offload_gb": 1}))
    assert config.rollout_matching is not None
    assert config.rollout_matching.vllm.given_args == {"cpu_offload_gb": 1}


@pytest.mark.parametrize("name", ["kv_cache_dtype", "cpu_offload_gb", "mm_encoder_tp_mode", "enable_chunked_prefill"])
def test_keys_that_moved_there_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm\.{name}: removed; write it under {re.escape(KEY)} instead"):
        parse_config(set_key(stage2(), f"rollout_matching.vllm.{name}", None))


def test_vllm_has_these_arguments() -> None:
    fields = {field.name for field in dataclasses.fields(pytest.importorskip("vllm.engine.arg_utils").EngineArgs)}
    assert ENGINE_ARGS.keys() <= fields
    assert not ENGINE_ARGS.keys() & VLLMConfig.model_fields.keys()
