"""Rows about GPUs, on stand-ins for torch's own questions to the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordexp.doctor import Row, Settings
from coordexp.doctor import machine as machine_module
from coordexp.doctor.machine import host, machine

GB = 1_000_000_000


def rows(folder: Path, gpus: int | None = None) -> dict[str, Row]:
    return {row.check: row for row in machine(Settings(folder, gpus))}


def with_gpus(monkeypatch: pytest.MonkeyPatch, free: float, usable: bool = True) -> None:
    """Two GPUs of 80 GB."""
    answers = {
        "is_available": lambda: usable,
        "device_count": lambda: 2,
        "get_device_name": lambda index: "NVIDIA H100",
        "mem_get_info": lambda index: (int(free * GB), 80 * GB),
        "can_device_access_peer": lambda a, b: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", answer)
    monkeypatch.setattr(machine_module, "versions", lambda: {"torch": "2.13.0"})


def test_gpus_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, free=79)
    found = rows(tmp_path)
    assert {found[name].result for name in ("versions", "GPUs", "GPU memory", "P2P")} == {"ok"}
    assert found["GPUs"].numbers["usable_gpus"] == 2 and "2 x NVIDIA H100" in found["GPUs"].figure
    assert rows(tmp_path, gpus=3)["GPUs"].result == "failed"


def test_a_gpu_that_another_program_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, free=20)
    row = rows(tmp_path)["GPU memory"]
    assert row.result == "failed" and "nvidia-smi" in row.advice


def test_a_driver_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, free=79, usable=False)
    row = rows(tmp_path)["GPUs"]
    assert row.result == "failed" and "driver" in row.advice and row.numbers["usable_gpus"] == 0


def test_untested_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "versions", lambda: {"coordexp": "0.1.0", "peft": "0.1.2"})
    row = rows(tmp_path)["versions"]
    assert row.result == "failed" and "peft==" in row.advice


def test_missing_packages_are_rows_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_module.importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else object()
    )
    found = {row.check: row for row in machine_module.packages(Settings(tmp_path, gpus=1))}
    assert found["liger-kernel"].result == "skipped" and "coordexp[kernels]" in found["liger-kernel"].advice
    assert (found["flashinfer"].result, found["flashinfer"].advice) == ("ok", "")
    on_cpu = {row.check: row for row in machine_module.packages(Settings(tmp_path, gpus=0))}
    assert {row.result for row in on_cpu.values()} == {"skipped"} and not any(row.advice for row in on_cpu.values())


def test_main_memory_is_what_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``docker run --memory 2g``: the machine's own memory was reported. What files fill in the cache can be had."""
    for name, text in {
        "memory.max": "2000000000\n",
        "memory.current": "1500000000\n",
        "memory.stat": "anon 800000000\nfile 700000000\ninactive_file 500000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("coordexp.out_of_memory.CGROUP", tmp_path)
    row = next(row for row in host(Settings(tmp_path, 0)) if row.check == "host memory")
    assert (row.result, row.figure) == ("failed", "1.0 of the container's 2.0 GB free, 4 needed")
    assert row.advice == "raise the container's limit, end other programs, or use fewer GPUs"
    (tmp_path / "memory.max").write_text("max\n")
    row = next(row for row in host(Settings(tmp_path, 0)) if row.check == "host memory")
    assert "container" not in row.figure and row.figure.endswith(" GB free, 4 needed")
