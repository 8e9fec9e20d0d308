"""torchvision's PyPI wheel beside a torch without CUDA: define the two operators its Python code registers against.

PyPI carries torchvision only as a CUDA build, whose native library cannot load beside a CPU torch; `import torchvision`
then fails on a missing operator although nothing here needs that operator's kernel. On CUDA machines, and with real
CPU builds of torchvision, every function of this module does nothing.
"""

from __future__ import annotations

import sys

_SCHEMAS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # fmt: skip
_library = None  # torch.library drops definitions when their Library object dies


def ensure_torchvision() -> None:
    """Make ``import torchvision`` work in this process. Call before anything imports torchvision."""
    global _library
    import torch

    if torch.version.cuda is not None or "torchvision" in sys.modules or _library is not None:
        return
    if _native_library_loads():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _library = library


def _native_library_loads() -> bool:
    import importlib.util
    from pathlib import Path

    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # not installed: nothing to help
    for candidate in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(candidate))
        except OSError:
            return False
        return True
    return False
