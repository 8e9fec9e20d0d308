"""Every operation on fake CUDA tensors: memory, and a roofline.

Real CPU tensors are the host, fake CUDA tensors the device. Waits of the host and operands on two devices are found by
:mod:`valued_cuda`, on whole runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
BLOCK = 512  # bytes that torch's allocator rounds up to

# An H100 at nearly the best that was measured on one (products) or is usual: bytes per second, operations per second by
# kind, seconds of a launch.
MEMORY = 0.9 * 3.35e12
MATRIX = {True: 786e12, False: 0.06 * 494e12}  # in 16 bits; in float32 without TF32
ATTENTION = {False: 380e12, True: 320e12}  # forward; backward
LAUNCH = 4e-6
FROM_HOST = 25e9  # bytes per second over PCIe
PEAK = 989e12

MASKED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "convolution", "convolution_backward")
COPIES = ("clone", "copy_", "_to_copy", "cat", "stack", "select_backward", "slice_backward", "zeros_like", "zero_")
NO_KERNEL = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view")
# These write as much as they are given, and not the whole tensor.
WRITE_A_PART = ("scatter_", "scatter_add_", "index_put_", "_index_put_impl_", "index_add_", "index_copy_")


def asked_by_transformers() -> bool:
    """Whether the innermost function of this project, or of a package that it calls, is transformers'."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("coordexp", "transformers", "peft", "accelerate"):
            if f"/{package}/" in path:
                return package == "transformers"
        frame = frame.f_back
    return False


def place_of_a_kernel() -> tuple[str, bool]:
    """The pass that launches the present kernel: forward, recomputed (within backward) or backward; and whether the
    language head or a loss does."""
    frame: Any = sys._getframe(2)
    passes = "forward" if threading.current_thread() is threading.main_thread() else "backward"
    innermost, objective = True, False
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.endswith("torch/utils/checkpoint.py") and name == "unpack_hook":
            return "recomputed", objective
        if innermost and ("/coordexp/" in path or "/transformers/" in path):
            innermost, objective = False, "/coordexp/objective/" in path
        if name == "_engine_run_backward":
            passes = "backward"
        frame = frame.f_back
    return passes, objective


