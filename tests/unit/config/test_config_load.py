"""From YAML files to a configuration and back: scalars, environment variables, extends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordexp.config import ConfigError, load_config, parse_config
from coordexp.config.from_yaml import resolved_yaml
from coordexp.config.source import read_document
from support.config_samples import set_key, stage1, stage2, write_yaml

# --- reading files ---

# (YAML, value): YAML 1.2, so that words stay words
SCALARS: list[tuple[str, Any]] = [
    ("no", "no"), ("on", "on"), ("yes", "yes"), ("true", True), ("False", False), ("~", None), ("", None),
    ("null", None), ("12", 12), ("-0", 0), ("+3", 3), ("1_000", 1000), ("0x1F", 31), ("012", "012"), ("1:30", "1:30"),
    ("2026-01-31", "2026-01-31"), ("1e-3", 1e-3), ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("1E5", 1e5), ("-0.0", -0.0),
    ("+1.5e+2", 150.0), (".5e0", 0.5), ("3.e2", 300.0), ("'12'", "12"), ("=", "="),
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
    ("${env:N:-7}", "", 7),  # as in a shell
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


@pytest.mark.parametrize(
    "path", ["rollout_matching.pipeline.objective[7].weight", "rollout_matching.pipeline.objective[7]"]
)
def test_override_of_a_missing_list_entry_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"override .*there is no 7"):
        load_config(write_yaml(tmp_path, stage2()), {path: 1.0})


# --- configurations ---


@pytest.mark.parametrize(
    ("metric", "is_more_better"),
    [
        (None, None), ("rollout/f1", True), ("eval_loss", False), ("rollout/lost_rate", False),
        ("rollout/gained_rate", True), ("rollout/duplicate_rate", False), ("rollout/false_gained_rate", False),
        ("rollout/lost_rate_high", False), ("rollout/gained_rate_low", True),
    ],
)  # fmt: skip
def test_less_is_better_of_losses_and_faults(metric: str | None, is_more_better: bool | None) -> None:
    training = parse_config(set_key(stage1(), "training.metric_for_best_model", metric)).training
    assert training.hf_arguments()["greater_is_better"] is is_more_better


@pytest.mark.parametrize(
    ("text", "strategy", "report_to", "resume"),
    [("no", "no", "none", False), ("'no'", "no", ["wandb"], True), ("epoch", "epoch", [], "outputs/checkpoint-3")],
)
def test_words_that_yaml_reads_as_other_types(
    tmp_path: Path, text: str, strategy: str, report_to: object, resume: object
) -> None:
    raw = set_key(set_key(stage1(), "training.report_to", report_to), "training.resume_from_checkpoint", resume)
    path = write_yaml(tmp_path, raw)
    path.write_text(path.read_text().replace("output_dir:", f"save_strategy: {text}\n  output_dir:"))
    training = load_config(path).training
    assert training.save_strategy == strategy
    assert training.hf_arguments()["report_to"] == (report_to or "none")
    assert training.resume_from_checkpoint == (resume or None)


def test_a_whole_number_is_a_float_where_a_float_is_due() -> None:
    assert isinstance(parse_config(set_key(stage1(), "training.learning_rate", 2)).training.learning_rate, float)


def test_hf_arguments_are_known_to_transformers() -> None:
    raw = stage1()
    raw["training"] |= {"effective_batch_size": 16, "per_device_train_batch_size": 2, "warmup_steps": 0.1}
    arguments = parse_config(raw).training.hf_arguments(world_size=2)
    assert not {"packing", "packing_buffer", "effective_batch_size"} & set(arguments)
    assert arguments["gradient_accumulation_steps"] == 4
    assert (arguments["output_dir"], arguments["warmup_steps"], arguments["save_steps"]) == ("outputs/run", 0.1, 500)
    assert arguments["run_name"] == "outputs/run"
    named = parse_config(set_key(raw, "training.run_name", "mine")).training
    assert named.hf_arguments(world_size=2)["run_name"] == "mine"


def test_every_hf_argument_is_a_field_of_training_arguments() -> None:
    pytest.importorskip("torch")
    from coordexp.cpu_wheels import ensure_torchvision

    ensure_torchvision()
    from dataclasses import fields

    from transformers import TrainingArguments

    assert set(parse_config(stage1()).training.hf_arguments()) <= {field.name for field in fields(TrainingArguments)}


def test_null_removes_a_section_of_the_base(tmp_path: Path) -> None:
    write_yaml(tmp_path, stage2(), "base.yaml")
    leaf = {"extends": "base.yaml", "custom": {"trainer_variant": None}, "rollout_matching": None}
    assert load_config(write_yaml(tmp_path, leaf)).rollout_matching is None


def test_an_error_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write_yaml(tmp_path, set_key(stage1(), "training.sed", 7), "base.yaml")
    line = base.read_text().splitlines().index("  sed: 7") + 1
    with pytest.raises(ConfigError) as caught:
        load_config(write_yaml(tmp_path, {"extends": "base.yaml"}, "leaf.yaml"))
    assert f"  training.sed ({base}:{line}): unknown key; did you mean 'seed'?" in str(caught.value)


# (file name -> text, words of the error)
BROKEN_FILES = [
    ({}, "no such file"),
    ({"run.yaml": "a: [1,"}, ": not valid YAML: "),
    ({"run.yaml": "model:\n\tmodel: x\n"}, "run.yaml:2: not valid YAML: the line starts with a tab"),
    ({"run.yaml": "a: {b: ${env:B:-1}}"}, "${…} inside of {…} or […] needs quotes, which make it text, or a line"),
    ({"run.yaml": "- a\n- b\n"}, "expected a mapping"),
    ({"run.yaml": "training: {}\n---\nmodel: {}"}, "another document"),
    ({"run.yaml": "training: \0"}, "control characters are not allowed"),
    ({"run.yaml": "extends: .\n"}, "extends: . does not exist"),
    ({"run.yaml": "training:\n  seed: 1\n  seed: 2\n"}, "training.seed"),
    ({"run.yaml": "model: {1: x}\n"}, "keys must be text"),
    ({"run.yaml": "data: &d\n  num_workers: *d\n"}, "contains itself"),
    ({"run.yaml": "model: !!python/object/apply:os.getcwd []\n"}, "model"),
    ({"run.yaml": "extends: 3\n"}, "expected a relative path"),
    ({"run.yaml": "extends: none.yaml\n"}, "none.yaml does not exist"),
    ({"run.yaml": "extends: run.yaml\n"}, "break the cycle"),
    ({"run.yaml": "extends: b.yaml\n", "b.yaml": "extends: [run.yaml]\n"}, "break the cycle"),
]


@pytest.mark.parametrize(("files", "words"), BROKEN_FILES, ids=[words for _, words in BROKEN_FILES])
def test_unreadable_file_is_one_clear_error(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, stage1())
    first = len(path.read_text().splitlines()) + 2
    path.write_text(path.read_text() + "data:\n  num_workers: 1\n  num_workers: 2\n")
    with pytest.raises(ConfigError, match=f"given twice, on lines {first} and {first + 1}"):
        load_config(path)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model: m}\ncustom: {train_jsonl: a.jsonl}\nglobal_max_length: 64\n"
        "training: &t {output_dir: o, seed: 3}\n"
    )
    merged = tmp_path / "merged.yaml"
    merged.write_text(path.read_text().replace("training: &t", "training:\n  <<: &t").replace("seed: 3}", "seed: 4}"))
    merged.write_text(merged.read_text() + "  seed: 5\n")
    assert load_config(path).training.seed == 3
    assert load_config(merged).training.seed == 5


@pytest.mark.parametrize(
    ("given", "weights", "written"),
    [
        ("a.jsonl", {"a.jsonl": 1}, "a.jsonl"),
        (["a.jsonl"], {"a.jsonl": 1}, "a.jsonl"),
        ([{"path": "a.jsonl"}], {"a.jsonl": 1}, "a.jsonl"),
        ([{"path": "a.jsonl", "weight": 2}], {"a.jsonl": 2}, [{"path": "a.jsonl", "weight": 2.0}]),
        (
            [{"path": "a.jsonl", "weight": 0.5}, "b.jsonl"],
            {"a.jsonl": 0.5, "b.jsonl": 1},
            [{"path": "a.jsonl", "weight": 0.5}, {"path": "b.jsonl", "weight": 1.0}],
        ),
    ],
)
def test_training_data_is_a_path_or_a_list_with_weights(
    given: Any, weights: dict[str, float], written: Any, tmp_path: Path
) -> None:
    config = load_config(write_yaml(tmp_path, set_key(stage1(), "custom.train_jsonl", given)))
    assert {str(file.path): file.weight for file in config.custom.train_jsonl} == weights
    assert yaml.safe_load(resolved_yaml(config))["custom"]["train_jsonl"] == written
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_the_home_folder_is_that_of_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file and after a command's ``key=``, where no shell replaces it."""
    monkeypatch.setenv("HOME", "/home/me")
    keys = {"custom": {"train_jsonl": ["~/a.jsonl", {"path": "b/~/a.jsonl"}]}, "deepspeed": {"config": "~/zero.json"}}
    run = write_yaml(tmp_path, {**stage1(), **keys})
    words = ["model.model=~/start", "training.output_dir=~/out", "training.resume_from_checkpoint=~/out/checkpoint-1"]
    config = load_config(run, arguments=words)
    files = [str(file.path) for file in config.custom.train_jsonl]
    assert (files, config.deepspeed.config) == (["/home/me/a.jsonl", "b/~/a.jsonl"], "/home/me/zero.json")
    training = config.training
    assert (config.model.model, str(training.output_dir)) == ("/home/me/start", "/home/me/out")
    assert training.resume_from_checkpoint == "/home/me/out/checkpoint-1"


@pytest.mark.parametrize("key", ["training.max_steps]", "a[x]", "training..max_steps", "", 1, None])
def test_overrides_by_what_is_no_key_are_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match=f"overrides: {re.escape(repr(key))} is no key"):
        load_config(Path(__file__).parents[3] / "configs" / "stage1" / "sft.yaml", {key: 3})


def test_what_is_no_mapping_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="None is no mapping"):
        parse_config(nothing)
