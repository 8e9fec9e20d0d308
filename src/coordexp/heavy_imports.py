"""Imports of torch, transformers and vLLM in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Where these are installed, transformers imports them, and with them pandas and scipy.stats: for a curve of assisted
# decoding, and for a kind of data set that its Trainer takes. Nothing here uses either.
_UNUSED = ("sklearn", "datasets")


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection, which would look through thousands of growing modules again and again, and
    without what transformers imports for others."""
    import transformers.utils as asked

    collects = gc.isenabled()
    answers = {name: getattr(asked, name) for name in (f"is_{package}_available" for package in _UNUSED)}
    gc.disable()
    for name in answers:
        setattr(asked, name, lambda: False)
    try:
        yield
    finally:
        for name, answer in answers.items():
            setattr(asked, name, answer)
        if collects:
            gc.enable()