def place_of_a_wait() -> str:
    """The innermost function of a package that makes the host wait, as ``package: function``."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        for package in ("coordexp", "transformers", "peft", "accelerate"):
            if f"/{package}/" in frame.f_code.co_filename:
                return f"{package}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch: backward"


@dataclass
class Totals:
    """Kernels, e.g. of one step. ``seconds``: each by its bytes or its arithmetic, whichever takes longer."""

    kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, moved: float, flops: float, seconds: float) -> None:
        self.kernels += 1
        self.bytes += moved
        self.flops += flops
        self.seconds += seconds


class DeviceTrace(TorchDispatchMode):
    """Use it inside ``fake``. ``now`` and ``peak``: bytes. ``parts``: kernels by kind and pass. ``waits``: how often a
    place makes the host wait for the device. ``updates``: set it while the optimizer runs."""

    def __init__(self, fake: FakeTensorMode, segments: Mapping[int, tuple[int, ...]], selected: int) -> None:
        """``segments``: lengths of the segments by the length of their row, of tokens and of patches. ``selected``:
        true elements of a boolean mask on the device, whose values are unknown."""
        super().__init__()
        self.fake, self.segments, self.selected = fake, segments, selected
        self.now = self.peak = 0
        self.totals = Totals()
        self.parts: defaultdict[str, Totals] = defaultdict(Totals)
        self.waits: Counter[str] = Counter()
        self.updates = False
        self._live: dict[int, Any] = {}
        self._reads = False

    def restart(self) -> None:
        """Count from here; live memory stays."""
        self.peak = self.now
        self.totals = Totals()
        self.parts.clear()
        self.waits.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [one for one in tensors if isinstance(one, FakeTensor) and one.device.type == "cuda"]
        moves = func in (aten._to_copy.default, torch.ops.prims.device_put.default)
        target = kwargs.get("device", args[1] if moves and len(args) > 1 else None)
        goes_to = None if target is None else torch.device(target).type
        if func.namespace != "prim" and not on_device and goes_to != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        with self.fake:
            if func.namespace == "prim":  # a property
                return func(*args, **kwargs)
            if moves and goes_to == "cpu":
                self.waits[place_of_a_wait()] += not kwargs.get("non_blocking", False)
                with unset_fake_temporarily():
                    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            again, self._reads = self._reads, func is aten._local_scalar_dense.default
            if self._reads:
                self.waits[place_of_a_wait()] += not (again and args[0].dim() == 0)  # tolist copies all numbers at once
                if args[0].dtype == torch.bool:  # transformers asks whether its inputs fit, we whether any is broken
                    return asked_by_transformers()
                return 1.0 if args[0].is_floating_point() else 1
            sized = self._sized_by_values(func, args)
            if sized is not None:
                self.waits[place_of_a_wait()] += 1
                self._hold(sized)
                return sized
            out = func(*self._with_known_masks(func, args), **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"]
        self._count(func, on_device, results, args, kwargs)
        return out

    def _sized_by_values(self, func: Any, args: Any) -> torch.Tensor | None:
        """A result whose size the host learns from the device only."""
        shapes: dict[Any, Callable[[], tuple[int, ...]]] = {
            aten.nonzero.default: lambda: (self.selected, args[0].dim()),
            aten.masked_select.default: lambda: (self.selected,),
            aten.masked_scatter_backward.default: lambda: tuple(args[2]),
        }
        if func not in shapes:
            return None
        dtype = torch.int64 if func is aten.nonzero.default else args[0].dtype
        return torch.empty(shapes[func](), dtype=dtype, device="cuda")

    def _with_known_masks(self, func: Any, args: Any) -> Any:
        """An index that is a boolean mask is ``nonzero`` on the device; indices replace it."""
        if func not in MASKED:
            return args
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
                self.waits[place_of_a_wait()] += 1
                indices += [torch.zeros(self.selected, dtype=torch.int64, device="cuda")] * index.dim()
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key in self._live or not size:
            return

        def release(_: Any) -> None:
            if self._live.pop(key, None) is not None:
                self.now -= size

        self._live[key] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _count(self, func: Any, inputs: list[Any], results: list[Any], args: Any, kwargs: Any) -> None:
        for one in results:
            self._hold(one)
        name = func.overloadpacket.__name__
        given_as = zip(func._schema.arguments, (*args, *[None] * len(func._schema.arguments)), strict=False)
        written = [
            kwargs.get(declared.name, value)
            for declared, value in given_as
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        is_view = not written and any(one.alias_info is not None for one in func._schema.returns)
        if is_view or name in NO_KERNEL:
            return
        given = {one.untyped_storage()._cdata for one in inputs}
        new = [one for one in results if one.untyped_storage()._cdata not in given]
        overwritten = sum(one.nbytes for one in tree_leaves(written) if isinstance(one, torch.Tensor))
        moved = sum(one.nbytes for one in (*inputs, *new))
        if name in WRITE_A_PART:
            moved = 2 * (moved - overwritten)
        elif name not in ("copy_", "fill_", "zero_"):  # these do not read what they overwrite
            moved += overwritten
        if name in ("embedding", "index", "gather", "index_select"):  # they read as much as they return
            moved = 2 * sum(one.nbytes for one in results)
        elif name in ("select_backward", "slice_backward"):  # zeros, and then a copy of the part
            moved += sum(one.nbytes for one in inputs)
        elif name == "logsumexp":  # largest, difference, exponential, sum: torch has no kernel for all
            moved = 6 * inputs[0].nbytes
        flops, speed = self._arithmetic(name, inputs, results, args)
        bandwidth = MEMORY if inputs else FROM_HOST
        part = "optimizer" if self.updates else _part(name, bool(inputs))
        for totals in (self.totals, self.parts[part]):
            totals.add(moved, flops, max(moved / bandwidth, flops / speed, LAUNCH))

    def _arithmetic(self, name: str, inputs: list[Any], results: list[Any], args: Any) -> tuple[float, float]:
        """Operations of a kernel, and how many a second it reaches."""
        flops, speed = 0.0, MATRIX[any(one.dtype.itemsize == 2 for one in inputs)]
        if name in ("mm", "addmm", "addmm_", "bmm"):
            a, b = args[1:3] if name.startswith("addmm") else args[:2]
            flops = 2.0 * a.numel() * b.shape[-1]
        elif name == "convolution":
            flops = 2.0 * results[0].numel() * args[1][0].numel()
        elif name == "convolution_backward":
            flops = 4.0 * args[0].numel() * args[2][0].numel()
        elif "_varlen_attn" in name or "attention" in name:
            backward = "backward" in name
            query, speed = inputs[1 if backward else 0], ATTENTION[backward]
            lengths = next(x for n, x in self.segments.items() if n in query.shape)
            heads_dim = query.numel() / sum(lengths)
            causal = 0.5 if lengths is self.segments[min(self.segments)] else 1.0
            flops = 4.0 * sum(n * n for n in lengths) * heads_dim * causal * (2.5 if backward else 1.0)
        return flops, speed


def _part(name: str, on_device: bool) -> str:
    """The row of the table of parts that a kernel belongs to."""
    if not on_device and name in COPIES:
        return "from the host"
    passes, objective = place_of_a_kernel()
    if objective:
        return f"head, {passes}"
    kind = "products" if name in PRODUCTS else "attention" if "attn" in name or "attention" in name else None
    return f"{kind or ('copies' if name in COPIES else 'element-wise')}, {passes}"
