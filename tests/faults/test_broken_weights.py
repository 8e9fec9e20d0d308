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
from coordexp.errors import CheckpointError
from coordexp.modeling.finite import broken_weight
from support.cli_runs import run_cli
from support.rollout_servers import served_checkpoint, server_config, started
from support.tiny_run import load_tiny, run_config, tiny_checkpoint, tiny_scenes

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
