"""Keys of earlier versions and of related programs: each row of the table brings its own guidance."""

from __future__ import annotations

from typing import Any

import pytest

from coordexp.config import ConfigError, RunConfig, parse_config
from coordexp.config.base import section_of
from coordexp.config.removed_keys import REMOVED_KEYS, REMOVED_VALUES
from support.config_samples import set_key, stage2, two_channel

SERVER = {"servers": [{"base_url": "http://a:8000", "group_port": 51216}]}


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    return str(caught.value).splitlines()[1:]


def test_every_removed_key_has_a_migration_hint() -> None:
    said, due = {}, {}
    for pattern, guidance in REMOVED_KEYS.items():
        path = pattern.replace("*.pipeline.*.*", "rollout_matching.pipeline.objective[1]")
        config = two_channel() if path.startswith("stage2_ab") else stage2(vllm={"server": SERVER})
        said[path] = problems(set_key(config, path, 1))
        due[path] = [f"  {path}: {guidance}"]
    assert {path: found for path, found in said.items() if found != due[path]} == {}


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


def test_keys_in_migration_hints_exist() -> None:
    words = {word.strip(",;.:()") for text in REMOVED_KEYS.values() for word in text.split()}
    named = {word for word in words if word.split(".")[0] in RunConfig.model_fields and "." in word and "[" not in word}
    assert len(named) > 20
    assert {word for word in named if not _declared(word) and not word.startswith("section")} == set()
