"""``make gpu``: each part ends alone, and its commands and configurations are right before a GPU sees them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config import load_config
from coordexp.data.files import asset
from coordexp.doctor.runs import PARTS as STEP_PARTS
from coordexp.doctor.runs import ShippedRun, step_flops
from support.cli_runs import small_checkpoint

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
gpu: Any = importlib.import_module("gpu")
gpu_run: Any = importlib.import_module("gpu_run")


def part(name: str, code: str, limit_s: float = 60.0) -> Any:
    """A part whose process runs ``code`` with the result file as ``sys.argv[2]``."""
    return gpu.Part(name, limit_s, lambda options: [sys.executable, "-c", f"import sys, time\n{code}"], (), limit_s)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: list[Any], *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(gpu, "PARTS", tuple(parts))
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    code = 0
    try:
        gpu.main(["--cpu", "--out", str(folder / "out"), "--work", str(folder / "work"), *words])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["complete"]
    return code, {row["part"]: row for row in summary["results"]}


WRITES = 'open(sys.argv[2], "w").write(\'{"results": {"tokens_per_s": 5.0, "images_per_s": 2.0}}\')'


def test_a_part_that_fails_or_hangs_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [
        part("fails", "print('OutOfMemoryError: 80 GB', 'bye', sep='\\n'); sys.exit(1)"),
        part("hangs", f"{WRITES}\ntime.sleep(600)", limit_s=4.0),
        part("fine", WRITES),
    ]
    code, rows = run(monkeypatch, tmp_path, parts)
    assert code == 1
    assert [row["result"] for row in rows.values()] == ["failed", "timeout", "ok"]
    assert rows["fails"]["note"] == "exit code 1: OutOfMemoryError: 80 GB", "not the last line, which says nothing"
    assert rows["hangs"]["figures"] == {"tokens_per_s": 5.0, "images_per_s": 2.0}, "figures written before it hung"
    assert "5 tokens/s" in rows["fine"]["note"]
    assert (tmp_path / "out" / "logs" / "fails.log").read_text().splitlines()[-1] == "bye"


def test_parts_are_chosen_and_end_with_the_total_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [part("first", "time.sleep(600)"), part("second", "pass"), part("third", "pass")]
    _, rows = run(monkeypatch, tmp_path, parts, "--only", "first", "third", "--total-limit", "1.5")
    assert {name: row["result"] for name, row in rows.items()} == {"first": "timeout", "third": "skipped"}


def test_extra_parts_run_if_named_and_in_a_rehearsal() -> None:
    usual = gpu.read_options([]).only
    assert {"tests", "as_shipped", "sft", "rewritten_colocate", "doctor"} <= set(usual)
    assert not {"lora_8b", "doctor_engine"} & set(usual)
    every = [part.name for part in gpu.PARTS]
    assert gpu.read_options(["--all"]).only == gpu.read_options(["--cpu"]).only == every
    assert gpu.read_options(["--only", "lora_8b"]).only == ["lora_8b"]


def test_folders_are_named_by_hardware_and_date() -> None:
    where = {"gpu": "NVIDIA H100 80GB HBM3", "cores": 16}
    name = gpu.folder_name(where, cpu=False)
    assert name.startswith("h100-80gb-hbm3-20") and len(name) == len("h100-80gb-hbm3-2026-11-26")
    assert gpu.folder_name(where, cpu=True).startswith("cpu-16core-20"), "a rehearsal has no figures of the GPU"


def test_material_that_another_run_left_is_not_measured(tmp_path: Path) -> None:
    on_gpu, on_cpu = (gpu.read_options(["--work", str(tmp_path), *words]) for words in ([], ["--cpu"]))
    assert on_gpu.made("photos") != on_cpu.made("photos"), "those of a rehearsal are small"
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    wide.mkdir()
    (wide / "widened.txt").write_text(str(tmp_path / "demo"))
    options = gpu.read_options(["--work", str(tmp_path), "--narrow", str(narrow)])
    with pytest.raises(SystemExit, match=r"wide was widened from .*/demo, not from --narrow .*/narrow; delete it"):
        gpu.Material(options, {"wide"})
    (wide / "widened.txt").write_text(str(narrow))
    assert gpu.Material(options, {"wide"}).wait(["wide"], deadline=0) is None, "it is there"


@pytest.mark.parametrize("cpu", [False, True], ids=["GPU", "CPU"])
def test_every_configuration_of_a_part_is_valid(cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    class Read(Exception):
        pass

    def read(file: str, keys: Any, *rest: Any) -> None:
        checked.append(load_config(asset(f"configs/{file}"), keys))
        raise Read

    monkeypatch.setattr("coordexp.doctor.runs.train_shipped", read)
    words = ["--out", str(tmp_path), "--work", str(tmp_path), "--wide", str(tmp_path / "wide")]
    options = gpu.read_options([*words, *(["--cpu"] if cpu else [])])
    for one in gpu.PARTS:
        command = [str(word) for word in one.command(options)]
        if "gpu_run.py" in command[1]:
            with pytest.raises(Read):
                gpu_run.main(command[2:])
    assert len(checked) == 8
    assert all(config.data.num_workers == 4 for config in checked), "as shipped"


def test_weights_are_counted_by_their_uses(tmp_path: Path) -> None:
    """Of a model with 64 hidden units, one layer, and a vision tower of two."""
    model = small_checkpoint(tmp_path / "model")
    keys = {"model.model": str(model), "custom.val_jsonl": None, "training.eval_strategy": "no"}
    full = load_config(asset("configs/stage1/sft.yaml"), keys)
    language = 64 * (2 * 64) * 2 + 64 * 64 * 2 + 3 * 64 * 64  # queries and outputs, keys and values, MLP
    head = 64 * json.loads((model / "config.json").read_text())["text_config"]["vocab_size"]
    assert step_flops(full, tokens=10, patches=0, supervised=0) == 6 * 10 * language
    assert step_flops(full, tokens=0, patches=0, supervised=3) == 6 * 3 * head
    tower = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64) + 3 * 2 * 8 * 8 * 32  # two blocks and the patch embedding
    joined = 4 * 32
    merger = joined * joined + joined * 64
    mergers = len(json.loads((model / "config.json").read_text())["vision_config"]["deepstack_visual_indexes"]) + 1
    found = step_flops(full, tokens=0, patches=8, supervised=0)
    assert found == 6 * 8 * tower + 6 * (8 / 4) * mergers * merger
    frozen = load_config(
        asset("configs/stage1/sft.yaml"), {**keys, "tuner.freeze_vit": True, "tuner.freeze_aligner": True}
    )
    assert step_flops(frozen, tokens=0, patches=8, supervised=0) == 2 * 8 * tower + 2 * (8 / 4) * mergers * merger
    lora = load_config(asset("configs/stage1/lora.yaml"), keys)
    linear = [(64, 128), (64, 64), (64, 64), (128, 64), (64, 64), (64, 64), (64, 64)]  # q, k, v, o and three of the MLP
    adapters = sum(32 * (a + b) for a, b in linear)
    assert step_flops(lora, tokens=10, patches=0, supervised=0) == 4 * 10 * language + 6 * 10 * adapters


def test_a_named_region_of_a_profile_is_no_kernel() -> None:
    from torch.autograd import DeviceType

    def event(key: str, kind: DeviceType, micros: float, named: bool = False) -> SimpleNamespace:
        return SimpleNamespace(key=key, count=1, device_type=kind, self_device_time_total=micros,
                               is_user_annotation=named)  # fmt: skip

    events = [
        event("multi_tensor_apply_kernel", DeviceType.CUDA, 20_000.0),
        event("Optimizer.step#AdamW.step", DeviceType.CUDA, 26_000.0, named=True),
        event("aten::mm", DeviceType.CPU, 5_000.0),
    ]
    found = importlib.import_module("gpu_profile").kernels_of(events)
    assert found == [{"name": "multi_tensor_apply_kernel", "calls": 1, "ms": 20.0}]


def test_the_trainers_benchmark_counts_weights_by_their_uses_too() -> None:
    """As `make gpu` does, and attention within segments."""
    forms = importlib.import_module("trainer_forms")
    sizes = forms.Sizes(48, 1, 2, 1, 24, 96, 64, 2, 128, vocabulary=1200)
    model = forms.build_model(sizes, torch.device("cpu"), torch.float32)
    (segment,) = segments = forms.draw_segments([60], sizes)
    patches = len(segment.model_inputs["pixel_values"])
    language = 2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 96
    tower = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 128) + 3 * 2 * 8 * 8 * 64
    mergers = 2 * (256 * 256 + 256 * 48)
    products = segment.length * language + patches * tower + patches / 4 * mergers + 7 * 1200 * 48
    attention = 12 * 2 * 24 * segment.length**2 / 2
    assert forms.flops_per_step(model, segments, 7) == 6 * products + attention


def test_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    line = {
        "time/data_wait_s": 1.0, "time/window_prepare_s": 10.0, "time/weight_sync_s": 2.0, "time/rollout_wait_s": 5.0,
        "time/pack_s": 1.0, "time/learner_s": 4.0, "time/row_wait_s": 1.0, "time/optimizer_s": 3.0,
        "train/tokens_total": 90.0, "train/samples_total": 36.0, "memory/allocated_peak_gb": 7.0,
        "memory/reserved_peak_gb": 8.0,
    }  # fmt: skip
    config = load_config(asset("configs/stage1/sft.yaml"), {"model.model": str(small_checkpoint(tmp_path / "model"))})
    run = ShippedRun(config, [{**line, "time/data_wait_s": 100.0}, line], 60.0, warm_up=1)
    assert run.parts == dict(zip(STEP_PARTS, (1.0, 2.0, 5.0, 2.0, 1.0, 1.0, 3.0, 3.0), strict=True))
    assert run.step_s == 18 and run.computing_s == 6
    assert run.figures["tokens_per_s"] == 5 and run.figures["images_per_s"] == 2
    assert run.figures["allocated_peak_gb"] == 7
    assert run.shares().startswith("reading 6%, push 11%, answers 28%")
