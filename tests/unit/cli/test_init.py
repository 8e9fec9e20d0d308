"""``coordexp init`` writes a configuration that is valid, commented and fits the data, the model and the machine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image

import coordexp.cli.init
from coordexp.checkpoints.card import read_card, write_card
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.checkpoints.memory import MemoryEstimate, check_memory
from coordexp.cli.init import DataAtHand, Decision, advice_on_stage_2, decide, first_configuration, look_at, render
from coordexp.config import RunConfig, load_config
from coordexp.config.from_yaml import differences, explain_config
from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, SPECS, write_scenes
from coordexp.records import GTObject
from support.cli_runs import Cli, small_checkpoint

DEMO = asset("checkpoints/demo-stage1")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``data convert`` leaves: train.jsonl and val.jsonl in a folder."""
    scenes = write_scenes(tmp_path / "mine", 12, SPARSE, 1)
    records = read_jsonl(scenes)
    write_jsonl(records[:9], tmp_path / "mine" / "train.jsonl")
    write_jsonl(records[9:], tmp_path / "mine" / "val.jsonl")
    monkeypatch.chdir(tmp_path)
    return Path("mine")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What init finds by this name; the test writes the script."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return tool


def demo_trained_with(folder: Path, **settings: str | None) -> Path:
    """A copy of the demo's checkpoint whose run had other settings."""
    run = shutil.copytree(DEMO, folder)
    card = read_card(run)
    assert card.training is not None
    write_card(replace(card, training=replace(card.training, **settings)), run)
    return run


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("where", ["--cpu", "--gpu"])
def test_the_written_configuration_is_valid(stage: int, where: str, data: Path, cli: Cli) -> None:
    done = cli("init", data, "--model", DEMO, "--stage", stage, where)
    assert done.code == 0 and f"next: coordexp train stage{stage}.yaml" in done.out
    assert cli("config", "check", f"stage{stage}.yaml").code == 0
    run = load_config(f"stage{stage}.yaml")
    assert [file.path for file in run.custom.train_jsonl] == [data / "train.jsonl"]
    assert run.custom.val_jsonl == data / "val.jsonl"
    assert (run.model.model, run.training.use_cpu, run.training.bf16) == (str(DEMO), where == "--cpu", where == "--gpu")
    in_bfloat16 = where == "--gpu" and (stage == 1 or importlib.util.find_spec("vllm") is not None)
    assert (run.model.dtype == "bfloat16") == (run.training.master_weights == "float32") == in_bfloat16
    assert (run.training.effective_batch_size or 99) <= 9, "no more than the data needs"
    assert run.global_max_length <= 8192, "no more than the model allows"
    lines = Path(f"stage{stage}.yaml").read_text(encoding="utf-8").splitlines()
    keys = [line for line in lines if ":" in line and not line.lstrip().startswith("#") and not line.endswith(":")]
    assert sum(" # " in line for line in keys) > 0.8 * len(keys)


def test_adapters_are_trained_where_all_weights_do_not_fit_and_after_a_lora_run(
    data: Path, tmp_path: Path, nvidia_smi: Path, cli: Cli
) -> None:
    lora_run = demo_trained_with(tmp_path / "lora_run", train_type="lora")
    for mebibytes, model, train_type in ((48, DEMO, "lora"), (81559, DEMO, "full"), (81559, lora_run, "lora")):
        nvidia_smi.write_text(f"#!/bin/sh\necho 81559\necho {mebibytes}\n")
        for stage, rate in ((1, 5e-4), (2, 2e-4)):
            done = cli("init", data, "--model", model, "--stage", stage, "--overwrite")
            assert done.code == 0 and ("adapters" in done.out) == (train_type == "lora")
            run = load_config(f"stage{stage}.yaml")
            assert run.tuner.train_type == train_type and run.training.use_cpu is False
            assert run.training.learning_rate == pytest.approx(rate * (5 if train_type == "lora" else 1))
            assert (run.tuner.lora_rank == 32) == (train_type == "lora")  # lora.yaml's
            assert (run.global_max_length < 900) == (mebibytes == 48), "rows are halved until they fit"
    for said, script in (("no driver", "echo no driver >&2; exit 9"), ("[N/A]", "echo '[N/A]'"),
                         ("No devices were found", "echo No devices were found")):  # fmt: skip
        nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
        done = cli("init", data, "--model", DEMO, "--overwrite")
        assert done.code == 2 and f"nvidia-smi fails: {said}; add --cpu" in done.err


