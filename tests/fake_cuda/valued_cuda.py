"""CUDA tensors that carry values, which a CPU tensor inside of each holds. Import this module before torch.

A tensor says ``cuda:0``. Its operations run on the CPU, and fail as on a GPU if an operand is on the other device.
Every wait of the host is counted with the function that waits, and every copy from pageable memory to the device with
its size. :mod:`simulated_h100` adds ``torch.cuda``.

Not simulated: streams and races, several ranks (FSDP runs in one), Triton kernels, the storages of tensors, which stay
those of the CPU.
"""

from __future__ import annotations

import fake_cuda  # isort: skip  # noqa: F401  # before torch

import sys
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

MOVES = ("_to_copy", "device_put", "_copy_from")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
# The host learns the size of the result from the device.
SIZED_BY_VALUES = (
    *("nonzero", "masked_select", "masked_scatter_backward", "repeat_interleave"),
    *("unique_consecutive", "unique_dim", "_unique", "_unique2"),
)
READ_BY_HOST = ("equal", "is_nonzero", "allclose")

# Parts of a run, by a file of this project on the stack; the outermost that is named decides.
PHASES = {
    "training/saving.py": "checkpoints",
    "modeling/finite.py": "checkpoints",
    "training/run.py": "start",
    "rollouts/hf.py": "answers",
    "modeling/scores.py": "scores",
    "engine/": "push",
    "weight_sync/": "push",
}
_PACKAGES = ("coordexp", "transformers", "peft", "accelerate", "torch/optim", "torch/nn/utils", "torch/serialization")

Place = tuple[str, str, str]  # part of the run, operation, function


def place_of(operation: str) -> Place:
    """Where this operation was called: part of the run, operation, and ``file function`` of this project, or of a
    package that it calls."""
    frame: Any = sys._getframe(1)
    phase, innermost = "step", ""
    while frame is not None:
        path = frame.f_code.co_filename
        for package in _PACKAGES:
            if f"/{package}/" in path or path.endswith(f"/{package}.py"):
                inside = path.rpartition(f"/{package}")[2]
                innermost = innermost or f"{package}{inside} {frame.f_code.co_name}"
                if package == "coordexp":
                    phase = next((name for part, name in PHASES.items() if inside.startswith(f"/{part}")), phase)
        frame = frame.f_back
    return phase, operation, innermost or "backward"


class Record:
    """The host's calls since the process started."""

    def __init__(self) -> None:
        self.waits: Counter[Place] = Counter()
        self.pageable: Counter[Place] = Counter()  # bytes of the largest copy from pageable memory

    def wait(self, operation: str) -> None:
        self.waits[place_of(operation)] += 1

    def copy(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor.untyped_storage()._cdata not in PINNED:
            place = place_of(operation)
            self.pageable[place] = max(self.pageable[place], tensor.nbytes)


RECORD = Record()
PINNED: dict[int, torch.Tensor] = {}  # page-locked storages; each is kept, so that no later one has its address


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    PINNED[tensor.untyped_storage()._cdata] = tensor
    return tensor


class CudaTensor(torch.Tensor):
    """A tensor that says ``cuda:0``; ``on_host`` has its values."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> CudaTensor:
        assert not isinstance(on_host, CudaTensor)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            layout=on_host.layout,
            device=CUDA,
            requires_grad=False,
        )
        tensor.on_host = on_host
        return tensor

    def __init__(self, on_host: torch.Tensor) -> None: ...

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.on_host!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["on_host"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> CudaTensor:
        return CudaTensor(inner["on_host"])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = CudaTensor(self.on_host.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:  # torch.save; a checkpoint is read with map_location="cpu"
        RECORD.wait("pickle")
        return self.on_host.detach().clone().__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_host.untyped_storage()

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def tolist(self) -> Any:
        RECORD.wait("tolist")
        return self.on_host.tolist()

    def record_stream(self, stream: Any) -> None: ...

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class OnCuda(TorchDispatchMode):
    """Operations without a CUDA tensor among their arguments: factories, and copies to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # of FSDP: a DTensor runs the operation on what it holds of a weight
        return run(func, args, kwargs or {})


def in_every_thread() -> None:
    """Let threads that start from now on simulate too: dispatch modes belong to one thread."""
    of_thread = threading.Thread.run

    def run_on_cuda(self: threading.Thread) -> None:
        with OnCuda():
            of_thread(self)

    threading.Thread.run = run_on_cuda


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: on the host if nothing of it is on the device."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
    on_device, hosted = list[torch.Tensor](), list[torch.Tensor]()
    _find_tensors((*args, *kwargs.values()), on_device, hosted)
    target = kwargs.get("device", args[1] if name == "device_put" else None)
    if not on_device and not is_cuda(target):
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)
    if name in MOVES:
        return _moved(args[0], target, kwargs)
    if "_varlen_attn" in name:
        return _attention(func, args, kwargs, backward="backward" in name)
    if name == "_local_scalar_dense":
        RECORD.wait("item")
        return args[0].on_host.item()
    _record_waits(name, args)
    _refuse_two_devices(func, name, args, hosted)
    return _computed(func, name, args, kwargs)


