"""Weights that are NaN or infinite are refused wherever a model is loaded, by folder and tensor."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordexp import Detector
from coordexp.coords import serialize_objects
from coordexp.errors import CheckpointError, TrainingDiverged
from coordexp.modeling.finite import broken_weight
from coordexp.modeling.load import load_model
from coordexp.modeling.scores import TokenScorer
from coordexp.parsing import parse_rollout
from coordexp.records import Rollout
from coordexp.rollouts.backend import DecodingOptions, SeedContext
from coordexp.rollouts.hf import HFBackend
from support.cli_runs import run_cli
from support.rollout_servers import served_checkpoint, server_config, started
from support.tiny_run import load_tiny, run_config, tiny_checkpoint, tiny_samples, tiny_scenes

NAME = "model.language_model.layers.1.mlp.down_proj.weight"


def broken(folder: Path, value: float) -> Path:
    """The tiny checkpoint with one number in the middle of a tensor replaced."""
    shutil.copytree(tiny_checkpoint(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME].view(-1)[tensors[NAME].numel() // 2] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "train": lambda model, out: ["train", out / "run.yaml", f"model.model={model}"],
    "predict": lambda model, out: ["predict", tiny_scenes().parent / "images", "--model", model, "--out", out / "a"],
    "evaluate": lambda model, out: ["evaluate", "--model", model, "--data", tiny_scenes(), "--out", out / "e"],
    "model export": lambda model, out: ["model", "export", model, out / "exported"],
    "data complete": lambda model, out: ["data", "complete", tiny_scenes(), "--model", model, "--out", out / "c.jsonl"],
}


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["NaN", "infinite"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_broken_weights_by_folder_and_tensor(
    command: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], seen: Callable[[object], None]
) -> None:
    model = broken(tmp_path / "model", value)
    run_config(tmp_path, 1)
    ended = run_cli(capsys, *COMMANDS[command](model, tmp_path))
    assert ended.code == 2
    assert f"error: {model}: its weight {NAME} is NaN or infinite" in ended.err
    seen(ended.err.strip().splitlines()[-1])


def test_the_python_api_refuses_broken_weights(tmp_path: Path) -> None:
    model = broken(tmp_path / "model", float("nan"))
    with pytest.raises(CheckpointError, match=f"its weight {NAME} is NaN or infinite"), Detector(model):
        pass


NORM = (NAME,)  # the next norm divides by infinity: logits of 0
PRODUCT = (NAME.replace("down", "gate"), NAME.replace("down", "up"))  # infinite: logits of NaN


def overflowing(folder: Path, names: tuple[str, ...] = PRODUCT) -> Path:
    """The tiny checkpoint with finite weights that are too large."""
    shutil.copytree(tiny_checkpoint(), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        tensors[name] = tensors[name] * 1e38
        assert tensors[name].isfinite().all()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("command", "names"),
    [("predict", PRODUCT), ("evaluate", PRODUCT), ("evaluate", NORM)],
    ids=["predict, NaN", "evaluate, NaN", "evaluate, all the same"],
)
def test_finite_weights_that_overflow_are_refused(
    command: str, names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = overflowing(tmp_path / "model", names)
    ended = run_cli(capsys, *COMMANDS[command](model, tmp_path))
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        f"error: {model}: its logits are NaN, infinite or all the same, so it answers nothing. Training diverged"
    )


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_training_whose_model_computes_nan_has_diverged(temperature: float, skips: bool, tmp_path: Path) -> None:
    loaded = load_model(overflowing(tmp_path / "model"), "float32", "sdpa")
    options = DecodingOptions(8, temperature=temperature, top_p=1.0, top_k=-1, num_beams=1, repetition_penalty=1.0)
    backend = HFBackend(loaded.model, loaded.vocab, options, 2, loaded.image_token_id, skip_forced_tokens=skips)
    requests = [sample.request for sample in tiny_samples(loaded, 3)]
    with pytest.raises(CheckpointError, match="its logits are NaN"):
        backend.generate(requests, SeedContext(0, 0, 0, 0))
    backend.sync_weights(7)
    with pytest.raises(TrainingDiverged, match=r"its logits are NaN.*, after 7 steps; lower"):
        backend.generate(requests, SeedContext(0, 0, 0, 0))


@pytest.mark.parametrize(("trains", "error"), [(False, CheckpointError), (True, TrainingDiverged)])
def test_answers_are_not_scored_by_a_model_that_computes_nan(
    trains: bool, error: type[Exception], tmp_path: Path
) -> None:
    loaded = load_model(overflowing(tmp_path / "model"), "float32", "sdpa")
    (sample,) = tiny_samples(loaded, 1)
    text = serialize_objects(sample.record.objects)
    ids = tuple(loaded.vocab.encode(text))
    rollout = Rollout(sample.record.sample_id, sample.request.prompt_token_ids, ids, text, truncated=False)
    parsed = parse_rollout(ids, loaded.vocab, ended=True)
    assert parsed.objects
    scorer = TokenScorer(loaded.model, loaded.vocab, loaded.image_token_id, trains=trains)
    with pytest.raises(error, match="its logits are NaN"):
        scorer.score([sample.request], [rollout], [parsed])


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": NaN',
         "its configuration cannot be read"),
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999',
         "its configuration cannot be read"),
        ("processor_config.json", '"patch_size": 8', '"patch_size": 0',
         "its image processor cannot be used (ZeroDivisionError"),
        ("processor_config.json", '"merge_size": 2', '"merge_size": 0', "its image processor cannot be used"),
        ("processor_config.json", '"patch_size": 8', '"patch_size": "a"', "processor"),
        ("processor_config.json", '"rescale_factor": 0.00392156862745098', '"rescale_factor": NaN',
         "it makes NaN or infinite pixels); restore processor_config.json"),
        ("chat_template.jinja", "", "{{ ''.__class__.__mro__ }}", "its chat template cannot be used (SecurityError"),
        ("chat_template.jinja", "", "{% if %}", "its chat template cannot be used (TemplateSyntaxError"),
        ("chat_template.jinja", "", "{{ 1 // 0 }}", "its chat template cannot be used (ZeroDivisionError"),
    ],
)  # fmt: skip
def test_files_with_which_nothing_can_be_computed_are_refused(
    file: str, old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(), model)
    text = (model / file).read_text()
    assert old in text
    (model / file).write_text(text.replace(old, new, 1))
    ended = run_cli(capsys, *COMMANDS["evaluate"](model, tmp_path))
    assert ended.code == 2 and "Traceback" not in ended.err
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert f"{model}: " in line and says in line and "restore" in line


def test_large_finite_weights_are_accepted() -> None:
    """Their sum overflows in their own number type."""
    model = torch.nn.Linear(4, 4, dtype=torch.float16)
    torch.nn.init.constant_(model.weight, 60_000.0)
    assert broken_weight(model) is None
    with torch.no_grad():
        model.weight[3, 3] = float("inf")
    assert broken_weight(model) == "weight"


def test_infinities_of_both_signs_do_not_cancel() -> None:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0], model.weight[0, 1] = float("inf"), float("-inf")
    assert broken_weight(model) == "weight"
    assert broken_weight(load_tiny().model) is None


@pytest.mark.campaign
def test_a_server_refuses_broken_weights(tmp_path: Path, seen: Callable[[object], None]) -> None:
    """Its engine loads them itself, in a process of its own."""
    shutil.copytree(served_checkpoint(), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[NAME].view(-1)[7] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    config = server_config(tmp_path, checkpoint=tmp_path / "model")
    with started(tmp_path, config) as server:
        code = server.process.wait(180)
    log = (tmp_path / "server0.log").read_text()
    said = re.search(rf"error: {tmp_path / 'model'}: its weight \S+ is NaN or infinite", log)
    assert code == 2 and said is not None, log[-3000:]
    seen(said[0])
