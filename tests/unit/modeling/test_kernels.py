"""Fused kernels: chosen by configuration and machine, wired into every layer, as exact as the layers' own forwards."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from coordexp.config.schema import ModelConfig, TunerConfig
from coordexp.errors import ConfigError
from coordexp.modeling.adapter import tune
from coordexp.modeling.inputs import VisionTower, row_inputs
from coordexp.modeling.kernels import LayerKernels, fuse_layers, unfused_note, wants_fused
from support.tiny_run import gt_segments, load_tiny, row_of

TESTS = Path(__file__).parents[2]


def kernels_in_torch(calls: Counter[str]) -> LayerKernels:
    """transformers' own formulas, counted."""

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        calls["rms_norm"] += 1
        in_float32 = x.float()
        scale = torch.rsqrt(in_float32.pow(2).mean(-1, keepdim=True) + epsilon)
        return weight * (in_float32 * scale).to(x.dtype)

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        calls["swiglu"] += 1
        return functional.silu(gate) * up

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        calls["rotate"] += 1
        rotated = qwen3_vl.apply_rotary_pos_emb(q.to(cos.dtype), k.to(cos.dtype), cos, sin)
        return tuple(one.to(q.dtype) for one in rotated)

    return LayerKernels(rms_norm, swiglu, rotate)


def loss_and_gradients(
    fused: bool, dtype: Literal["float32", "bfloat16"], lora: bool, autocast: bool, calls: Counter[str]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loaded = load_tiny(dtype)
    model: Any = loaded.model
    torch.manual_seed(0)
    if lora:
        tune(model, TunerConfig(train_type="lora", lora_rank=4, lora_dropout=0.0), loaded.vocab.coord_token_ids)
    if fused:
        fuse_layers(model, kernels_in_torch(calls))
    model.train()
    model.gradient_checkpointing_enable(None, every_n_layers=2)
    rope_index, tower = model.model.get_rope_index, VisionTower.from_model(model)
    row = row_of(gt_segments(loaded, 3))
    inputs = row_inputs(row, rope_index, loaded.image_token_id, "packed", tower)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(**inputs, use_cache=False).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "lora", "autocast"),
    [
        ("float32", False, False),
        ("float32", False, True),
        ("float32", True, True),
        ("bfloat16", True, True),
        ("bfloat16", True, False),
    ],
)
def test_a_fused_model_computes_the_same(dtype: Literal["float32", "bfloat16"], lora: bool, autocast: bool) -> None:
    """Under autocast, operations on two number types keep the layer's own forward."""
    calls: Counter[str] = Counter()
    own, own_gradients = loss_and_gradients(False, dtype, lora, autocast, Counter())
    fused, fused_gradients = loss_and_gradients(True, dtype, lora, autocast, calls)
    assert set(calls) == {"rms_norm", "swiglu", "rotate"}
    assert torch.equal(own, fused) and own_gradients.keys() == fused_gradients.keys()
    tolerance = 0.0 if dtype == "float32" else 0.02  # gradients of a LayerNorm are rounded in another place
    for name, gradient in own_gradients.items():
        assert (fused_gradients[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_a_fused_adapter_adds_what_pefts_adds(dtype: Literal["float32", "bfloat16"], tolerance: float) -> None:
    torch.manual_seed(0)
    loaded = load_tiny(dtype)
    tune(loaded.model, TunerConfig(train_type="lora", lora_rank=4, lora_dropout=0.3), loaded.vocab.coord_token_ids)
    model: Any = loaded.model
    layer = model.model.language_model.layers[0].mlp.gate_proj
    layer.lora_B.default.weight.data.normal_()
    x = torch.randn(2, 5, layer.in_features, dtype=getattr(torch, dtype)).requires_grad_()
    leaves = [x, layer.lora_A.default.weight, layer.lora_B.default.weight]

    def computed() -> list[torch.Tensor]:
        torch.manual_seed(1)  # of the dropout
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    own = computed()
    fuse_layers(model, kernels_in_torch(Counter()))
    assert layer.forward.__func__.__name__ == "_with_adapter"
    for ours, pefts in zip(computed(), own, strict=True):
        assert ours.dtype == pefts.dtype and ours.shape == pefts.shape and pefts.norm() > 0
        assert (ours - pefts).norm() <= tolerance * pefts.norm()
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_other_models_of_the_process_keep_their_layers() -> None:
    calls: Counter[str] = Counter()
    fuse_layers(load_tiny().model, kernels_in_torch(calls))
    loss_and_gradients(False, "float32", False, False, calls)
    assert not calls


@pytest.mark.parametrize(
    ("choice", "device", "installed", "expected"),
    [
        ("auto", "cpu", True, False),
        ("auto", "cuda", False, False),
        ("auto", "cuda", True, True),
        (True, "cuda", True, True),
        (False, "cuda", True, False),
        (True, "cpu", True, None),
        (True, "cuda", False, None),
    ],
)
def test_auto_fuses_on_a_gpu_with_the_package_and_true_requires_both(
    choice: Any, device: str, installed: bool, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    config = ModelConfig(model="start", fused_kernels=choice)
    if expected is None:
        with pytest.raises(ConfigError, match=r"model\.fused_kernels: true needs"):
            wants_fused(config, device)
    else:
        assert wants_fused(config, device) is expected
        is_missing = choice == "auto" and device == "cuda" and not installed
        assert ("liger-kernel is not installed" in (unfused_note(config, device) or "")) is is_missing


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("triton", "liger_kernel"))), reason="needs the packages triton, liger-kernel"
)
def test_ligers_kernels_are_as_exact_as_the_layers() -> None:
    """By Triton's interpreter on the CPU, in a process of its own: it would interpret other kernels too."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "support.layer_errors"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for layer, errors in found["float32"].items():
        assert all(fused < 1e-6 for _, fused in errors), layer
    for layer, errors in found["float16"].items():
        assert all(0 < fused < 1.1 * own < 0.01 for own, fused in errors), layer
