"""CoordExp: train Qwen3-VL to detect objects by writing JSON, first by SFT, then by rollout matching.

Each package is a stage. In the order in which data passes through them: config, data, rollouts, parsing, matching,
targets, packing, modeling, objective, recording, evaluation, training, inference. ``engine`` contains everything about
vLLM; ``weight_sync`` sends trained weights to it. Stages exchange the records of :mod:`coordexp.records`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Detections": "coordexp.inference.detections",
    "Detector": "coordexp.inference.detector",
    "CompletionRules": "coordexp.inference.completion",
    "Run": "coordexp.api",
    "complete": "coordexp.api",
    "convert": "coordexp.api",
    "evaluate": "coordexp.api",
    "parse_answer": "coordexp.inference.parse_answer",
    "tile": "coordexp.api",
    "train": "coordexp.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because torch and transformers take seconds to import."""
    if name not in _LAZY:
        raise AttributeError(f"module 'coordexp' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_LAZY]