@pytest.mark.parametrize(("mebibytes", "refused"), [(16, True), (81559, False)])
def test_a_gpu_on_which_nothing_fits_is_named(
    mebibytes: int, refused: bool, data: Path, nvidia_smi: Path, cli: Cli
) -> None:
    nvidia_smi.write_text(f"#!/bin/sh\necho {mebibytes}\n")
    done = cli("init", data, "--model", DEMO)
    assert done.code == 0 and ("note: training on that GPU would be refused: model.model" in done.out) == refused


@pytest.mark.parametrize(
    ("mebibytes", "has_vllm", "engine"), [(81559, True, True), (81559, False, False), (8192, True, False)]
)
def test_stage_2_gets_an_engine_if_vllm_is_installed_and_fits(
    mebibytes: int, has_vllm: bool, engine: bool, data: Path, nvidia_smi: Path, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    nvidia_smi.write_text(f"#!/bin/sh\necho {mebibytes}\n")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (has_vllm or None) if name == "vllm" else find(name))
    assert cli("init", data, "--model", DEMO, "--stage", 2).code == 0
    run = load_config("stage2.yaml")
    rollout = run.rollout_matching
    assert rollout is not None and rollout.is_colocated == engine
    assert (rollout.rollout_backend == "hf") == (not engine)
    if engine:
        assert (rollout.vllm.sleep_level, rollout.vllm.tensor_parallel_size, rollout.offload.enabled) == (1, 1, False)
        need, gpu = check_memory(run), mebibytes * 2**20
        assert need.engine_share == rollout.vllm.gpu_memory_utilization >= 0.5 and need.peak(gpu) < 0.9 * gpu
        assert run.model.dtype == "bfloat16" and run.training.master_weights == "float32"


def training_of(at_hand: DataAtHand) -> dict[str, int]:
    """The numbers of section training for a CPU."""
    return yaml.safe_load(first_configuration(at_hand, DEMO, 1, Path("outputs/stage1"), None))["training"]


@pytest.mark.parametrize(("images", "interval"), [(1, 50), (7, 100), (10, 100), (65, 70), (4000, 500)])
def test_a_run_is_evaluated_at_most_four_times(images: int, interval: int, data: Path) -> None:
    """An epoch of 10 images in steps of 8 has two steps."""
    training = training_of(replace(look_at(data, DEMO), images=images))
    steps = math.ceil(images / training["effective_batch_size"]) * training["num_train_epochs"]
    assert training["eval_steps"] == training["save_steps"] == interval >= steps / 4


@pytest.mark.parametrize(("validation", "every"), [(1, 500), (1000, 500), (1001, 1000), (5000, 2500)])
def test_large_validation_data_is_answered_more_rarely(validation: int, every: int, data: Path) -> None:
    """At most one image is answered for four that are trained on: 500 steps of 8 samples pay for 1,000 answers."""
    at_hand = look_at(data, DEMO)
    assert (at_hand.images, at_hand.evaluated) == (9, 3)
    training = training_of(replace(at_hand, images=8000, evaluated=validation))
    assert (training["save_steps"], training["eval_steps"]) == (500, every)


def recipe(path: str | Path) -> dict[str, object]:
    rollout = load_config(path).rollout_matching
    assert rollout is not None
    return rollout.model_dump(include={"target", "maskiou_gate", "pipeline"})


def test_stage_2_is_the_recommended_recipe_and_fits_crowds(data: Path, tmp_path: Path, cli: Cli) -> None:
    shipped = recipe(asset("configs/stage2_rollout_aligned/rewritten.yaml"))
    assert cli("init", data, "--model", DEMO, "--stage", 2).code == 0
    written = recipe("stage2.yaml")
    assert written["target"] == shipped["target"] and written["maskiou_gate"] == shipped["maskiou_gate"]
    crowds = write_scenes(tmp_path / "crowds", 4, SPECS["crowd"], 1)
    assert cli("init", crowds, "--model", DEMO, "--stage", 2, "--overwrite").code == 0
    crowded = recipe("stage2.yaml")["target"]
    assert isinstance(crowded, dict) and (crowded["missed"], crowded["duplicates"]) == ("in_order", "drop")


