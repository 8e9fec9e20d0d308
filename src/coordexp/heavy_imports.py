"""Imports of torch, transformers and vLLM, a fifth faster."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection: five thousand modules are no garbage, and the collector looks through all of
    them again and again. Later collections leave them out."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
