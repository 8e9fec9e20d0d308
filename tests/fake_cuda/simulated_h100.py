"""``torch.cuda`` as one H100 whose tensors carry values. Import this module before torch, transformers and coordexp.

Two traps, both found the hard way:

* ``torch.nn.Module.to`` assigns to ``parameter.data``, which torch refuses between a plain tensor and a subclass; so
  does FSDP. Swapping tensors instead keeps the parameters' identity, as ``.data`` does on a GPU. But swapping must be
  on during ``.to`` alone: ``load_state_dict`` would swap too, and drop what is set on a parameter, such as
  ``grad_dtype``.
* ``torch.tensor`` and ``torch.as_tensor`` must stay torch's own objects while a model is loaded: transformers compares
  constructors by identity, and leaves ``inv_freq`` uninitialised if they differ. So :func:`read_scalars` comes later.
"""

from __future__ import annotations

import valued_cuda  # isort: skip  # before torch

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init
from valued_cuda import PINNED, RECORD, CudaTensor, is_cuda, pinned

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (simulated)",
    total_memory=85_017_493_504,
    major=9,
    minor=0,
    multi_processor_count=132,
    uuid="simulated",
)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        RECORD.wait("event.synchronize")


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Event:
        return Event()

    def synchronize(self) -> None:
        RECORD.wait("stream.synchronize")


class HostGenerator:
    """Random numbers of the device are drawn on the host."""

    def __new__(cls, device: Any = None, _new: Callable[[], Any] = torch.Generator) -> Any:
        return _new()


def install() -> None:
    """Replace what a CPU build of torch says about CUDA."""
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: state,
        "set_rng_state": lambda given, device=None: None,
        "get_rng_state_all": lambda: [state],
        "set_rng_state_all": lambda given: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: RECORD.wait("cuda.synchronize"),
        "empty_cache": lambda: RECORD.wait("cuda.empty_cache"),
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") then copies, which is simulated
    _replace(torch, "Generator", HostGenerator)
    _replace(torch.Tensor, "pin_memory", lambda self, device=None: pinned(self.clone()))
    _replace(torch.Tensor, "is_pinned", lambda self, device=None: self.untyped_storage()._cdata in PINNED)
    _replace(torch.nn.Module, "to", _module_to(torch.nn.Module.to))
    _replace(fsdp_init, "_move_states_to_device", _move)
    for name in ("storage_ptr", "storage_size"):  # by which tensors that share memory are found
        for module_name in (name, f"_{name}"):
            if hasattr(safetensors.torch, module_name):
                _replace(safetensors.torch, module_name, _of_host(getattr(safetensors.torch, module_name)))
    valued_cuda.in_every_thread()


def read_scalars() -> None:
    """Let ``torch.tensor([scalar on the device, …])`` read its scalars. Only after a model is loaded, see above."""
    for name in ("tensor", "as_tensor"):
        _replace(torch, name, _reading(getattr(torch, name)))


def _replace(owner: Any, name: str, by: Any) -> None:
    setattr(owner, name, by)


def _module_to(usual: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        tensors = [*self.parameters(), *self.buffers()]
        only_device = len(args) == 1 and not kwargs and isinstance(args[0], (torch.device, str))
        if only_device and is_cuda(args[0]) and all(isinstance(one, CudaTensor) for one in tensors):
            return self
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return usual(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return to


def _move(parameters: list[torch.nn.Parameter], buffers: list[torch.Tensor], device: torch.device) -> None:
    """As FSDP moves what it shards."""
    for tensor in (*parameters, *buffers):
        if tensor.device == device or tensor.is_meta:
            continue
        moved = tensor.detach().to(device)
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)


def _of_host(usual: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: usual(tensor.on_host if isinstance(tensor, CudaTensor) else tensor)


def _reading(usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def read(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return type(data)(read(one) for one in data)
        return data.item() if isinstance(data, CudaTensor) and data.dim() == 0 else data

    return lambda data, **kwargs: usual(read(data) if isinstance(data, (list, tuple)) else data, **kwargs)


install()
