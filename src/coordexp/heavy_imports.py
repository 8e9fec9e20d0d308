"""Imports of torch, transformers and vLLM in less time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

# Where these are installed, transformers imports them, and with them pandas and scipy.stats: for a curve of assisted
# decoding, and for a kind of data set that its Trainer takes. No command needs either.
_UNUSED = ("sklearn", "datasets")
_one_at_a_time = threading.RLock()  # what a thread finds is what it puts back
_is_command = False


def process_is_a_command() -> None:
    """Call in a process that runs a command and ends: :func:`heavy_imports` may then change it for good. In a user's
    own process imports are complete, and all garbage is collected."""
    global _is_command
    _is_command = True


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection, which would look through thousands of growing modules again and again. A
    command also imports without what it does not need, and its later collections pass over modules."""
    with _one_at_a_time, _without_collection(), _without_unused() if _is_command else nullcontext():
        yield


@contextmanager
def _without_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _without_unused() -> Iterator[None]:
    is_first = "transformers.modeling_utils" not in sys.modules
    import transformers.utils as installed

    names = [f"is_{package}_available" for package in _UNUSED]
    as_found = {name: getattr(installed, name) for name in names}
    for name in names:
        setattr(installed, name, lambda: False)
    try:
        yield
    finally:
        for name, function in as_found.items():
            setattr(installed, name, function)
    if is_first:
        gc.freeze()
