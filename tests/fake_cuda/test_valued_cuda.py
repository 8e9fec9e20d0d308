"""The simulated GPU behaves as a real one where the rows of shipped_rows.py rely on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile hooks.cpp")

START = """
import simulated_h100
import torch
from valued_cuda import CUDA, RECORD, OnCuda

def refused(operation):
    try:
        operation()
    except RuntimeError as error:
        return "two devices" in str(error)
    return False

def places(counter):
    return sorted({what for _, what, _ in counter})
"""

DEVICES = """
with OnCuda():
    on_gpu, on_host = torch.arange(6.0, device="cuda"), torch.arange(6.0)
    table = torch.eye(6, device="cuda")
    assert on_gpu.device == CUDA and (on_gpu * 2 + 1).sum().device == CUDA
    assert refused(lambda: on_gpu + on_host)
    assert refused(lambda: on_host.add_(on_gpu))
    assert refused(lambda: torch.equal(on_gpu, on_host))
    assert refused(lambda: torch.cat([on_gpu, on_host]))
    assert refused(lambda: torch.nn.functional.embedding(torch.tensor([1]), table))
    assert refused(lambda: table.index_put_((torch.tensor([1], device="cuda"),), on_host[:1]))
    # Allowed: scalars of the host, and indices of the host into a tensor of the device.
    assert (on_gpu + torch.tensor(1.0)).tolist() == [1, 2, 3, 4, 5, 6]
    assert on_gpu[torch.tensor([4, 2])].tolist() == [4, 2]
    try:
        on_gpu.numpy()
    except TypeError as error:
        assert "Tensor.cpu()" in str(error)
    else:
        raise AssertionError("a tensor on a GPU has no numpy array")
"""

WAITS = """
with OnCuda():
    values = torch.arange(4.0, device="cuda", requires_grad=True)
    (values * values).sum().backward()
    assert values.grad.device == CUDA
    assert not RECORD.waits
    assert values.grad.cpu().tolist() == [0, 2, 4, 6]
    values.sum().item()
    values[values > 1]
    values.detach().tolist()
    torch.nonzero(values)
    found = places(RECORD.waits)
    assert found == ["copy to the host", "index by a mask", "item", "nonzero", "tolist"], found
    assert not RECORD.pageable
    torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
    assert not RECORD.pageable
    torch.ones(1000).to("cuda")
    assert list(RECORD.pageable.values()) == [4000], RECORD.pageable
"""

MODULES = """
with OnCuda():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    weight, before = layer.weight, layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer.to("cuda")
    assert layer.weight is weight and weight.device == CUDA  # an optimizer built before has the same parameters
    layer(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert all(value.device == CUDA for value in optimizer.state[weight].values())
    assert not torch.equal(weight.detach().cpu(), before)
    layer.load_state_dict({"weight": before, "bias": torch.zeros(2)})
    assert layer.weight is weight and torch.equal(weight.detach().cpu(), before)
"""


@pytest.mark.parametrize("script", [DEVICES, WAITS, MODULES], ids=["devices", "waits", "modules"])
def test_the_simulation_behaves_as_a_gpu(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    # Without the interpreter's end: torch's own threads may outlive what they belong to there.
    command = [sys.executable, "-c", f"{START}{script}\nimport os\nos._exit(0)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
