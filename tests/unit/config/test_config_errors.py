"""One row per mistake: where it is, and what the message must say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_samples import drop_key, module, set_key, stage1, stage2
from coordexp.config import ConfigError, RunConfig, check_world_size, parse_config
from coordexp.config.legacy import REMOVED_KEYS, REMOVED_VALUES

RM = "rollout_matching"
OBJ = f"{RM}.pipeline.objective"
SERVER = {"servers": [{"base_url": "http://a:8000", "group_port": 51216}]}

# (key set in a valid stage-2 configuration, its value, path named by the error, words of the message)
WRONG = [
    ("modle", {}, "modle", "did you mean 'model'"),
    ("extra", {}, "extra", "unknown key"),
    ("model.modl", "x", "model.modl", "did you mean 'model'"),
    ("model.model", "", "model.model", "at least 1 character"),
    ("model.model", 3, "model.model", "put it in quotes"),
    ("model.dtype", "fp32", "model.dtype", "'float32', 'bfloat16' or 'float16'"),
    ("model.attn_implementation", "eager", "model.attn_implementation", "'flash' or 'sdpa'"),
    ("tuner.freeze_vit", "yes", "tuner.freeze_vit", "write true or false"),
    ("tuner.freeze_vit", 1, "tuner.freeze_vit", "valid boolean"),
    ("model", None, "model", "an empty section"),
    ("template.system", 5, "template.system", "put it in quotes"),
    ("template.max_lenght", 5, "template.max_lenght", "unknown key"),
    ("data.num_workers", -1, "data.num_workers", "greater than or equal to 0"),
    ("data.num_workers", 2.0, "data.num_workers", "write 2"),
    ("custom.trainer_variant", "stage3", "custom.trainer_variant", "'stage2_rollout_aligned' or 'stage2_two_channel'"),
    ("custom.train_jsonl", None, "custom.train_jsonl", "got null"),
    ("custom.train_jsonl", " ", "custom.train_jsonl", "JSONL of the training samples"),
    ("custom.train_sample_limit", 0, "custom.train_sample_limit", "greater than or equal to 1"),
    ("custom.object_field_order", "desc-first", "custom.object_field_order", "'desc_first' or 'geometry_first'"),
    ("custom.object_ordering", "sort", "custom.object_ordering", "'sorted', 'random' or 'file'"),
    ("custom.coord_soft_ce_w1", {"enabled": False}, "custom.coord_soft_ce_w1", "rollout_matching.pipeline"),
    ("custom.coord_soft_ce_w1", {"sigma": 1}, "custom.coord_soft_ce_w1.sigma", "unknown key"),
    ("custom.extra", {"x": 1}, "custom.extra", "unknown key"),
    ("training.output_dir", 3, "training.output_dir", "folder of checkpoints"),
    ("training.learning_rate", "3e-4", "training.learning_rate", "without quotes"),
    ("training.learning_rate", -1.0, "training.learning_rate", "greater than or equal to 0"),
    ("training.learning_rate", float("nan"), "training.learning_rate", "finite number"),
    ("training.learning_rte", 1.0, "training.learning_rte", "did you mean 'learning_rate'"),
    ("training.seed", True, "training.seed", "valid integer"),
    ("training.report_to", 7, "training.report_to", "valid tuple"),
    ("training.report_to", ["wandb", 1], "training.report_to[1]", "valid string"),
    ("training.save_strategy", True, "training.save_strategy", "'no', 'steps' or 'epoch'"),
    ("training.resume_from_checkpoint", 5, "training.resume_from_checkpoint", "null, true or a checkpoint folder"),
    ("training.packing_drop_last", False, "training.packing_drop_last", "must be true with training.packing"),
    ("training.packing_buffer", 0, "training.packing_buffer", "greater than or equal to 1"),
    ("training.packing_min_fill_ratio", 1.5, "training.packing_min_fill_ratio", "less than or equal to 1"),
    ("training.effective_batch_size", 0, "training.effective_batch_size", "greater than or equal to 1"),
    ("global_max_length", "2048", "global_max_length", "without quotes"),
    ("global_max_length", 0, "global_max_length", "greater than 0"),
    (RM, [], RM, "a list"),
    (f"{RM}.pipline", {}, f"{RM}.pipline", "did you mean 'pipeline'"),
    (f"{RM}.rollout_backend", "vLLM", f"{RM}.rollout_backend", "'hf' or 'vllm'"),
    (f"{RM}.decode_batch_size", 0, f"{RM}.decode_batch_size", "greater than or equal to 1"),
    (f"{RM}.decode_batch_size", "4", f"{RM}.decode_batch_size", "without quotes"),
    (f"{RM}.decode_mode", "sample", f"{RM}.decode_mode", "'greedy' or 'beam'"),
    (f"{RM}.num_beams", 4, f"{RM}.num_beams", "decode_mode: beam"),
    (f"{RM}.decode_mode", "beam", f"{RM}.num_beams", "at least 2"),
    (f"{RM}.max_new_tokens", 2048, f"{RM}.max_new_tokens", "raise global_max_length"),
    (f"{RM}.repetition_penalty", 0, f"{RM}.repetition_penalty", "greater than 0"),
    (f"{RM}.decoding.temperature", -0.1, f"{RM}.decoding.temperature", "greater than or equal to 0"),
    (f"{RM}.decoding.top_p", 0, f"{RM}.decoding.top_p", "greater than 0"),
    (f"{RM}.decoding.top_p", 1.01, f"{RM}.decoding.top_p", "less than or equal to 1"),
    (f"{RM}.decoding.top_k", 0, f"{RM}.decoding.top_k", "write -1"),
    (f"{RM}.decoding.top_k", -2, f"{RM}.decoding.top_k", "greater than or equal to -1"),
    (f"{RM}.decoding.topp", 1, f"{RM}.decoding.topp", "did you mean 'top_p'"),
    (f"{RM}.maskiou_gate", 1.2, f"{RM}.maskiou_gate", "less than or equal to 1"),
    (f"{RM}.maskiou_resolution", 0, f"{RM}.maskiou_resolution", "greater than or equal to 8"),
    (f"{RM}.candidate_top_k", 0, f"{RM}.candidate_top_k", "greater than or equal to 1"),
    (f"{RM}.fp_cost", -1, f"{RM}.fp_cost", "greater than or equal to 0"),
    (f"{RM}.ot_cost", "linf", f"{RM}.ot_cost", "'l1' or 'l2'"),
    (f"{RM}.ot_epsilon", 0.0, f"{RM}.ot_epsilon", "greater than 0"),
    (f"{RM}.ot_iters", 0, f"{RM}.ot_iters", "greater than or equal to 1"),
    (f"{RM}.vllm.mode", "servers", f"{RM}.vllm.mode", "'colocate' or 'server'"),
    (f"{RM}.vllm.gpu_memory_utilization", 0, f"{RM}.vllm.gpu_memory_utilization", "greater than 0"),
    (f"{RM}.vllm.server", {"servers": []}, f"{RM}.vllm.server.servers", "at least 1 item"),
    (f"{RM}.vllm.server", {}, f"{RM}.vllm.server.servers", "missing"),
    (
        f"{RM}.vllm.server",
        {"servers": [{"base_url": "http://a"}]},
        f"{RM}.vllm.server.servers[0].group_port",
        "missing",
    ),
    (
        f"{RM}.vllm.server",
        {"servers": [{"base_url": "http://a", "group_port": 1, "unknown_flag": 1}]},
        f"{RM}.vllm.server.servers[0].unknown_flag",
        "unknown key",
    ),
    (
        f"{RM}.vllm.server",
        {"servers": [{"base_url": "a:80", "group_port": 1}]},
        f"{RM}.vllm.server.servers[0].base_url",
        "URL prefix",
    ),
    (f"{RM}.vllm.sync.mode", "lora", f"{RM}.vllm.sync.mode", "'full', 'adapter' or 'auto'"),
    (f"{OBJ}", [], f"{OBJ}", "at least 1 item"),
    (f"{OBJ}[0].name", "token_cee", f"{OBJ}[0].name", "did you mean 'token_ce'"),
    (f"{OBJ}[0].name", "coord_diag", f"{OBJ}[0].name", "unknown module"),
    (f"{OBJ}[0].name", ["token_ce"], f"{OBJ}[0].name", "unknown module"),
    (f"{OBJ}[0]", "token_ce", f"{OBJ}[0]", "token_ce"),
    (f"{OBJ}[0].weight", -1, f"{OBJ}[0].weight", "greater than or equal to 0"),
    (f"{OBJ}[0].wieght", 1, f"{OBJ}[0].wieght", "did you mean 'weight'"),
    (f"{OBJ}[0].channels", "B", f"{OBJ}[0].channels", "write a list, [B]"),
    (f"{OBJ}[0].channels", ["B", "B"], f"{OBJ}[0].channels", "twice"),
    (f"{OBJ}[0].channels", ["B", "C"], f"{OBJ}[0].channels[1]", "'A' or 'B'"),
    (f"{OBJ}[0].config.foo", 1.0, f"{OBJ}[0].config.foo", "unknown key"),
    (f"{OBJ}[0].token_ce", {"token_ce": 1}, f"{OBJ}[0].token_ce", "unknown key"),
    (f"{OBJ}[1].config.temperature", 0, f"{OBJ}[1].config.temperature", "greater than 0"),
    (f"{OBJ}[1].config.target_sigma", 0, f"{OBJ}[1].config.target_sigma", "greater than 0"),
    (f"{OBJ}[2]", module("token_ce", struct_ce_weight=1, desc_ce_weight=1, rollout_fn_desc_weight=0), OBJ, "token_ce"),
    (f"{RM}.pipeline.diagnostics", [module("token_ce")], f"{RM}.pipeline.diagnostics[0].name", "'coord_diag'"),
    (f"{RM}.pipeline.diagnostics[0].config.x", 1, f"{RM}.pipeline.diagnostics[0].config.x", "takes no keys"),
]


@pytest.mark.parametrize(("key", "value", "path", "words"), WRONG, ids=[f"{k}={v!r:.30}" for k, v, _, _ in WRONG])
def test_mistake_is_named_and_explained(key: str, value: Any, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(set_key(stage2(), key, value))
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"  {path}: ")]
    assert lines, str(caught.value)
    assert any(words in line for line in lines), lines


# (rollout_matching keys beside the pipeline, path, words)
TOGETHER = [
    ({"decode_mode": "beam", "num_beams": 4, "rollout_backend": "vllm"}, f"{RM}.decode_mode", "rollout_backend: hf"),
    ({"decode_mode": "beam", "num_beams": 4, "decoding": {"temperature": 0.5}}, f"{RM}.decoding.temperature", "beam"),
    ({"rollout_backend": "vllm", "vllm": {"mode": "server"}}, f"{RM}.vllm.server", "base_url and group_port"),
    ({"rollout_backend": "vllm", "vllm": {"sync": {"mode": "adapter"}}}, f"{RM}.vllm.sync.mode", "enable_lora: true"),
]


@pytest.mark.parametrize(("keys", "path", "words"), TOGETHER)
def test_keys_that_exclude_each_other(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(stage2(**keys))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  {path}: ") and words in line


@pytest.mark.parametrize(
    "path",
    ["model.model", "custom.train_jsonl", "training.output_dir", "global_max_length"]
    + [f"{OBJ}[0].{key}" for key in ("name", "enabled", "weight", "channels", "config")]
    + [f"{OBJ}[1].config.{key}" for key in stage2()[RM]["pipeline"]["objective"][1]["config"]]
    + [f"{RM}.pipeline.{key}" for key in ("objective", "diagnostics")],
)
def test_required_key_has_no_default(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(drop_key(stage2(), path))
    assert f"  {path}: missing" in str(caught.value)


def test_missing_sections_name_the_keys_they_would_hold() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    for path in ("model.model", "custom.train_jsonl", "training.output_dir", "global_max_length"):
        assert f"  {path}: missing" in str(caught.value)


def test_pipeline_without_stage_2_is_refused() -> None:
    config = drop_key(stage2(), "custom.trainer_variant")
    with pytest.raises(ConfigError, match=r"rollout_matching\.pipeline: only stage 2"):
        parse_config(config)


def test_every_problem_is_reported_at_once_also_across_sections() -> None:
    config = set_key(drop_key(stage2(), f"{RM}.pipeline"), "model.dtyp", "float32")
    config = set_key(drop_key(config, "global_max_length"), f"{RM}.rollout_buffer", {})
    config = set_key(config, "training.packing_drop_last", False)
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(named) == sorted(
        ["model.dtyp", "global_max_length", f"{RM}.rollout_buffer", f"{RM}.pipeline", "training.packing_drop_last"]
    )


def test_findings_that_rest_on_a_broken_key_wait_for_it() -> None:
    config = set_key(stage2(), "global_max_length", "4096")
    config[RM]["max_new_tokens"] = 3000  # fine under 4096, not under any default that could stand in
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    assert "max_new_tokens" not in str(caught.value)


def test_model_validation_without_the_loader_checks_sections_too() -> None:
    with pytest.raises(ConfigError, match=r"training\.packing_drop_last"):
        RunConfig.model_validate(set_key(stage1(), "training.packing_drop_last", False))


@pytest.mark.parametrize("row", REMOVED_KEYS, ids=[row.pattern for row in REMOVED_KEYS])
def test_removed_key_brings_its_own_guidance(row: Any) -> None:
    config = stage2(vllm={"server": copy.deepcopy(SERVER)})
    path = row.pattern.replace("pipeline.*.*", "pipeline.objective[1]")
    with pytest.raises(ConfigError) as caught:
        parse_config(set_key(config, path, 1))
    (line,) = str(caught.value).splitlines()[1:]
    assert line == f"  {path}: {row.guidance}"


@pytest.mark.parametrize(("key", "value"), REMOVED_VALUES)
def test_retired_value_brings_its_own_guidance(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(set_key(stage2(), key, value))
    (line,) = str(caught.value).splitlines()[1:]
    assert line == f"  {key}: '{value}' is {REMOVED_VALUES[key, value]}"


@pytest.mark.parametrize("value", [None, {}, {"decoding": {"temperature": 1}, "temperature": 1}])
def test_old_rollout_section_is_sent_to_the_new_one(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(set_key(stage2(), "custom.extra.rollout_matching", value))
    text = str(caught.value)
    assert "custom.extra.rollout_matching" in text and "unknown key" not in text
    if value:
        assert text.count("write rollout_matching.decoding.temperature instead") == 2


@pytest.mark.parametrize(
    ("training", "world_size", "fits"),
    [({}, 8, True), ({"effective_batch_size": 8}, 4, True), ({"effective_batch_size": 6}, 4, False)],
)
def test_effective_batch_size_divides_over_processes(training: dict[str, Any], world_size: int, fits: bool) -> None:
    raw = stage1()
    raw["training"] |= training
    config = parse_config(raw)
    if fits:
        check_world_size(config, world_size)
    else:
        with pytest.raises(ConfigError, match=r"training\.effective_batch_size"):
            check_world_size(config, world_size)


@pytest.mark.parametrize(
    ("mode", "enable_lora", "world_size", "fits"),
    [
        ("full", False, 2, True),
        ("auto", False, 2, True),
        ("adapter", True, 1, True),
        ("adapter", True, 2, False),
        ("auto", True, 2, False),
    ],
)
def test_adapter_sync_works_from_one_learner_only(mode: str, enable_lora: bool, world_size: int, fits: bool) -> None:
    vllm = {"mode": "server", "server": SERVER, "enable_lora": enable_lora, "sync": {"mode": mode}}
    raw = stage2(rollout_backend="vllm", vllm=vllm) | {"tuner": {"train_type": "lora", "train_coord_rows": False}}
    config = parse_config(raw)
    if fits:
        check_world_size(config, world_size)
    else:
        with pytest.raises(ConfigError, match=r"rollout_matching\.vllm\.sync\.mode.*write sync\.mode: full"):
            check_world_size(config, world_size)


def _paths(value: Any, path: str = "") -> list[str]:
    """Every key of a configuration, as a dotted path."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += _paths(item, f"{path}[{index}]")
    return found


_KEYS = [path for path in _paths(stage2()) if not path.endswith("]")]
_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(_KEYS), change=st.sampled_from(["drop", "rename", "retype"]), value=_ODD)
def test_any_change_of_a_key_is_valid_or_a_config_error_naming_it(path: str, change: str, value: Any) -> None:
    config = stage2()
    if change == "retype":
        config = set_key(config, path, value)
    else:
        old = config
        config = drop_key(config, path)
        if change == "rename":
            here: Any = old
            for part in path.replace("]", "").replace("[", ".").split("."):
                here = here[int(part)] if isinstance(here, list) else here[part]
            config = set_key(config, f"{path}x", here)
    try:
        parse_config(config)
    except ConfigError as error:
        assert path in str(error)
