"""Memory that a step would take on a GPU, traced on fake CUDA tensors at Qwen3-VL's real width."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile hooks.cpp")


def python(folder: Path, *arguments: str) -> None:
    paths = [str(path) for path in (HERE, HERE.parent, HERE.parents[1] / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Recorded peaks in GB; of full training with two layers the tables and their optimizer state are the most.
PEAKS = {
    "--size 2B --length 6000": 17.0,
    "--size 8B --length 3000": 40.7,  # its head is untied
    "--size 2B --length 6000 --channel-a": 16.7,
    "--size 2B --length 6000 --lora --fused": 3.9,
}


def test_a_step_takes_the_recorded_memory(tmp_path: Path) -> None:
    """In one process, because its imports take longer than a trace."""
    every = "import sys, trace_step\nfor case in sys.argv[1:]: trace_step.main(case.split())"
    python(tmp_path, "-c", every, *(f"--layers 2 --json found.jsonl {case}" for case in PEAKS))
    found = [json.loads(line)["peak_gb"] for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert dict(zip(PEAKS, found, strict=True)) == pytest.approx(PEAKS, rel=0.05)


def test_the_trace_sees_memory(tmp_path: Path) -> None:
    script = """
import fake_cuda
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from device_trace import DeviceTrace

with (fake := FakeTensorMode(allow_non_fake_inputs=True)), DeviceTrace(fake, {}, 3) as trace:
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()
    assert trace.now == 2 * 4096, trace.now  # the weight and its gradient
    assert trace.peak == 2 * 4096 + 2 * 512, trace.peak  # for a moment the product and the sum
    weight[weight > 0]  # as many elements as the trace was given
    assert trace.peak < 2 * 4096 + 4 * 512, trace.peak
"""
    python(tmp_path, "-c", script)
