"""Keys of earlier versions and of related programs: each row of the table brings its own guidance."""

from __future__ import annotations

from typing import Any

import pytest

from coordexp.config import ConfigError, RunConfig, parse_config
from coordexp.config.legacy_table import REMOVED_KEYS, REMOVED_VALUES
from support.config_samples import set_key, stage2, two_channel

SERVER = {"servers": [{"base_url": "http://a:8000", "group_port": 51216}]}


def problems(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    return str(caught.value).splitlines()[1:]


def test_every_removed_key_brings_its_own_guidance() -> None:
    said, due = {}, {}
    for row in REMOVED_KEYS:
        config = two_channel() if row.pattern.startswith("stage2_ab") else stage2(vllm={"server": SERVER})
        path = row.pattern.replace("pipeline.*.*", "pipeline.objective[1]")
        said[path] = problems(set_key(config, path, 1))
        due[path] = [f"  {path}: {row.guidance}"]
    assert {path: found for path, found in said.items() if found != due[path]} == {}
    assert len(said) > 100


def test_no_key_is_removed_and_declared() -> None:
    assert [row.pattern for row in REMOVED_KEYS if _declared(row.pattern)] == []


def _declared(pattern: str) -> bool:
    here: Any = RunConfig
    for part in pattern.split("."):
        fields = getattr(here, "model_fields", {})
        if part not in fields:
            return False
        members = (fields[part].annotation, *getattr(fields[part].annotation, "__args__", ()))
        here = next((member for member in members if hasattr(member, "model_fields")), None)
    return True


def test_every_row_says_what_to_do() -> None:
    words = ("write ", "delete ", "list servers", "set ", "give ", "raise ")
    assert [row for row in REMOVED_KEYS if not any(word in row.guidance for word in words)] == []
    assert len({row.pattern for row in REMOVED_KEYS}) == len(REMOVED_KEYS)


def test_every_retired_value_brings_its_own_guidance() -> None:
    said = {(key, value): problems(set_key(stage2(), key, value)) for key, value in REMOVED_VALUES}
    due = {(key, value): [f"  {key}: '{value}' is {guidance}"] for (key, value), guidance in REMOVED_VALUES.items()}
    assert said == due


@pytest.mark.parametrize("value", [None, {}, {"decoding": {"temperature": 1}, "temperature": 1}])
def test_old_rollout_section_is_sent_to_the_new_one(value: object) -> None:
    text = "\n".join(problems(set_key(stage2(), "custom.extra.rollout_matching", value)))
    assert "custom.extra.rollout_matching" in text and "unknown key" not in text
    if value:
        assert text.count("write rollout_matching.decoding.temperature instead") == 2


def test_what_was_removed_below_the_old_section_is_not_sent_to_the_new_one() -> None:
    old = {"rollout_buffer": {"enabled": True}, "num_return_sequences": 4}
    lines = problems(set_key(stage2(), "custom.extra.rollout_matching", old))
    assert ["has no replacement" in lines[0], "exactly one answer" in lines[1], len(lines)] == [True, True, 2]


def test_every_argument_of_transformers_is_taken_or_refused_with_a_reason() -> None:
    """YAML written for TrainingArguments either works or says why not; no key of it is merely 'unknown'."""
    pytest.importorskip("torch")
    from dataclasses import fields

    from transformers import TrainingArguments

    import coordexp.modeling  # noqa: F401  prepares torchvision's import on machines without CUDA
    from coordexp.config import TrainingConfig

    removed = {row.pattern.removeprefix("training.") for row in REMOVED_KEYS if row.pattern.startswith("training.")}
    assert {field.name for field in fields(TrainingArguments)} - set(TrainingConfig.model_fields) - removed == set()
