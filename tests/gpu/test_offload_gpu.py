"""On a GPU the trainer's memory is freed, and filled again under the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from coordexp.config.rollout import OffloadConfig
from coordexp.modeling.weights import LearnerWeights
from coordexp.training.offload import LearnerOffload
from support.tiny_run import load_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOTH = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)


def test_device_memory_is_freed_and_restored_bit_for_bit() -> None:
    model: Any = load_tiny().model
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.is_cuda)]
    before = [tensor.cpu() for tensor in tensors]
    homes = [tensor.untyped_storage()._cdata for tensor in tensors]
    accumulators = [get_gradient_edge(parameter).node for parameter in model.parameters()]  # DDP has its hooks on them
    held = torch.cuda.memory_allocated()
    offload = LearnerOffload(model, BOTH)
    offload.bind(lambda: optimizer, sharded_by=None)
    with offload.away():
        assert torch.cuda.memory_allocated() < held / 10
        with LearnerWeights(model, offload.current).full() as weights:
            assert all(tensor.device.type == "cpu" for _, tensor in weights)
    assert torch.cuda.memory_allocated() == held
    assert [tensor.untyped_storage()._cdata for tensor in tensors] == homes
    assert [get_gradient_edge(parameter).node for parameter in model.parameters()] == accumulators
    assert all(
        tensor.is_cuda and torch.equal(tensor.cpu(), value) for tensor, value in zip(tensors, before, strict=True)
    )
