"""Engine processes end with the server that started them, however that ends, and do not import its program.

vLLM puts its workers below a core process of its own, which does not notice when its server is killed. Each worker can
ask the kernel to end it with its parent; to end the core as well, it watches the server from a thread.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

import psutil

OWNER_PID = "COORDEXP_ENGINE_OWNER_PID"


def own_engines() -> None:
    """From now on, engines that this process starts end with it. Children inherit who their owner is."""
    os.environ[OWNER_PID] = str(os.getpid())


def die_with_owner() -> None:
    """In a vLLM worker: end it, and the core process above it, when the owner ends. Nothing without an owner."""
    owner = int(os.environ.get(OWNER_PID, "0"))
    if not owner or owner == os.getpid() or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    core = parent if parent != owner and _parent_of(parent) == owner else None
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end(core)
        return
    threading.Thread(target=_watch, args=(handle, core), name="die-with-owner", daemon=True).start()


def _watch(owner_handle: int, core: int | None) -> None:
    select.select([owner_handle], [], [])  # a pidfd turns readable when its process ends
    _end(core)


def _end(core: int | None) -> None:
    # Asked again: if the core has ended meanwhile, its number may be somebody else's.
    if core is not None and os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def forget_program() -> None:
    """Let processes that this one spawns not import the program that it runs first: for ``swift rollout``'s worker that
    is ms-swift with its trainers, seconds and 130 MB for each engine, which needs none of it."""
    program = sys.modules["__main__"]
    program.__spec__ = None
    program.__file__ = None
