"""torchvision's import beside a CPU torch: in this process, and in others through the hook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from coordexp import torchvision_cpu  # noqa: E402


def run_python(code: str, path: Path | None = None, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path is not None else {})
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_torchvision_imports_after_ensure() -> None:
    code = (
        "from coordexp.torchvision_cpu import ensure_torchvision\nensure_torchvision(); ensure_torchvision()\n"
        "import torchvision.transforms.v2 as t, torch\nprint(t.functional.resize(torch.zeros(3, 4, 4), [2, 2]).shape)"
    )
    result = run_python(code)
    assert "torch.Size([3, 2, 2])" in result.stdout, result.stderr


def test_hook_waits_for_torchvision_and_then_helps(tmp_path: Path) -> None:
    torchvision_cpu.install_hook(tmp_path)
    assert (tmp_path / f"{torchvision_cpu.HOOK_MODULE}.pth").read_text() == f"import {torchvision_cpu.HOOK_MODULE}\n"
    code = (
        f"import sys, importlib.util, {torchvision_cpu.HOOK_MODULE}\n"
        "assert importlib.util.find_spec('torchvision') is not None\n"
        "assert 'torch' not in sys.modules, 'looking whether torchvision exists imported torch'\n"
        "import torchvision.ops\nprint('imported', 'coordexp.torchvision_cpu' in sys.modules)"
    )
    result = run_python(code, tmp_path)
    assert result.stdout == "imported True\n", result.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch needs no help")
def test_hook_is_what_makes_it_work(tmp_path: Path) -> None:
    # -S -E leaves .pth files unread, as in an environment without the hook; the folders go on the path by hand.
    paths = [entry for entry in sys.path if entry]
    result = run_python(f"import sys; sys.path[:] = {paths!r}\nimport torchvision", None, "-S", "-E")
    if result.returncode == 0:
        pytest.skip("this torchvision loads by itself")
    assert "torchvision::nms" in result.stderr
    torchvision_cpu.install_hook(tmp_path)
    code = f"import sys; sys.path[:] = {[str(tmp_path), *paths]!r}\nimport {torchvision_cpu.HOOK_MODULE}, torchvision"
    assert run_python(code, None, "-S", "-E").returncode == 0


def test_cuda_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torchvision_cpu, "_library", None)
    monkeypatch.setattr(torchvision_cpu, "install_hook", lambda folder: pytest.fail("wrote a hook on a CUDA machine"))
    torchvision_cpu.ensure_torchvision()
    assert torchvision_cpu._library is None
    assert torchvision_cpu.main(["--install"]) == 0
    assert "needs no help" in capsys.readouterr().out