def test_rates_and_target_width_fit_the_models_size(data: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    shipped = {1: "configs/stage1/sft.yaml", 2: "configs/stage2_rollout_aligned/rewritten.yaml"}
    small = {1: "configs/bccd/stage1.yaml", 2: "configs/demo/stage2.yaml"}
    for parameters, files in ((None, small), (2_000_000_000, shipped)):
        if parameters is not None:
            monkeypatch.setattr(coordexp.cli.init, "weight_shapes", lambda _: {"weight": (2_000_000_000,)})
        for stage, file in files.items():
            assert cli("init", data, "--model", DEMO, "--stage", stage, "--overwrite", "--cpu").code == 0
            written, source = load_config(f"stage{stage}.yaml"), load_config(asset(file))
            assert written.training.learning_rate == source.training.learning_rate
            assert widths(written) == widths(source) == ({8.0} if parameters is None else {2.0})
            assert written.training.gradient_checkpointing is (parameters is not None), "memory matters on a CPU too"


def widths(run: RunConfig) -> set[float]:
    """The target widths that a configuration names."""
    if run.rollout_matching is not None and (pipeline := run.rollout_matching.pipeline) is not None:
        configs = [module.config.model_dump() for module in pipeline.objective]
        return {config["target_sigma"] for config in configs if "target_sigma" in config}
    return set() if run.custom.coord_soft_ce_w1 is None else {run.custom.coord_soft_ce_w1.target_sigma}


def test_parts_of_data_split_are_found(data: Path, cli: Cli) -> None:
    (data / "train.jsonl").rename(data / "all.jsonl")
    (data / "val.jsonl").unlink()
    assert cli("data", "split", data / "all.jsonl", "--shares", "train=0.7,val=0.3").code == 0
    for named in (data, data / "all.train.jsonl"):
        assert cli("init", named, "--model", DEMO, "--overwrite").code == 0
        found = load_config("stage1.yaml").custom
        assert [file.path for file in found.train_jsonl] == [data / "all.train.jsonl"]
        assert found.val_jsonl == data / "all.val.jsonl"


def test_without_validation_data_nothing_is_evaluated(data: Path, cli: Cli) -> None:
    (data / "val.jsonl").unlink()
    for stage in (1, 2):
        done = cli("init", data, "--model", DEMO, "--stage", stage)
        assert done.code == 0 and "data split" in done.out
        assert load_config(f"stage{stage}.yaml").training.eval_strategy == "no"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing", "--model", DEMO), "no such file or folder"),
        (("mine", "--model", "nothing"), "no such folder"),
        (("mine", "--model", "plain"), "expand-vocab"),
        ((".", "--model", DEMO), "train.jsonl"),
        (("mine", "--model", DEMO, "--val", "nothing.jsonl"), "dataset file not found"),
        (("mine", "--model", DEMO, "--out", "mine/train.jsonl"), "exists already"),
        (("mine", "--model", DEMO, "--out", "mine/train.jsonl", "--overwrite"), "mine/train.jsonl: is the dataset"),
        (("mine", "--model", DEMO, "--out", "mine", "--overwrite"), "mine: is a folder"),
        (("empty.jsonl", "--model", DEMO), "empty.jsonl: no image has an object"),
        (("mine", "--model", DEMO, "--val", "empty.jsonl"), "empty.jsonl: no image has an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unusable_input_is_a_one_line_error(words: tuple[object, ...], says: str, data: Path, cli: Cli) -> None:
    if "plain" in words:
        small_checkpoint(Path("plain"), coord_tokens=False)
    if "empty.jsonl" in words:
        write_jsonl([replace(record, objects=()) for record in read_jsonl(data / "train.jsonl")], Path("empty.jsonl"))
    refused = cli("init", *words)
    assert refused.code == 2 and says in refused.err and not Path("stage1.yaml").exists()


@pytest.mark.parametrize("below", ["", "checkpoint-2"])
def test_a_run_does_not_write_into_the_folder_of_its_start(below: str, data: Path, cli: Cli) -> None:
    model = Path("outputs/stage1") / below
    shutil.copytree(DEMO, model)
    refused = cli("init", data, "--model", model, "--cpu")
    assert refused.code == 2 and "--output-dir: outputs/stage1 has the checkpoint to start from" in refused.err
    assert not Path("stage1.yaml").exists()
    assert cli("init", data, "--model", model, "--cpu", "--output-dir", "outputs/more").code == 0


def test_a_sample_longer_than_a_row_is_refused(tmp_path: Path, cli: Cli) -> None:
    scenes = write_scenes(tmp_path, 2, SPARSE, 1)
    text = scenes.read_text(encoding="utf-8").splitlines()
    long = text[0].replace('"desc": "', '"desc": "' + "very " * 9000)
    scenes.write_text("\n".join([long, *text[1:]]), encoding="utf-8")
    refused = cli("init", scenes, "--model", DEMO, "--out", tmp_path / "x.yaml")
    assert refused.code == 2 and not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("objects", [1, 6, 40, 120])
@pytest.mark.parametrize("of", ["train", "val"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_answer_has_room_for_every_annotation(stage: int, of: str, objects: int, tmp_path: Path, cli: Cli) -> None:
    """A shorter one would be cut off in every evaluation. In stage 2 all annotations may follow an answer."""
    (record,) = read_jsonl(write_scenes(tmp_path / "scenes", 1, SPARSE, 1))
    many = (GTObject("red circle", "bbox_2d", (10, 20, 300, 400)),) * objects
    crowded, sparse = (replace(record, objects=some) for some in (many, many[:1]))
    write_jsonl([sparse, *([crowded] if of == "train" else [])], tmp_path / "train.jsonl")
    write_jsonl([crowded], tmp_path / "val.jsonl")
    at_hand = look_at(tmp_path / "train.jsonl", DEMO)
    answer = at_hand.longest_answer
    assert answer >= 14 * objects
    done = cli("init", tmp_path, "--model", DEMO, "--cpu", "--stage", stage, "--out", tmp_path / "s.yaml")
    run = load_config(tmp_path / "s.yaml")
    assert done.code == 0 and run.rollout_matching is not None
    appended = answer if stage == 2 else 0
    longest = at_hand.longest_sample - answer + run.rollout_matching.max_new_tokens + appended
    assert answer <= run.rollout_matching.max_new_tokens <= 2 * answer + 64 and longest <= run.global_max_length


def test_a_long_prompt_of_a_run_counts_in_every_sample(data: Path, tmp_path: Path) -> None:
    run = demo_trained_with(tmp_path / "run", prompt="find " * 100, system="You see cells. " * 100)
    short, with_long = look_at(data, DEMO), look_at(data, run)
    assert with_long.longest_sample - short.longest_sample > 500
    assert with_long.longest_answer == short.longest_answer


@pytest.mark.parametrize(
    ("prompt", "system"),
    [("no", "two\nlines\n"), ("$model ${row} {row}", "no"), ("a b: #c [x].jsonl", "ü"), ("a\u2028b", "$model ${row}")],
)
def test_any_prompt_of_a_run_is_written(prompt: str, system: str, data: Path, tmp_path: Path, cli: Cli) -> None:
    run = demo_trained_with(tmp_path / "run", prompt=prompt, system=system)
    for stage in (1, 2):
        assert cli("init", data, "--model", run, "--stage", stage).code == 0
        written = load_config(f"stage{stage}.yaml").template
        assert (written.prompt, written.system) == (prompt, system)


def test_a_trained_checkpoint_keeps_the_prompt_of_its_run(data: Path, tmp_path: Path, cli: Cli) -> None:
    plain = small_checkpoint(tmp_path / "plain")
    for stage in (1, 2):
        for model, prompt in ((DEMO, "Detect every object."), (plain, None)):
            assert cli("init", data, "--model", model, "--stage", stage, "--overwrite").code == 0
            assert load_config(f"stage{stage}.yaml").template.prompt == prompt


@pytest.mark.parametrize(("images", "epochs"), [(20, 100), (5, 200), (400, 5)])
def test_small_data_gets_the_epochs_and_the_row_that_fit_it(images: int, epochs: int, tmp_path: Path, cli: Cli) -> None:
    scenes = write_scenes(tmp_path / "scenes", 5, SPARSE, 1)
    (one, *_) = scenes.read_text(encoding="utf-8").splitlines()
    scenes.write_text((one + "\n") * images, encoding="utf-8")
    done = cli("init", scenes, "--model", DEMO, "--cpu", "--out", tmp_path / "s.yaml")
    assert done.code == 0, done.err
    run = load_config(tmp_path / "s.yaml")
    assert run.training.num_train_epochs == epochs
    (line,) = (line for line in (tmp_path / "s.yaml").read_text().splitlines() if "tokens. All keys" in line)
    longest = int(line.split()[1])
    assert longest <= run.global_max_length <= 2 * longest + 256, "two samples of a step fill a row"
    counted = json.loads(cli("data", "check", scenes, "--model", DEMO, "--json").out)["tokens"]["max"]
    assert counted <= longest < counted + 32, "with the checkpoint's own, short prompt"


def test_images_and_classes_that_the_model_has_not_seen_are_named(tmp_path: Path, cli: Cli) -> None:
    scenes = write_scenes(tmp_path / "scenes", 3, SPARSE, 1)
    fits = cli("init", scenes, "--model", DEMO, "--cpu", "--out", tmp_path / "a.yaml")
    assert "far from the size" not in fits.out and "new to" not in fits.out
    for path in (tmp_path / "scenes" / "images").rglob("*.png"):
        Image.open(path).resize((800, 608)).save(path)
    text = scenes.read_text(encoding="utf-8").replace('"width": 128, "height": 128', '"width": 800, "height": 608')
    scenes.write_text(text.replace("circle", "disc").replace("square", "disc"), encoding="utf-8")
    done = cli("init", scenes, "--model", DEMO, "--cpu", "--stage", 2, "--out", tmp_path / "b.yaml")
    assert done.code == 0, done.err
    for part in ("3 of 3 images are far from the size", "(800x608)", "--max-pixels 16384", "classes are new to", "disc",
                 "has no evaluation next to it", "train stage 1 longer"):  # fmt: skip
        assert part in done.out


@pytest.mark.parametrize(
    ("recall", "says"),
    [(0.12, "it misses most annotated objects. Train stage 1 longer; stage 2 would make it worse"),
     (0.74, "it finds most annotated objects. Stage 2 helps if half or more of the annotations are missing")],
)  # fmt: skip
@pytest.mark.parametrize("of", ["training", "evaluate"])
def test_stage_2_is_advised_by_the_figures_next_to_its_start(of: str, recall: float, says: str, tmp_path: Path) -> None:
    lines = [{"step": 1, "eval_rollout/f1": 0.99, "eval_rollout/recall": 0.99}]
    if of == "training":
        lines += [{"step": 9, "eval_rollout/f1": 0.3, "eval_rollout/recall": recall}, {"step": 9, "train_loss": 1.0}]
    else:
        (tmp_path / "evaluation").mkdir()
        (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps({"metrics": {"f1": 0.3, "recall": recall}}))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    advice = advice_on_stage_2(tmp_path)
    assert f"F1 0.300 and recall {recall:.3f}" in advice and says in advice


def test_an_evaluation_of_weights_before_further_training_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    metrics = {"metrics": {"f1": 0.9, "recall": 0.9}, "fingerprints": [fingerprint(tmp_path), "data"]}
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps(metrics))
    line = {"step": 9, "eval_rollout/f1": 0.3, "eval_rollout/recall": 0.2}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [line]}))
    assert "F1 0.900" in advice_on_stage_2(tmp_path)
    (tmp_path / "config.json").write_text('{"trained": "again"}')
    assert "F1 0.300" in advice_on_stage_2(tmp_path)


