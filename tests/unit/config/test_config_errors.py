"""One row per mistake: its place and the message; keys of earlier versions have guidance."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import ConfigError, RunConfig, load_config, parse_config
from coordexp.config.base import section_of
from coordexp.config.removed_keys import REMOVED_KEYS, REMOVED_VALUES
from support.config_samples import drop_key, module, set_key, set_keys, stage1, stage2, two_channel, write_yaml

RM = "rollout_matching"
EVERY = "training.gradient_checkpointing_every"
OBJ = f"{RM}.pipeline.objective"


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    return str(caught.value).splitlines()[1:]


def servers(base_url: str, group_port: int) -> dict[str, Any]:
    return {"servers": [{"base_url": base_url, "group_port": group_port}]}


# (key set in a valid stage-2 configuration, its value, path named by the error, words of the message)
WRONG = [
    ("modle", {}, "modle", "did you mean 'model'"),
    ("extra", {}, "extra", "never from a free mapping"),
    ("model.modl", "x", "model.modl", "did you mean 'model'"),
    ("model.model", "", "model.model", "at least 1 character"),
    ("model.model", 3, "model.model", "expected text, got 3"),
    ("model.dtype", "fp32", "model.dtype", "'float32', 'bfloat16' or 'float16'"),
    ("model.attn_implementation", "eager", "model.attn_implementation", "'flash' or 'sdpa'"),
    ("tuner.freeze_vit", "yes", "tuner.freeze_vit", "expected true or false, got 'yes'"),
    ("tuner.freeze_vit", 1, "tuner.freeze_vit", "expected true or false"),
    ("model", None, "model", "expected a mapping, got null"),
    ("data.num_workers", -1, "data.num_workers", "greater than or equal to 0"),
    ("data.num_workers", 2.0, "data.num_workers", "a whole number, got 2.0"),
    ("data.num_workers", 10**12, "data.num_workers", "less than or equal to 1024"),
    ("custom.trainer_variant", "stage3", "custom.trainer_variant", "'stage2_rollout_aligned' or 'stage2_two_channel'"),
    ("custom.train_jsonl", None, "custom.train_jsonl", "got null"),
    ("custom.train_jsonl", " ", "custom.train_jsonl", "JSONL of the training samples"),
    ("custom.train_jsonl", [], "custom.train_jsonl", "at least 1 item"),
    ("custom.train_jsonl", {"path": "a.jsonl"}, "custom.train_jsonl", "a list of paths and of {path: …, weight: …}"),
    ("custom.train_jsonl", ["a.jsonl", {"path": "b.jsonl", "weight": 0}], "custom.train_jsonl[1].weight", "than 0"),
    ("custom.train_jsonl", [{"path": "a.jsonl", "weight": -1}], "custom.train_jsonl[0].weight", "greater than 0"),
    ("custom.train_jsonl", ["a.jsonl", {"weight": 2}], "custom.train_jsonl[1].path", "missing"),
    ("custom.train_jsonl", [{"path": "a.jsonl", "weights": 2}], "custom.train_jsonl[0].weights", "'weight'"),
    ("custom.train_jsonl", ["a/b.jsonl", "c.jsonl", "a/../a/b.jsonl"], "custom.train_jsonl", "listed twice"),
    ("data.repeat_threshold", 0, "data.repeat_threshold", "greater than 0"),
    ("custom.train_sample_limit", 0, "custom.train_sample_limit", "greater than or equal to 1"),
    ("custom.object_field_order", "desc-first", "custom.object_field_order", "'desc_first' or 'geometry_first'"),
    ("custom.coord_soft_ce_w1", {"enabled": False}, "custom.coord_soft_ce_w1", "rollout_matching.pipeline"),
    ("custom.coord_soft_ce_w1", {"sigma": 1}, "custom.coord_soft_ce_w1.sigma", "unknown key"),
    ("custom.extra", {"x": 1}, "custom.extra", "never from a free mapping"),
    ("training.output_dir", 3, "training.output_dir", "folder of checkpoints"),
    ("training.output_dir", 20261201, "training.output_dir", "a path as text, got 20261201 (folder"),
    ("training.learning_rate", float("nan"), "training.learning_rate", "finite number"),
    *[("training.learning_rate", value, "training.learning_rate", "beyond what float32 computes with")
      for value in (1e38, 1e31, 1e-320, 1e-31)],
    ("training.adam_epsilon", 1e-320, "training.adam_epsilon", "beyond what float32 computes with"),
    (f"{OBJ}[1].config.target_sigma", 1e-9, f"{OBJ}[1].config.target_sigma", "greater than or equal to 1e-06"),
    ("training.stop_within_s", 1e10, "training.stop_within_s", "less than or equal to 1e+09"),
    ("training.ddp_timeout", 10**10, "training.ddp_timeout", "less than or equal to 1000000000"),
    ("launch.wait_s", 1e10, "launch.wait_s", "less than or equal to 1e+09"),
    (f"{RM}.vllm.sync", {"timeout_s": 3601}, f"{RM}.vllm.sync.timeout_s", "less than or equal to 3600"),
    (f"{RM}.vllm.server", {"timeout_s": 3601}, f"{RM}.vllm.server.timeout_s", "less than or equal to 3600"),
    (f"{RM}.vllm.server", {"infer_timeout_s": 1e10}, f"{RM}.vllm.server.infer_timeout_s", "or equal to 1e+09"),
    ("training.seed", True, "training.seed", "expected a whole number"),
    ("training.seed", "010", "training.seed", "a whole number, got '010' (seed"),
    ("training.learning_rate", "3e-4", "training.learning_rate", "a number, got '3e-4'"),
    (EVERY, "fast", EVERY, "expected a whole number or 'auto', got 'fast'"),
    (EVERY, 0, EVERY, "greater than or equal to 1 or 'auto'"),
    ("training.report_to", 7, "training.report_to", "expected a list"),
    ("training.report_to", ["wandb", 1], "training.report_to[1]", "expected text"),
    ("training.resume_from_checkpoint", 5, "training.resume_from_checkpoint", "null, true or a checkpoint folder"),
    ("training.packing_drop_last", False, "training.packing_drop_last", "expected true, got false"),
    ("training.packing_min_fill_ratio", 1.5, "training.packing_min_fill_ratio", "less than or equal to 1"),
    ("global_max_length", "2048", "global_max_length", "a whole number, got '2048'"),
    (RM, [], RM, "expected a mapping, got an empty list"),
    (f"{RM}.repetition_penalty", 0, f"{RM}.repetition_penalty", "greater than 0"),
    (f"{RM}.decoding.topp", 1, f"{RM}.decoding.topp", "did you mean 'top_p'"),
    (f"{RM}.vllm.server", {"servers": []}, f"{RM}.vllm.server.servers", "at least 1 item"),
    (f"{RM}.vllm.server", {}, f"{RM}.vllm.server.servers", "missing"),
    (f"{RM}.vllm.server", {"servers": [{"group_port": 1}]}, f"{RM}.vllm.server.servers[0].base_url", "missing"),
    (f"{RM}.vllm.server", servers("a:80", 1), f"{RM}.vllm.server.servers[0].base_url",
     "expected text that matches ^https?://\\S+$, got 'a:80' (URL prefix"),
    *[(f"{RM}.vllm.server", servers(url, 1), f"{RM}.vllm.server.servers[0].base_url", "HOST:PORT")
      for url in ("http://[::1", "http://[", "http://[1]:80", "http://a:99999", "http://a:b", "http://:80", "http:///x")],
    (f"{OBJ}", [], f"{OBJ}", "at least 1 item"),
    (f"{OBJ}[0].name", "coord_diag", f"{OBJ}[0].name", "unknown module"),
    (f"{OBJ}[0]", "token_ce", f"{OBJ}[0]", "token_ce"),
    (f"{OBJ}[0].channels", "B", f"{OBJ}[0].channels", "expected a list, got 'B'"),
    (f"{OBJ}[0].channels", ["B", "B"], f"{OBJ}[0].channels", "twice"),
    (f"{OBJ}[2]", module("token_ce", struct_ce_weight=1, desc_ce_weight=1, rollout_fn_desc_weight=0), OBJ, "token_ce"),
    (f"{RM}.pipeline.diagnostics", [module("token_ce")], f"{RM}.pipeline.diagnostics[0].name", "'coord_diag'"),
    (f"{RM}.pipeline.diagnostics[0].config.x", 1, f"{RM}.pipeline.diagnostics[0].config.x", "takes no keys"),
    ("training.max_steps", 10**30, "training.max_steps", "has more than 64 bits"),
    ("training.output_dir", "a\0b", "training.output_dir", "cannot hold the character NUL"),
    ("training.max_steps", 2.5, "training.max_steps", "expected a whole number, got 2.5"),
    ("training.output_dir", ["a"], "training.output_dir", "expected a path as text, got a list"),
    ("training.save_steps", 2.5, "training.save_steps", "neither a number of steps nor a share below 1"),
    # A key of another section.
    ("learning_rate", 1e-4, "learning_rate", "unknown key here; write training.learning_rate"),
    ("output_dir", "out", "output_dir", "unknown key here; write training.output_dir"),
    ("training.dtype", "float32", "training.dtype", "write model.dtype or rollout_matching.vllm.dtype"),
    ("tuner.lora_dropout", 1.0, "tuner.lora_dropout", "less than 1"),
    ("tuner.target_modules", "all-linear", "tuner.target_modules", "expected a list, got 'all-linear'"),
    ("deepspeed.config", 3, "deepspeed.config", "expected a JSON file or a mapping"),
    ("launch.server_devices", [0, 1], "launch.server_devices[0]", "expected a list"),
    (f"{RM}.repeat_terminate.min_new_token", 8, f"{RM}.repeat_terminate.min_new_token", "'min_new_tokens'"),
    (f"{RM}.repeat_terminate.max_object_keys", 0, f"{RM}.repeat_terminate.max_object_keys", "equal to 1"),
    (f"{RM}.vllm.sleep_level", 3, f"{RM}.vllm.sleep_level", "0 or 1"),
    (f"{RM}.vllm.sleep_level", 2, f"{RM}.vllm.sleep_level", "so answers would be wrong; write 1"),
    (f"{RM}.vllm.sync.fallback_to_full", "yes", f"{RM}.vllm.sync.fallback_to_full", "true or false"),
    (f"{RM}.vllm.server", servers("http://a", 1) | {"api_key_env": "my token"}, f"{RM}.vllm.server.api_key_env",
     "name of the environment variable"),
    (f"{RM}.vllm.server", servers("http://a", 0), f"{RM}.vllm.server.servers[0].group_port", "equal to 1"),
    (f"{RM}.vllm.server", servers("http://a", 70000), f"{RM}.vllm.server.servers[0].group_port", "equal to 65535"),
]  # fmt: skip


@pytest.mark.scenario("Invalid server configuration fails fast")
@pytest.mark.parametrize(("key", "value", "path", "words"), WRONG, ids=[f"{k}={v!r:.30}" for k, v, _, _ in WRONG])
def test_an_error_names_key_place_and_fix(key: str, value: Any, path: str, words: str, tmp_path: Path) -> None:
    file = write_yaml(tmp_path, set_key(stage2(), key, value))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    found = re.findall(rf"^  {re.escape(path)} \({re.escape(str(file))}:(\d+)\): (.*)$", str(caught.value), re.M)
    assert any(words in message for _, message in found), str(caught.value)
    # The line is that of the key itself, or of what it is missing from.
    line = file.read_text(encoding="utf-8").splitlines()[int(found[0][0]) - 1]
    parts = [part for part in re.split(r"[.\[\]]", path) if part and not part.isdigit()]
    assert any(f"{part}:" in line for part in parts[-2:]) or line.lstrip().startswith("- "), line


@pytest.mark.parametrize("text", ["many", "1e", "", "three", "inf"])
def test_only_quoted_numbers_get_the_hint_to_remove_quotes(text: str) -> None:
    (line,) = problems(set_key(stage2(), "training.max_steps", text))
    assert f"training.max_steps: expected a whole number, got '{text}' (" in line


@pytest.mark.parametrize(
    "key", ["foobar", "tuner.xyz", "training.save_everything", f"{RM}.vllm.zzz", "model.checkpoints"]
)
def test_a_key_without_a_similar_one_lists_the_keys_of_its_section(key: str) -> None:
    (line,) = problems(set_key(stage2(), key, 1))
    assert "unknown key; valid here: " in line and "did you mean" not in line


def test_no_library_messages_are_shown() -> None:
    words = ("Input should", "Value error", "instance of", "valid tuple", "Tuple", "valid string", "valid dict")
    for key, value in itertools.product({key for key, _, _, _ in WRONG}, (None, [], {}, "x y", -7, 0.5)):
        try:
            parse_config(set_key(stage2(), key, value))
        except ConfigError as error:
            assert not any(word in str(error) for word in words), str(error)


def test_required_keys_have_no_default() -> None:
    required = [
        *("model.model", "custom.train_jsonl", "training.output_dir", "global_max_length"),
        *(f"{OBJ}[0].{key}" for key in ("name", "enabled", "weight", "channels", "config")),
        *(f"{OBJ}[1].config.{key}" for key in stage2()[RM]["pipeline"]["objective"][1]["config"]),
        *(f"{RM}.pipeline.{key}" for key in ("objective", "diagnostics")),
    ]
    for path in required:
        with pytest.raises(ConfigError, match=rf"  {re.escape(path)}: missing"):
            parse_config(drop_key(stage2(), path))


def test_missing_sections_name_their_required_keys() -> None:
    missing = [line.partition(": missing")[0].strip() for line in problems({})]
    assert {"model.model", "custom.train_jsonl", "training.output_dir", "global_max_length"} <= {*missing}


def test_of_a_hundred_problems_forty_are_shown() -> None:
    found = problems(stage2() | {f"key{number}": 1 for number in range(100)})
    assert found[-1].strip() == "and 60 more" and len(found) == 41


def test_all_problems_of_all_sections_are_reported_together() -> None:
    config = set_key(drop_key(stage2(), f"{RM}.pipeline"), "model.dtyp", "float32")
    config = set_key(drop_key(config, "global_max_length"), f"{RM}.rollout_buffer", {})
    config = set_key(config, "training.packing_drop_last", False)
    assert sorted(line.split(":")[0].strip() for line in problems(config)) == sorted(
        ["model.dtyp", "global_max_length", f"{RM}.rollout_buffer", f"{RM}.pipeline", "training.packing_drop_last"]
    )


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (set_key(drop_key(stage2(), f"{OBJ}[0].weight"), f"{OBJ}[0].wieght", 1.0),
         f"  {OBJ}[0].wieght: unknown key; did you mean 'weight'?"),  # the required key is not reported as missing too
        (set_key(stage2(), f"{RM}.vllm.server", {"servers": [{"base_url": "http://a"}]}),
         f"  {RM}.vllm.server.servers[0].group_port: missing"),  # the list is not called empty
        (set_keys(stage1(), {"training.report_to": "none", "training.max_stepz": 3}),
         "  training.max_stepz: unknown key; did you mean 'max_steps'?"),  # the logger's letters are no loggers
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem(config: dict[str, Any], line: str) -> None:
    (found,) = problems(config)
    assert found.startswith(line)


def test_checks_that_depend_on_a_broken_key_are_skipped() -> None:
    config = set_key(stage2(), "global_max_length", "4096")
    config[RM]["max_new_tokens"] = 3000  # valid with 4096, invalid with any default
    assert not any("max_new_tokens" in line for line in problems(config))


# --- keys of earlier versions and of related programs ---


def test_every_removed_key_has_a_migration_hint() -> None:
    said, due = {}, {}
    for pattern, guidance in REMOVED_KEYS.items():
        path = pattern.replace("*.pipeline.*.*", "rollout_matching.pipeline.objective[1]")
        config = stage2(vllm={"server": servers("http://a", 51216)})
        if path.startswith(("stage2_ab", "data.augment")):  # of which other variants know nothing
            config = two_channel() if path.startswith("stage2_ab") else stage1()
        said[path] = problems(set_key(config, path, 1))
        due[path] = [f"  {path}: {guidance}"]
    assert {path: found for path, found in said.items() if found != due[path]} == {}


@pytest.mark.parametrize(
    ("key", "value", "guidance"),
    [
        ("inherit", "base.yaml", "removed; write extends instead"),
        (f"{OBJ}[2].config.bbox_ciou_weight", 1.0, "removed; write ciou_weight of bbox_geo.config instead"),
        ("custom.trainer_variant", "rollout_matching_sft",
         "'rollout_matching_sft' is retired; write stage2_rollout_aligned instead"),
        ("custom.trainer_variant", "stage2_ab_training",
         "'stage2_ab_training' is retired; write stage2_two_channel instead"),
        (f"{RM}.vllm.kv_cache_dtype", None, "removed; write it under rollout_matching.vllm.engine_args instead"),
    ],
)  # fmt: skip
def test_old_keys_and_names_have_their_own_guidance(key: str, value: object, guidance: str) -> None:
    (line,) = problems(set_key(stage2(), key, value))
    assert line.startswith(f"  {key}: {guidance}")


def test_removed_keys_of_modules_are_those_of_both_pipelines() -> None:
    path = "stage2_ab.pipeline.objective[1].config.gate_weight"
    assert problems(set_key(two_channel(), path, 1)) == [
        f"  {path}: removed; write coord_gate_weight of coord_reg.config instead"
    ]


def test_no_removed_key_is_still_declared() -> None:
    assert [pattern for pattern in REMOVED_KEYS if _declared(pattern)] == []


def _declared(pattern: str) -> bool:
    here: Any = RunConfig
    for part in pattern.split("."):
        if here is None or part not in here.model_fields:
            return False
        here = section_of(here.model_fields[part].annotation)
    return True


def test_every_removed_value_has_a_migration_hint() -> None:
    said = {(key, value): problems(set_key(stage2(), key, value)) for key, value in REMOVED_VALUES}
    due = {(key, value): [f"  {key}: '{value}' is {guidance}"] for (key, value), guidance in REMOVED_VALUES.items()}
    assert said == due


@pytest.mark.parametrize("value", [None, {}, {"decoding": {"temperature": 1}, "temperature": 1}])
def test_old_rollout_section_names_the_new_one(value: object) -> None:
    text = "\n".join(problems(set_key(stage2(), "custom.extra.rollout_matching", value)))
    assert "custom.extra.rollout_matching" in text and "unknown key" not in text
    if value:
        assert text.count("write rollout_matching.decoding.temperature instead") == 2


def test_keys_removed_from_the_old_section_do_not_name_the_new_one() -> None:
    old = {"rollout_buffer": {"enabled": True}, "num_return_sequences": 4}
    lines = problems(set_key(stage2(), "custom.extra.rollout_matching", old))
    assert ["has no replacement" in lines[0], "exactly one answer" in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("vllm.server.base_url", "rollout_matching.vllm.server.servers[]"),
        ("vllm.server.group_port", "rollout_matching.vllm.server.servers[]"),
        ("vllm.server.debug_dump.every_steps", "write rollout_matching.monitor_dump instead"),
        ("vllm.infer_batch_size", "write rollout_matching.decode_batch_size instead"),
        ("vllm.kv_cache_dtype", "write it under rollout_matching.vllm.engine_args"),
        ("eval_detection.strict_parse", "delete the line"),
        ("rollout_buffer.m_steps", "has no replacement"),
        ("vllm.server.timeout_s", "write rollout_matching.vllm.server.timeout_s instead"),
    ],
)
def test_old_section_gives_each_key_its_own_guidance(key: str, hint: str) -> None:
    (line,) = problems(set_key(stage2(), f"custom.extra.rollout_matching.{key}", 1))
    assert f"custom.extra.rollout_matching.{key}" in line and hint in line


def test_keys_in_migration_hints_exist() -> None:
    words = {word.strip(",;.:()") for text in REMOVED_KEYS.values() for word in text.split()}
    named = {word for word in words if word.split(".")[0] in RunConfig.model_fields and "." in word and "[" not in word}
    assert len(named) > 20
    assert {word for word in named if not _declared(word) and not word.startswith("section")} == set()
