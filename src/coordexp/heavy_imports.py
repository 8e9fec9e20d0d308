"""Imports of torch, transformers and vLLM in less time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Where these are installed, transformers imports them, and with them pandas and scipy.stats: for a curve of assisted
# decoding, and for a kind of data set that its Trainer takes. Nothing here uses either.
_UNUSED = ("sklearn", "datasets")
_ONE_AT_A_TIME = threading.RLock()  # what a thread finds is what it puts back


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection, which would look through thousands of growing modules again and again, and
    without what transformers imports for others. Later collections pass over the modules of the first imports, and over
    what else is alive then. Threads wait for each other."""
    with _ONE_AT_A_TIME:
        yield from _importing()


def _importing() -> Iterator[None]:
    collects, is_first = gc.isenabled(), "transformers" not in sys.modules
    if is_first:
        gc.collect()  # garbage of the caller would be passed over too
    gc.disable()
    try:
        import transformers.utils as asked

        answers = {name: getattr(asked, name) for name in (f"is_{package}_available" for package in _UNUSED)}
        for name in answers:
            setattr(asked, name, lambda: False)
        try:
            yield
        finally:
            for name, answer in answers.items():
                setattr(asked, name, answer)
        if is_first:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