@pytest.mark.parametrize("loads_best", [True, False])
def test_a_run_that_ends_with_its_best_checkpoint_has_that_ones_figures(loads_best: bool, tmp_path: Path) -> None:
    """0.8 after step 4, 0.7 after step 8: the model of the folder is either; that of checkpoint-8 is step 8's."""
    lines = [{"step": step, "eval_rollout/f1": f1, "eval_rollout/recall": 0.9} for step, f1 in ((4, 0.8), (8, 0.7))]
    state = {"global_step": 8, "best_global_step": 4, "best_model_checkpoint": "run/checkpoint-4", "log_history": lines}
    checkpoint = tmp_path / "checkpoint-8"
    checkpoint.mkdir()
    (checkpoint / "complete.json").write_text("{}")
    for folder in (tmp_path, checkpoint):
        (folder / "trainer_state.json").write_text(json.dumps(state))
        settings = f"training: {{load_best_model_at_end: {str(loads_best).lower()}}}\n"
        (folder / "resolved_config.yaml").write_text(settings)
    assert f"F1 {0.8 if loads_best else 0.7:.3f}" in advice_on_stage_2(tmp_path)
    assert "F1 0.700" in advice_on_stage_2(checkpoint)


def test_a_start_without_figures_names_the_command_that_measures_it(tmp_path: Path) -> None:
    assert f"coordexp evaluate --model {tmp_path} --data VAL.jsonl" in advice_on_stage_2(tmp_path)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("long", [0, 1, 30, 48])