def _find_tensors(values: Any, on_device: list[torch.Tensor], hosted: list[torch.Tensor]) -> None:
    """An operation's tensors, also those in lists. torch's own trees of values take ten times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            (on_device if isinstance(value, CudaTensor) else hosted).append(value)
        elif isinstance(value, (list, tuple)):
            _find_tensors(value, on_device, hosted)


def _moved(source: torch.Tensor, target: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    kept = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format", "layout")}
    if not isinstance(source, CudaTensor):
        RECORD.copy(source, "to")
        return CudaTensor(aten._to_copy.default(source, **kept))
    copied = aten._to_copy.default(source.on_host, **kept)
    if target is None or is_cuda(target):
        return CudaTensor(copied)
    RECORD.wait("copy to the host")
    return copied


def _record_waits(name: str, args: Any) -> None:
    if name in SIZED_BY_VALUES or name in READ_BY_HOST:
        RECORD.wait(name)
    if name in INDEXED:
        masks = [index for index in args[1] if isinstance(index, torch.Tensor) and index.dtype == torch.bool]
        if masks:
            RECORD.wait(f"{name} by a mask")


def _refuse_two_devices(func: Any, name: str, args: Any, hosted: list[torch.Tensor]) -> None:
    """Raise as CUDA does. Scalars of the host, copies, and indices of a tensor on the device are allowed."""
    hosted = [one for one in hosted if one.dim() > 0]
    if not hosted:
        return
    if name == "copy_":
        if isinstance(args[0], CudaTensor):
            RECORD.copy(args[1], "copy_")
        else:
            RECORD.wait("copy_ to the host")
        return
    if name in INDEXED and isinstance(args[0], CudaTensor) and all(any(one is i for i in args[1]) for one in hosted):
        for one in hosted:
            RECORD.copy(one, f"{name} by an index of the host")
        return
    shapes = ", ".join(str(tuple(one.shape)) for one in hosted)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu: {func}, with "
        f"{shapes} on cpu, in {place_of(name)[2]}"
    )


def _computed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    arguments, named = [_on_host(one) for one in args], {key: _on_host(one) for key, one in kwargs.items()}
    stays = named.get("device") is not None and not is_cuda(named["device"])
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    named.pop("pin_memory", None)
    if func._overloadname == "dtype" and name in ("mm", "bmm", "addmm"):  # CUDA alone has products in another type
        *operands, dtype = arguments
        result = getattr(torch, name)(*(one.to(dtype) for one in operands), **named)
    else:
        result = func(*arguments, **named)
    if func is aten.copy_.default and not isinstance(args[0], CudaTensor):
        return args[0]
    if stays:
        RECORD.wait(f"{name} on the host")
        return result
    return return_and_correct_aliasing(func, args, kwargs, _on_cuda(result))


def _on_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(one) for one in value)
    return value.on_host if isinstance(value, CudaTensor) else value


def _on_cuda(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cuda(one) for one in value)
    return CudaTensor(value) if isinstance(value, torch.Tensor) else value


def _attention(func: Any, args: Any, kwargs: dict[str, Any], *, backward: bool) -> tuple[torch.Tensor, ...]:
    """torch's attention over packed segments, which exists for CUDA alone; computed in float32.

    Letters: queries and keys of a segment T, heads H, dimensions D."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    dtype, starts = given["query"].dtype, given["cu_seq_q"].on_host.tolist()
    query, key, value = (given[name].on_host.float() for name in ("query", "key", "value"))
    scale = given.get("scale") or query.shape[-1] ** -0.5
    causal = bool(given.get("is_causal")) or (given.get("window_size") or [-1, -1])[1] == 0
    groups, heads = query.shape[1] // key.shape[1], key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)

    def weights(part: slice) -> torch.Tensor:
        scores_HTT = torch.einsum("ihd,jhd->hij", query[part], key[part]) * scale
        if causal:
            later_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(1)
            scores_HTT = scores_HTT.masked_fill(later_TT, -torch.inf)
        return scores_HTT.softmax(-1)

    parts = [slice(start, end) for start, end in pairwise(starts)]
    if not backward:
        out = torch.cat([torch.einsum("hij,jhd->ihd", weights(part), value[part]) for part in parts]).to(dtype)
        log_sums = torch.zeros(query.shape[1], query.shape[0])  # the backward pass below reads neither of these
        return CudaTensor(out), CudaTensor(log_sums), CudaTensor(torch.zeros(2, dtype=torch.int64))
    d_out = given["grad_out"].on_host.float()
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for part in parts:
        weights_HTT = weights(part)
        d_value[part] = torch.einsum("hij,ihd->jhd", weights_HTT, d_out[part])
        d_weights = torch.einsum("ihd,jhd->hij", d_out[part], value[part])
        d_scores = weights_HTT * (d_weights - (d_weights * weights_HTT).sum(-1, keepdim=True)) * scale
        d_query[part] = torch.einsum("hij,jhd->ihd", d_scores, key[part])
        d_key[part] = torch.einsum("hij,ihd->jhd", d_scores, query[part])
    folded = [one.view(len(one), heads, groups, -1).sum(2) for one in (d_key, d_value)]
    return tuple(CudaTensor(one.to(dtype)) for one in (d_query, *folded))
