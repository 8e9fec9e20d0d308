"""Imports of torch, transformers and vLLM in less time."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import resource
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

# Where these are installed, transformers imports them, and with them pandas and scipy.stats: for a curve of assisted
# decoding, for a kind of data set that its Trainer takes, for Mistral's tokenizers, and for losses of other detectors.
# No command needs them.
_UNUSED = ("sklearn", "datasets", "mistral_common", "scipy")
# These import peft for a model that it wraps. A command never has one: an adapter's layers are put into the model.
_WITHOUT_PEFT = {"transformers.trainer", "transformers.trainer_utils"}
_MANY_MODULES = 300
# The least that imports map: libraries (libtorch_cpu.so alone has 0.4 GiB), and for each thread of the two OpenBLAS, of
# NumPy and of SciPy, a stack and a buffer. With less, OpenBLAS waits for its buffers for ever, or C++ aborts.
_LIBRARIES_BYTES, _THREAD_BYTES, _MOST_THREADS = 1200 << 20, 80 << 20, 64
# OpenMP's threads spin while they wait for one another: 300,000 times by default, then they sleep. On two cores beside
# one busy process, a step of `coordexp doctor --only training` took 26 times as long, with this count 3 times; on a
# quiet machine 1.02 times.
_SPINS = "10000"
_SPIN_COUNT, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_one_at_a_time = threading.RLock()  # each thread restores the state that it found
_is_command = False


def process_is_a_command() -> None:
    """Call in a process that runs a command and ends: :func:`heavy_imports` may then change it for good. In a user's
    own process imports are complete, and all garbage is collected."""
    global _is_command
    _is_command = True


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import without garbage collection, which would look through thousands of growing modules again and again. A
    command also imports without what it does not need, its later collections pass over modules, and its threads on a
    CPU spin for a short time, unless the environment says how long. Raises MemoryError in a command that may not map
    (``ulimit -v``) as much as they need."""
    with _one_at_a_time, _without_collection(), _as_a_command() if _is_command else nullcontext():
        yield


@contextmanager
def _as_a_command() -> Iterator[None]:
    limit, needed = resource.getrlimit(resource.RLIMIT_AS)[0], _least_mapped()
    if resource.RLIM_INFINITY != limit < needed:
        raise MemoryError(f"the libraries map about {needed / 2**30:.1f} GiB")
    with _spinning_briefly(), _without_unused():
        yield


def _least_mapped() -> int:
    asked = [os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")]
    threads = next((int(number) for number in asked if number.isdecimal() and int(number)), _MOST_THREADS)
    return _LIBRARIES_BYTES + min(threads, len(os.sched_getaffinity(0)), _MOST_THREADS) * _THREAD_BYTES


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
def _spinning_briefly() -> Iterator[None]:
    chosen = _SPIN_COUNT in os.environ or _WAIT_POLICY in os.environ
    if not chosen:
        os.environ[_SPIN_COUNT] = _SPINS  # read once, at the first import of torch; not for this process's children
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop(_SPIN_COUNT, None)


@contextmanager
def _without_unused() -> Iterator[None]:
    known = len(sys.modules)
    with _replaced(importlib.metadata, packages_distributions=packages_distributions):
        import transformers.utils as installed
    from transformers.utils import import_utils

    once = partial(import_structure, import_utils.define_import_structure)
    unused: dict[str, Callable[[], bool]] = {f"is_{package}_available": lambda: False for package in _UNUSED}
    unused["is_peft_available"] = partial(_has_peft, installed.is_peft_available)
    with _replaced(installed, **unused), _replaced(import_utils, define_import_structure=once):
        yield
    if len(sys.modules) - known > _MANY_MODULES:
        gc.freeze()


def _has_peft(is_installed: Callable[[], bool]) -> bool:
    return sys._getframe(1).f_globals["__name__"] not in _WITHOUT_PEFT and is_installed()


@contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    as_found = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in as_found.items():
            setattr(module, name, function)


def packages_distributions() -> dict[str, list[str]]:
    """As :func:`importlib.metadata.packages_distributions`, which transformers calls when it is imported, but without
    an object for each of about 50,000 installed files."""
    found = defaultdict[str, list[str]](list)
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        for package in declared or _modules_of(distribution.read_text("RECORD") or ""):
            found[package].append(distribution.metadata["Name"])
    return dict(found)


def _modules_of(record: str) -> set[str]:
    """Modules among the files in a distribution's RECORD."""
    files = (line.partition(",")[0] for line in record.splitlines())
    return {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}


def import_structure(define: Any, module_path: str | Path, prefix: str | None = None) -> Any:
    """As ``define``, which is transformers' ``define_import_structure``. It reads the files of all models when
    transformers is imported, and would read them again, for the same result, when the first model is."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    if prefix is not None or Path(module_path) != models / "__init__.py":
        return define(module_path, prefix)
    known = define(models, prefix="models")
    inside = "models."
    return {
        needs: {name.removeprefix(inside): objects for name, objects in modules.items() if name.startswith(inside)}
        for needs, modules in known.items()
    }
