"""Reading YAML files: scalars, environment variables, extends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordexp.config import ConfigError, load_config, resolved_yaml
from coordexp.config.source import read_document
from support.config_samples import set_key, stage1, stage2, write_yaml

# (YAML, value): YAML 1.2, so that words stay words
SCALARS: list[tuple[str, Any]] = [
    ("no", "no"), ("on", "on"), ("yes", "yes"), ("true", True), ("False", False), ("~", None), ("", None),
    ("null", None), ("12", 12), ("-0", 0), ("+3", 3), ("1_000", 1000), ("0x1F", 31), ("012", "012"), ("1:30", "1:30"),
    ("2026-01-31", "2026-01-31"), ("1e-3", 1e-3), ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("'12'", "12"), ("=", "="),
    ("!!str 12", "12"), ("!!float 1", 1.0), ("[1, [a, {b: c}]]", [1, ["a", {"b": "c"}]]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"key: {text}\n")
    document = read_document(tmp_path / "x.yaml")
    assert document.data == {"key": value} and type(document.data["key"]) is type(value)
    assert document.problems == []


# (YAML, words of the problem)
SCALAR_PROBLEMS = [
    ("!!binary aGk=", "the tag"),
    ("!!set {a, b}", "the tag"),
    ("!!python/name:os.system ''", "the tag"),
    ("!!int abc", "cannot be read as int"),
    ("1" * 5000, "cannot be read as int"),
    ("${HOME}/x", "write ${env:HOME}"),
    ("${env:}", "is not replaced"),
    ("${env:A B}", "is not replaced"),
    ("${env:COORDEXP_TEST_UNSET}", "COORDEXP_TEST_UNSET is not set"),
    ("a ${env:COORDEXP_TEST_UNSET} b", "${env:COORDEXP_TEST_UNSET:-default}"),
]


@pytest.mark.parametrize(("text", "words"), SCALAR_PROBLEMS, ids=[words for _, words in SCALAR_PROBLEMS])
def test_scalar_that_cannot_be_read_is_a_problem_at_its_line(text: str, words: str, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, stage1())
    path.write_text(path.read_text() + f"data:\n  num_workers: {text}\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = str(caught.value).splitlines()[1:]  # the key is not reported again for its type
    assert problem.startswith(f"  data.num_workers ({path}:{line}): ") and words in problem


# (YAML value, environment variable N, value)
ENVIRONMENT = [
    ("${env:N}", "3", 3),  # unquoted: read as YAML after it is filled in
    ("'${env:N}'", "3", "3"),  # quoted: text
    ("${env:N}", "true", True),
    ("${env:N}", "", None),
    ("${env:N}", "a: b", "a: b"),  # a value, never a mapping
    ("${env:N}", "[1, 2]", "[1, 2]"),
    ("${env:N:-7}", None, 7),
    ("${env:N:-7}", "8", 8),
    ("${env:N:-}", None, None),
    ("out/${env:N:-a}-${env:N:-b}", None, "out/a-b"),
    ("out/${env:N}", "${env:OTHER}", "out/${env:OTHER}"),  # filled in once
    ("$${env:N}", "3", "${env:N}"),
]


@pytest.mark.parametrize(("text", "given", "value"), ENVIRONMENT)
def test_environment_variables(
    text: str, given: str | None, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("N", raising=False)
    if given is not None:
        monkeypatch.setenv("N", given)
    (tmp_path / "x.yaml").write_text(f"key: {text}\n")
    document = read_document(tmp_path / "x.yaml")
    assert (document.data["key"], document.problems) == (value, [])


def test_the_source_of_a_value_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "3")
    (tmp_path / "x.yaml").write_text("a: 1\nkey: ${env:N}\n")
    assert read_document(tmp_path / "x.yaml").where(("key",)) == f"{tmp_path / 'x.yaml'}:2, $N"


def test_lists_replace_and_mappings_merge(tmp_path: Path) -> None:
    """A list in a later file replaces the whole list of an earlier one."""
    write_yaml(tmp_path, {"a": {"list": [1, 2], "kept": 1, "gone": {"x": 1}}}, "base.yaml")
    write_yaml(tmp_path, {"extends": "base.yaml", "a": {"list": [3], "gone": None}}, "leaf.yaml")
    document = read_document(tmp_path / "leaf.yaml")
    assert document.data == {"a": {"list": [3], "kept": 1, "gone": None}}
    assert document.where(("a", "kept")).endswith("base.yaml:5")
    assert document.where(("a", "list", 0)).endswith("leaf.yaml:4")
    assert ("a", "list", 1) not in document.origin and ("a", "gone", "x") not in document.origin


def test_later_parents_win_and_a_parent_may_occur_twice(tmp_path: Path) -> None:
    write_yaml(tmp_path, {"a": 1, "b": 1, "c": 1}, "root.yaml")
    write_yaml(tmp_path, {"extends": "root.yaml", "a": 2}, "left.yaml")
    write_yaml(tmp_path, {"extends": "root.yaml", "b": 3}, "right.yaml")
    write_yaml(tmp_path, {"extends": ["left.yaml", "right.yaml"], "c": 4}, "leaf.yaml")
    assert read_document(tmp_path / "leaf.yaml").data == {"a": 1, "b": 3, "c": 4}


def test_resolved_configuration_does_not_depend_on_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """extends, environment and overrides are settled in what is written with a run."""
    monkeypatch.setenv("COORDEXP_TEST_DATA", "data/from_env")
    raw = set_key(stage2(), "custom.train_jsonl", "${env:COORDEXP_TEST_DATA}/train.jsonl")
    write_yaml(tmp_path, set_key(raw, "template.prompt", "write $${env:X}, line 1\nline 2"), "base.yaml")
    leaf = write_yaml(tmp_path, {"extends": "base.yaml"}, "leaf.yaml")
    config = load_config(leaf, {"training.seed": 11})
    assert str(config.custom.train_jsonl) == "data/from_env/train.jsonl"
    assert config.template.prompt == "write ${env:X}, line 1\nline 2"
    monkeypatch.delenv("COORDEXP_TEST_DATA")
    resolved = tmp_path / "elsewhere" / "resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(resolved) == config


@pytest.mark.parametrize(
    "path", ["rollout_matching.pipeline.objective[7].weight", "rollout_matching.pipeline.objective[7]"]
)
def test_override_of_a_missing_list_entry_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"override .*there is no 7"):
        load_config(write_yaml(tmp_path, stage2()), {path: 1.0})
