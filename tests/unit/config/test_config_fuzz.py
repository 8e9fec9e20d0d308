"""Any change of a valid configuration leaves it valid or gives an error that names the changed key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.config import ConfigError, load_config, parse_config, resolved_yaml
from coordexp.config.source import read_document
from support.config_samples import drop_key, set_key, stage2, two_channel

SERVER = {"timeout_s": 10, "servers": [{"base_url": "http://a:8000", "group_port": 51216}]}


def filled(config: dict[str, Any]) -> dict[str, Any]:
    return parse_config(config).model_dump(mode="json")


STAGE2 = filled(stage2(rollout_backend="vllm", vllm={"mode": "server", "server": SERVER}))
TWO_CHANNEL = filled(two_channel() | {"deepspeed": {"enabled": True, "config": {"zero": {"stage": 2}}}})


def paths(value: Any, path: str = "") -> list[str]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, f"{path}[{index}]")
    return found


KEYS = [(name, path) for name, config in (("stage2", STAGE2), ("two", TWO_CHANNEL)) for path in paths(config)]
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def at(config: Any, path: str) -> Any:
    for part in path.replace("]", "").replace("[", ".").split("."):
        config = config[int(part)] if isinstance(config, list) else config[part]
    return config


@settings(max_examples=150)
@given(where=st.sampled_from(KEYS), change=st.sampled_from(["drop", "rename", "retype"]), value=ODD)
def test_any_change_is_valid_or_an_error_naming_the_key(where: tuple[str, str], change: str, value: Any) -> None:
    name, path = where
    original = STAGE2 if name == "stage2" else TWO_CHANNEL
    if change == "retype" or path.endswith("]"):
        config = set_key(original, path, value)
    else:
        config = drop_key(original, path)
        if change == "rename":
            config = set_key(config, f"{path}x", at(original, path))
    try:
        parse_config(config)
    except ConfigError as error:
        key = path.rpartition("[")[0] if path.endswith("]") else path  # one item may also be written without a list
        assert key in str(error)


LIKE_SOMETHING_ELSE = [
    "no", "1e-3", "1:30", "2026-01-31", "${env:HOME}", "$${", "${", "null", "~", "0x1F", "1_000", "- a", "#", " a ",
    "'",
]  # fmt: skip
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    LIKE_SOMETHING_ELSE
)
# The loader refuses larger ones, and smaller fractions.
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.just(0.0) | st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(prompt=TEXT, free=st.dictionaries(TEXT, ANYTHING, max_size=3))
def test_resolved_yaml_loads_back_unchanged(tmp_path_factory: Any, prompt: str, free: dict[str, Any]) -> None:
    """Texts that look like something else, and the one free mapping, come through a file unchanged."""
    raw = set_key(stage2(), "template.prompt", prompt)
    config = parse_config(set_key(raw, "training.lr_scheduler_kwargs", free))
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(resolved_yaml(config), encoding="utf-8", newline="")
    document = read_document(path)
    assert document.problems == []
    assert parse_config(document.data) == config
    assert document.data["template"]["prompt"] == prompt


PIECES = [
    "model", "training", ": ", ":\n  ", "\n", "- ", "{", "}", "[", "]", ", ", "&a ", "*a", "<<: ", "<<", "!!int ",
    "!x ", "? ", "1", "x", "~", "'", '"', "| ", "> ", "#", "${env:HOME}", "${", "%YAML 1.1\n", "---\n", "\t",
    "extends: ", ".",
]  # fmt: skip


@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_any_text_loads_or_is_one_clear_error(tmp_path_factory: Any, pieces: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text("".join(pieces), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(path)
