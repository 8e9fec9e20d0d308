"""``import torchvision`` next to a torch without CUDA.

PyPI carries torchvision only as a CUDA build, whose native library cannot load next to a CPU torch; its import then
fails on a missing operator although nothing here needs that operator's kernel. Its two operators are defined so that
its Python code can register against them. On CUDA machines, and with real CPU builds, nothing is done.

Processes that other programs start (vLLM's and swift's workers) get the same from a hook that ``tools/cpu_wheels.py``
of the repository writes into an environment.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library = None  # torch.library drops definitions when their Library object dies


def ensure_torchvision() -> None:
    """Make ``import torchvision`` work in this process. Call before anything imports torchvision."""
    global _library
    import torch

    # The package's own name is in sys.modules already while its code starts, so look for its first submodule.
    if torch.version.cuda is not None or "torchvision.extension" in sys.modules or _library is not None:
        return
    if native_library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _library = library


def native_library_loads() -> bool:
    """Whether torchvision's compiled part fits the installed torch; true where torchvision is not installed."""
    import torch

    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    origin = spec.origin if spec is not None else getattr(sys.modules.get("torchvision"), "__file__", None)
    if origin is None:
        return True  # not installed: nothing to help
    for candidate in Path(origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(candidate))
        except OSError:
            return False
        return True
    return False
