"""The command in this process, and runs small enough to train in a test."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coordexp.cli import main
from coordexp.data.scenes import SPARSE, write_scenes
from support.config_samples import set_keys, stage1, stage2, write_yaml

SMALL: dict[str, Any] = {
    "hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "mlp": 64,
    "vision_hidden": 32, "vision_depth": 2, "vision_heads": 2, "vision_mlp": 64,
}  # fmt: skip


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]  # the fixture ``cli``: run_cli with the test's own capsys


def run_cli(capsys: pytest.CaptureFixture[str], *argv: object) -> Outcome:
    """``coordexp *argv``; an exception other than an exit passes through, as a bug's traceback would."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in argv])
    captured = capsys.readouterr()
    return Outcome(int(exit_.value.code or 0), captured.out, captured.err)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python does not notice that a compiled module is cut off (CPython issue 126606), and no process could import it.
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = compiled


def small_checkpoint(folder: Path, coord_tokens: bool = True) -> Path:
    """A copy of a checkpoint with random weights, which is built once per session."""
    return shutil.copytree(_small_checkpoint(coord_tokens), folder, dirs_exist_ok=True)


@lru_cache(maxsize=2)
def _small_checkpoint(coord_tokens: bool) -> Path:
    from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
    from support.tiny_run import _session_folder

    folder = _session_folder() / ("small" if coord_tokens else "small, without coordinates")
    return build_tiny_checkpoint(folder, spec=TinySpec(**SMALL), coord_tokens=coord_tokens)


def write_run(folder: Path, stage: int, model: Path, **keys: Any) -> Path:
    """A YAML that trains ``model`` for one step on two generated scenes; ``keys``: dotted key (``__`` for the dot)."""
    jsonl = folder / "scenes.jsonl"
    if not jsonl.exists():
        write_scenes(folder, 4, SPARSE, 5)
    config = stage1() if stage == 1 else stage2(max_new_tokens=16, decode_batch_size=2)
    if stage == 1:
        config["rollout_matching"] = {"rollout_backend": "hf", "max_new_tokens": 16, "decode_batch_size": 2}
    config["model"] = {"model": str(model), "dtype": "float32"}
    config["custom"] |= {"train_jsonl": str(jsonl), "val_jsonl": str(jsonl)}
    config["training"] = {
        "output_dir": str(folder / f"out{stage}"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "save_steps": 1,
    }
    return write_yaml(folder, set_keys(config, keys), f"stage{stage}.yaml")


def logged(output_dir: Path) -> dict[str, float]:
    state = json.loads((output_dir / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    (line,) = [line for line in state["log_history"] if "loss" in line]
    return line
