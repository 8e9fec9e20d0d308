"""CoordExp: detection by writing, taught by rollout matching.

Packages are stages, in the order in which data passes through them: config, data, rollouts, parsing, matching, targets,
packing, modeling, objective, recording, evaluation, training, inference. Weights travel back through weight_sync to
engine and servers.
Records that cross a boundary live in :mod:`coordexp.records`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Detections": "coordexp.inference.detections",
    "Detector": "coordexp.inference.detector",
    "Run": "coordexp.api",
    "convert": "coordexp.api",
    "evaluate": "coordexp.api",
    "parse_answer": "coordexp.inference.parse_answer",
    "train": "coordexp.api",
}


def __getattr__(name: str) -> Any:
    """What is slow to import comes when it is asked for: ``import coordexp`` itself takes no time."""
    if name not in _LAZY:
        raise AttributeError(f"module 'coordexp' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_LAZY]
