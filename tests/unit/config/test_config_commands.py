"""``coordexp config check``, ``schema`` and ``diff``."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from coordexp.checkpoints.memory import check_memory
from coordexp.cli.commands import app
from coordexp.config import RunConfig, load_config, parse_config
from coordexp.config.from_yaml import json_schema_text
from coordexp.errors import ConfigError
from support.config_samples import drop_key, set_key, stage1, stage2, write_yaml
from support.tiny_run import tiny_checkpoint

ROOT = Path(__file__).parents[3]
FILE_NAME = "coordexp.schema.json"


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """A file that extends another, takes a value from the environment, and leaves the rest at its defaults."""
    write_yaml(
        tmp_path, set_key(stage2(), "template.prompt", "Find\neverything: ${env:COORDEXP_TEST_WHAT:-cats}"), "base.yaml"
    )
    raw = {
        "extends": "base.yaml",
        "model": {"dtype": "float32"},
        "training": {"seed": 7},
        "deepspeed": {"config": {"a": [1, {"b": 2}], "${c}": []}},
    }
    return write_yaml(tmp_path, raw, "leaf.yaml")


def test_check_prints_each_value_with_its_source(leaf: Path) -> None:
    lines = {line.split("#")[0].rstrip(): line.split("# ")[-1] for line in run("check", leaf).stdout.splitlines()}
    base = leaf.with_name("base.yaml")
    assert lines["  seed: 7"] == f"{leaf}:{_line(leaf, 'seed: 7')}"
    assert lines["  train_jsonl: data/train.jsonl"] == f"{base}:{_line(base, 'train_jsonl')}"
    assert lines["  max_grad_norm: 1.0"] == "default"
    assert lines['  prompt: "Find\\neverything: cats"'] == f"{base}:{_line(base, 'prompt')}, $COORDEXP_TEST_WHAT"
    assert lines["      - name: token_ce"] == f"{base}:{_line(base, 'name: token_ce')}"


def _line(path: Path, words: str) -> int:
    return 1 + next(number for number, line in enumerate(path.read_text().splitlines()) if words in line)


@pytest.mark.parametrize("flags", [[], ["--plain"], ["--only-set"], ["--plain", "--only-set"]])
def test_output_of_check_loads_back_to_the_same_run(flags: list[str], leaf: Path, tmp_path: Path) -> None:
    printed = run("check", leaf, *flags)
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert ("# " in printed.stdout) is ("--plain" not in flags)
    again = tmp_path / "again.yaml"
    again.write_text(printed.stdout, encoding="utf-8")
    assert load_config(again) == load_config(leaf)


def test_check_prints_advice_on_stderr(tmp_path: Path) -> None:
    printed = run("check", write_yaml(tmp_path, set_key(stage1(), "model.dtype", "bfloat16")))
    assert printed.exit_code == 0 and printed.stderr.startswith("note: model.dtype: bfloat16")


def test_check_estimates_memory_on_stderr(tmp_path: Path) -> None:
    config = set_key(set_key(stage1(), "model.model", str(tiny_checkpoint())), "model.dtype", "float32")
    printed = run("check", write_yaml(tmp_path, config))
    estimate = check_memory(parse_config(config))
    assert (printed.exit_code, printed.stderr) == (0, f"memory: {estimate}\n")
    assert yaml.safe_load(printed.stdout)["model"]["model"] == str(tiny_checkpoint())
    sharded = set_key(config, "fsdp.enabled", True)
    for devices, processes in (([], 8), ([0, 1, 2], 3)):
        config = set_key(sharded, "launch.learner_devices", devices)
        estimate = check_memory(parse_config(config), processes)
        assert run("check", write_yaml(tmp_path, config)).stderr == f"memory: {estimate}, of {processes}\n"


def test_diff_names_differences_on_both_sides(tmp_path: Path) -> None:
    a = write_yaml(tmp_path, stage2(), "a.yaml")
    changed = drop_key(set_key(stage2(), "training.seed", 7), "rollout_matching.pipeline.objective[2]")
    b = write_yaml(tmp_path, changed, "b.yaml")
    printed = run("diff", a, b)
    lines = printed.stdout.splitlines()
    assert printed.exit_code == 1
    assert lines[:3] == ["training.seed", "  - 42  # default", f"  + 7  # {b}:{_line(b, 'seed: 7')}"]
    paths = {line for line in lines if not line.startswith(" ")}
    assert paths == {"training.seed"} | {
        f"rollout_matching.pipeline.objective[2].{key}"
        for key in ("name", "enabled", "weight", "channels", "config.smoothl1_weight", "config.ciou_weight")
    }
    assert "  + (no such entry)" in lines


def test_diff_of_two_spellings_of_one_run_is_empty(leaf: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat.yaml"
    flat.write_text(run("check", leaf, "--plain").stdout, encoding="utf-8")
    same = run("diff", leaf, flat)
    assert (same.exit_code, same.stdout) == (0, "")


def test_committed_schema_is_current() -> None:
    path = ROOT / "configs" / FILE_NAME
    assert path.read_text(encoding="utf-8") == json_schema_text(), f"run: coordexp config schema > {path}"
    assert run("schema").stdout == json_schema_text()


def test_schema_covers_every_section_and_key() -> None:
    schema = json.loads(json_schema_text())
    assert set(schema["properties"]) == {"extends", *RunConfig.model_fields}
    assert all(definition.get("additionalProperties") is False for definition in schema["$defs"].values())
    assert schema["$defs"]["TokenCESpec"]["required"] == ["name", "enabled", "weight", "channels", "config"]
    assert "required" not in schema["$defs"]["ModelConfig"]  # an extended file may contain it


SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "parts")
# (YAML, is it valid by the schema?)
SCHEMA_CASES: list[tuple[dict[str, Any], bool]] = [
    (stage1(), True),
    (stage2(), True),
    ({"extends": "x.yaml"}, True),
    ({}, False),
    (drop_key(stage1(), "training"), False),
    (set_key(stage1(), "training.sed", 1), False),
    (set_key(stage1(), "training.seed", "${env:SEED}"), True),
    (set_key(stage1(), "training.seed", "1"), False),
    (set_key(stage1(), "training.report_to", "wandb"), True),
    (set_key(stage1(), "training.resume_from_checkpoint", True), True),
    (set_key(stage1(), "training.resume_from_checkpoint", 3), False),
    *[(drop_key(stage1(), key), False) for key in ("model.model", "custom.train_jsonl", "training.output_dir")],
    ({"extends": "x.yaml", **drop_key(stage1(), "model.model")}, True),
    (stage1() | {"stage2_ab": {"schedule": {"b_ratio": 0.5}}}, False),
    (set_key(stage1(), "model.dtype", "${env:DTYPE:-float32}"), True),
    (set_key(stage1(), "custom.trainer_variant", "${env:VARIANT:-null}"), True),
    (set_key(stage1(), "model.dtype", "bf16"), False),
    (set_key(stage1(), "training.output_dir", " "), False),
    *[
        (set_key(stage1(), f"training.{key}", value), valid)
        for key, right, wrong in (
            ("optim", "adamw_torch_fused", "adamw"),
            ("lr_scheduler_type", "cosine", "cosin"),
            ("report_to", ["tensorboard", "none"], ["tensorbord"]),
        )
        for value, valid in ((right, True), (wrong, False))
    ],
    (set_key(stage2(), "rollout_matching.pipeline.objective[0].channels", ["B", "B"]), False),
    (drop_key(stage2(), "rollout_matching.pipeline.objective[0].weight"), False),
    (set_key(stage2(), "rollout_matching.pipeline.objective[0].config.foo", 1), False),
]


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(json_schema_text()))


def _valid(data: Any) -> bool:
    return _validator().is_valid(data)


@pytest.mark.parametrize(("data", "valid"), SCHEMA_CASES)
def test_schema_agrees_with_the_loader(data: dict[str, Any], valid: bool) -> None:
    assert _valid(data) is valid


def test_no_meaning_is_broken_into_paragraphs() -> None:
    """Editors show a line break of a description as a new paragraph."""
    assert re.findall(r'"description": "[^"]*\\n.*', json_schema_text()) == []


def test_shipped_files_are_valid_under_their_schema() -> None:
    assert json.loads((ROOT / "configs" / FILE_NAME).read_text(encoding="utf-8"))["$schema"]
    prefix = "# yaml-language-server: $schema="
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        named = path.parent / text.splitlines()[0].removeprefix(prefix)
        assert text.startswith(prefix) and named.resolve() == ROOT / "configs" / FILE_NAME, path
        assert _valid(yaml.safe_load(text)), path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["training.optim=adamw_8bit"], "needs the package bitsandbytes"),
        (["training.lr_scheduler_type=cosine_with_min_lr"], "training.lr_scheduler_type: cosine_with_min_lr ("),
        (["training.lr_scheduler_type=warmup_stable_decay"], "num_decay_steps"),
        (["training.lr_scheduler_kwargs.foo=1"], "training.lr_scheduler_kwargs: {'foo': 1} does not fit"),
        (["training.report_to=kubeflow"], "KUBEFLOW_TRAINER_SERVER_URL"),
    ],
)
def test_what_training_would_refuse_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    outcome = run("check", write_yaml(tmp_path, stage1()), *words)
    assert isinstance(outcome.exception, ConfigError) and says in str(outcome.exception)
    assert outcome.stdout == ""


def test_a_schedule_with_its_arguments_is_accepted(tmp_path: Path) -> None:
    words = ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs.min_lr=1e-6"]
    assert run("check", write_yaml(tmp_path, stage1()), *words).exit_code == 0


def test_a_fragment_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match=r"rewritten_target\.yaml: is a fragment.*start a file that extends it"):
        load_config(ROOT / "configs" / "stage2_rollout_aligned" / "parts" / "rewritten_target.yaml")
