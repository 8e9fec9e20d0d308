"""``rollout_matching.vllm.engine_args``: vLLM's arguments by their own names."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
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
        ({"max_num_seqs": 0}, "max_num_seqs: expected at least 1, got 0"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill: expected boolean, got 1"),
        ({"compilation_config": 3}, "compilation_config: expected object, got 3"),
        ({"atention_backend": "FLASH_ATTN"}, "did you mean 'attention_backend'?"),
        ({"quantization": "fp8"}, "'quantization' is not an argument that a run may set; possible here: "),
        ({"seed": 1}, "'seed' is not an argument that a run may set"),
        ({"max_model_len": 4}, "'max_model_len' is not an argument that a run may set"),
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


def test_vllm_has_these_arguments() -> None:
    """By its source: importing it takes seconds."""
    if (spec := importlib.util.find_spec("vllm")) is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    (engine_args,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "EngineArgs"]
    fields = {ast.unparse(one.target) for one in engine_args.body if isinstance(one, ast.AnnAssign)}
    assert ENGINE_ARGS.keys() <= fields
    assert not ENGINE_ARGS.keys() & VLLMConfig.model_fields.keys()
