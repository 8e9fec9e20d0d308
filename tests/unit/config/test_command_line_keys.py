"""``key.path=value`` after a configuration overrides the file; checked, located and recorded like the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config, parse_config, resolved_yaml
from coordexp.config.from_yaml import explain_config
from coordexp.config.objective import CoordRegSpec
from coordexp.data.files import asset
from coordexp.errors import ConfigError
from coordexp.inference.session import evaluation_config, inference_config
from support.cli_runs import Cli, small_checkpoint, write_run
from support.config_samples import set_key, stage1, stage2, write_yaml


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # as in a file
        (["template.prompt=${env:COORDEXP_TEST_UNSET}"], "COORDEXP_TEST_UNSET"),
        (["rollout_matching.max_new_tokens=99999999999999999999"], "99999999999999999999 has more than 64 bits"),
        (["rollout_matching.decoding={top_p: 0.5, top_p: 0.6}"], "given twice"),
        (["rollout_matching.decode_batch_size=0"], "greater than or equal to 1"),
        # rules between keys
        (["rollout_matching.decode_mode=beam", "rollout_matching.num_beams=3", "rollout_matching.rollout_backend=vllm"],
         "rollout_matching.decode_mode (command line): beam search needs"),
        (["rollout_matching.num_beams=3"], "rollout_matching.num_beams (command line): 3 does not fit"),
        (["rollout_matching.decoding.temperature=2.5", "rollout_matching.rollout_backend=vllm"],
         "rollout_matching.decoding.temperature (command line): vLLM refuses"),
        (["rollout_matching.max_new_tokens=4096"], "max_new_tokens (command line): 4096 leaves no room for the prompt"),
        (["rollout_matching.repeat_terminate={enabled: true, ngram_size: 0}"],
         "rollout_matching.repeat_terminate.ngram_size (command line): and ngram_repeats check"),
    ],
)  # fmt: skip
def test_words_for_a_checkpoint_alone_are_checked_like_those_for_a_file(words: list[str], says: str) -> None:
    demo = asset("checkpoints/demo-stage1")
    for read in (
        lambda: inference_config(demo, words),
        lambda: evaluation_config(demo, Path("val.jsonl"), words),
    ):
        with pytest.raises(ConfigError, match=": 1 problem\n") as refused:
            read()
        assert says in str(refused.value) and "got null" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("training.learning_rate", 1e38, r"1e\+38 is beyond what float32 computes with"),
        ("training.max_steps", 1 << 63, "9223372036854775808 has more than 64 bits"),
        ("training.max_steps", -(1 << 63) - 1, "-9223372036854775809 has more than 64 bits"),
    ],
)
def test_a_number_out_of_range_is_refused_from_every_source(key: str, value: Any, says: str, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, stage1())
    for read in (
        lambda: load_config(config, overrides={key: value}),
        lambda: load_config(config, arguments=[f"{key}={value}"]),
        lambda: parse_config(set_key(stage1(), key, value)),
    ):
        with pytest.raises(ConfigError, match=rf"1 problem\n.*{says}"):
            read()


@pytest.mark.parametrize("seed", [-1, 2147483648, 10**26])
def test_a_seed_that_generators_refuse_is_refused_before_weights_are_read(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"seed: (expected a number .*, got {seed}|{seed} has more than 64)"):
        inference_config(asset("checkpoints/demo-stage1"), seed=seed)


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("training.max_steps=3", ("training", "max_steps"), 3),
        ("training.learning_rate=1e-3", ("training", "learning_rate"), 0.001),
        ("training.run_name=a=b", ("training", "run_name"), "a=b"),
        ("training.run_name='3'", ("training", "run_name"), "3"),
        ("training.run_name='None'", ("training", "run_name"), "None"),
        ("training.run_name=", ("training", "run_name"), None),
        ("training.report_to=[tensorboard]", ("training", "report_to"), ("tensorboard",)),
        ("training.lr_scheduler_kwargs={num_cycles: 2}", ("training", "lr_scheduler_kwargs"), {"num_cycles": 2}),
        ("training.lr_scheduler_kwargs.num-cycles=2", ("training", "lr_scheduler_kwargs"), {"num-cycles": 2}),
        ("template.prompt=${env:COORDEXP_TEST_WORD}", ("template", "prompt"), "cats"),
        ("template.prompt=Find ${env:COORDEXP_TEST_WORD} #1", ("template", "prompt"), "Find cats #1"),
        ("training.run_name=#1", ("training", "run_name"), "#1"),
        ("template.prompt=Find all.\nName them.", ("template", "prompt"), "Find all.\nName them."),
    ],
)
def test_values_are_yaml(
    word: str, path: tuple[str, str], value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COORDEXP_TEST_WORD", "cats")
    config = load_config(write_yaml(tmp_path, stage1()), arguments=[word])
    assert getattr(getattr(config, path[0]), path[1]) == value


def test_a_mapping_merges_as_that_of_a_file_on_top_does(tmp_path: Path) -> None:
    earlier = {"temperature": 0.5, "top_p": 0.9}
    run = write_yaml(tmp_path, set_key(stage2(), "rollout_matching.decoding", earlier))
    on_top = {"extends": run.name, "rollout_matching": {"decoding": {"top_p": 0.8}}}
    word = "rollout_matching.decoding={top_p: 0.8}"
    for config in (load_config(run, arguments=[word]), load_config(write_yaml(tmp_path, on_top, "top.yaml"))):
        decoding = config.rollout_matching.decoding
        assert (decoding.temperature, decoding.top_p) == (0.5, 0.8)
    emptied = ["rollout_matching.decoding=null", "rollout_matching.decoding.top_p=0.8"]
    assert load_config(run, arguments=emptied).rollout_matching.decoding.temperature == 0.0
    shown = explain_config(run, arguments=[word])
    assert shown.source(("rollout_matching", "decoding", "temperature")).startswith(str(run))


def test_list_entries_can_be_set(tmp_path: Path) -> None:
    run = write_yaml(tmp_path, stage2())
    config = load_config(run, arguments=["rollout_matching.pipeline.objective[1].config.w1_weight=0.5"])
    spec = config.rollout_matching.pipeline.objective[1]
    assert isinstance(spec, CoordRegSpec) and spec.config.w1_weight == 0.5


def test_the_word_none_comes_back_from_the_resolved_file(tmp_path: Path) -> None:
    config = load_config(write_yaml(tmp_path, stage1()), {"training.run_name": "None"})
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert "  run_name: 'None'\n" in (tmp_path / "resolved.yaml").read_text()
    assert load_config(tmp_path / "resolved.yaml") == config


def test_command_line_keys_override_everything_else(tmp_path: Path) -> None:
    run = write_yaml(tmp_path, stage1())
    config = load_config(run, {"training.seed": 5, "training.max_steps": 5}, ["training.seed=6"])
    assert (config.training.seed, config.training.max_steps) == (6, 5)


# words -> what each line of the error holds
MISTAKES = [
    (["training.max_steps=many"], ["training.max_steps (command line): expected a whole number, got 'many'"]),
    (["training.max_stepz=3"], ["training.max_stepz (command line): unknown key; did you mean 'max_steps'?"]),
    (["training.eval_strategy=steps"], ["training.eval_strategy (command line): ", "custom.val_jsonl is null"]),
    (["trainnig.max_steps=3"], ["trainnig (command line): unknown key; did you mean 'training'?"]),
    (["training.seed.deep=3"], ["training.seed (command line): expected a whole number, got a mapping"]),
    (["model.dtype=[1,"], ["model.dtype (command line): not valid YAML"]),
    (["training.max_steps=3 #x"], ["training.max_steps (command line): expected a whole number, got '3 #x'"]),
    (["template.prompt='Find' #1"], ["template.prompt (command line): not valid YAML: '#1' would be a comment"]),
    (["training.run_name=${env:COORDEXP_UNSET}"], ["training.run_name (command line): the environment variable"]),
    (["training.report_to={a: 1, a: 2}"], ["training.report_to.a (command line): given twice"]),
    (["training.seed=!!python/none x"], ["training.seed (command line): the tag"]),
    (["rollout_matching.temperature=1"], ["rollout_matching.temperature (command line): removed; write"]),
    (
        ["training.max_steps=x", "model.dtype=float8", "training.seed=-1"],
        ["training.max_steps (command line)", "model.dtype (command line)", "training.seed (command line)"],
    ),
    (["training.max_steps"], ["command line: 'training.max_steps': expected key.path=value"]),
    (["=3", "a..b=1", "a[x]=1"], ["'=3': expected", "'a..b=1': expected", "'a[x]=1': expected"]),
    (["training.seed=1", "training.seed=2"], ["command line: training.seed: given twice, as '1' and '2'; keep one"]),
    (["training.report_to[4]=x"], ["command line training.report_to[4]: there is no 4 in training.report_to"]),
    (["training[0]=x"], ["command line training[0]: there is no 0 in training"]),
    (
        ["custom.train_jsonl[0].weight=2"],
        ["there is no 0 in custom.train_jsonl, which is data/train.jsonl, not a list; set the whole list"],
    ),
    (["tuner.target_modules[0]=q"], ["there is no 0 in tuner.target_modules, which no file sets; set the whole list"]),
    (["template.system=None"], ["template.system (command line): None is text in YAML; write null for nothing"]),
    (["training.report_to=[None]"], ["training.report_to[0] (command line): None is text in YAML"]),
    (
        ["training.resume_from_checkpoint=no"],
        ["resume_from_checkpoint (command line): no is text in YAML; write true or null (./no for a folder"],
    ),
]


@pytest.mark.parametrize(("words", "lines"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_an_error_has_place_and_fix_as_in_a_file(words: list[str], lines: list[str], tmp_path: Path) -> None:
    run = write_yaml(tmp_path, set_key(stage1(), "training.report_to", ["tensorboard"]))
    with pytest.raises(ConfigError) as caught:
        load_config(run, arguments=words)
    assert [line for line in lines if line not in str(caught.value)] == []


def test_check_prints_command_line_keys_with_their_source(tmp_path: Path, cli: Cli) -> None:
    run = write_yaml(tmp_path, stage1())
    shown = cli("config", "check", run, "training.max_steps=3", "model.dtype=float32")
    rows = {line.split("#")[0].strip(): line.split("# ")[-1] for line in shown.out.splitlines()}
    assert (rows["max_steps: 3"], rows["dtype: float32"]) == ("command line", "command line")
    assert rows["seed: 42"] == "default" and shown.code == 0
    assert explain_config(run, arguments=["training.seed=1"]).source(("training", "seed")) == "command line"


@pytest.mark.parametrize("argv", [("train",), ("evaluate",), ("launch", "--config")])
def test_print_shows_the_configuration_and_starts_nothing(argv: tuple[str, ...], tmp_path: Path, cli: Cli) -> None:
    run = write_yaml(tmp_path, {**stage1(), "model": {"model": str(tmp_path / "no model"), "dtype": "float32"}})
    shown = cli(*argv, run, "training.max_steps=7", "--print")
    assert shown.code == 0 and sorted(tmp_path.iterdir()) == [run]
    (tmp_path / "again.yaml").write_text(shown.out, encoding="utf-8")
    again = load_config(tmp_path / "again.yaml")
    assert again == load_config(run, arguments=["training.max_steps=7"]) and again.training.max_steps == 7


@pytest.mark.parametrize(("words", "limit"), [((), "null"), (("custom.val_sample_limit=2",), "2")])
def test_other_data_is_evaluated_whole(words: tuple[str, ...], limit: str, tmp_path: Path, cli: Cli) -> None:
    run = write_yaml(tmp_path, set_key(stage1(), "custom.val_sample_limit", 64))
    shown = cli("evaluate", run, "--data", "other.jsonl", "--print", *words).out
    assert "val_jsonl: other.jsonl " in shown and f"val_sample_limit: {limit} " in shown


def test_training_records_command_line_keys(tmp_path: Path, cli: Cli) -> None:
    model = small_checkpoint(tmp_path / "model")
    run = write_run(tmp_path, 1, model, training__max_steps=50, training__output_dir=str(tmp_path / "unused"))
    words = ("training.max_steps=1", f"training.output_dir={tmp_path / 'out'}")
    assert cli("train", run, *words).code == 0
    manifest = json.loads((tmp_path / "out" / "run_manifest.json").read_text(encoding="utf-8"))
    assert manifest["overrides"] == list(words)
    resolved = (tmp_path / "out" / "resolved_config.yaml").read_text(encoding="utf-8")
    assert resolved == resolved_yaml(load_config(run, arguments=words))
    assert (tmp_path / "out" / "checkpoint-1").is_dir() and not (tmp_path / "unused").exists()
    shown = cli("evaluate", run, f"training.output_dir={tmp_path / 'e'}", "custom.val_sample_limit=2", "--json")
    assert shown.code == 0 and json.loads(shown.out)["metrics"]["images"] == 2
    assert (tmp_path / "e" / "evaluation" / "model" / "metrics.json").is_file()