def test_the_samples_of_a_micro_step_fill_a_row_and_do_not_wait_for_one(
    long: int, stage: int, tmp_path: Path, cli: Cli
) -> None:
    """``long`` of 48 samples have 40 objects, the others one."""
    (record,) = read_jsonl(write_scenes(tmp_path / "scenes", 1, SPARSE, 1))
    few, many = ((GTObject("red circle", "bbox_2d", (10, 20, 300, 400)),) * count for count in (1, 40))
    write_jsonl([replace(record, objects=many if k < long else few) for k in range(48)], tmp_path / "train.jsonl")
    at_hand = look_at(tmp_path / "train.jsonl", DEMO)
    mean = at_hand.mean_sample + (at_hand.mean_answer / 2 if stage == 2 else 0)  # answers are longer than annotations
    for where in ("--cpu", "--gpu"):
        words = (tmp_path / "train.jsonl", "--model", DEMO, "--stage", stage, where, "--out", tmp_path / "s.yaml")
        assert cli("init", *words, "--overwrite").code == 0
        run = load_config(tmp_path / "s.yaml")
        least = 0.65 if stage == 1 else 0.6  # answers of stage 2 may be longer than annotations
        assert least < run.training.per_device_train_batch_size * mean / run.global_max_length < 1


@pytest.mark.parametrize(("gigabytes", "every"), [(80, 2), (95, 4), (150, 0), (60, 1)])
def test_activations_are_recomputed_in_as_few_layers_as_memory_allows(gigabytes: float, every: int, data: Path) -> None:
    """All weights of 2B, with an estimate of 44 GB, and 44 GB more if no layer recomputes."""

    def estimate(decision: Decision) -> MemoryEstimate:
        recomputed = 1 / decision.recompute_every if decision.recompute_every else 0
        return MemoryEstimate(0, 0, 0, 44e9 + (1 - recomputed) * 44e9, 0, 0)

    at_hand = look_at(data, DEMO)
    decision = decide(at_hand, 1, int(gigabytes * 1e9), 2_000_000_000, None, estimate)
    text = render(decision, at_hand, DEMO, Path("outputs/stage1"))
    training = yaml.safe_load(text)["training"]
    assert training["gradient_checkpointing"] == (every > 0)
    assert training.get("gradient_checkpointing_every", 1) == max(1, every)
    assert ("layers only" in text) == (every > 1) and ("are kept" in text) == (every == 0)


DECIDED = {
    "training.num_train_epochs", "training.effective_batch_size", "training.per_device_train_batch_size",
    "training.gradient_checkpointing", "training.logging_steps", "training.save_steps", "training.eval_steps",
    "training.output_dir", "data.num_workers", "global_max_length", "model.model", "custom.val_jsonl",
    "training.gradient_checkpointing_every", "custom.train_jsonl", "template.prompt",
    "rollout_matching.decode_batch_size", "rollout_matching.max_new_tokens",
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "train_type", "shipped"),
    [
        (1, "full", "configs/stage1/sft.yaml"),
        (1, "lora", "configs/stage1/lora.yaml"),
        (2, "full", "configs/stage2_rollout_aligned/rewritten.yaml"),
        (2, "lora", "configs/stage2_rollout_aligned/lora.yaml"),
    ],
)
def test_keys_that_init_does_not_decide_are_those_of_the_shipped_configuration(
    stage: int, train_type: str, shipped: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:  # fmt: skip
    """A GPU, 2B parameters, a checkpoint of another program or of a LoRA run."""
    model = demo_trained_with(tmp_path / "model", train_type=train_type)
    if train_type == "full":
        write_card(replace(read_card(model), training=None), model)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    monkeypatch.setattr(coordexp.cli.init, "weight_shapes", lambda _: {"weight": (2_000_000_000,)})
    assert cli("init", data, "--model", model, "--stage", stage, "--gpu").code == 0
    changed = {path for path, *_ in differences(explain_config(f"stage{stage}.yaml"), explain_config(asset(shipped)))}
    assert changed <= DECIDED
