"""Processes of vLLM engines: their environment, how they end with their owner, and the trainer's settings that an
engine in its process must not change."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil

from coordexp.errors import ConfigError
from coordexp.heavy_imports import heavy_imports, process_is_a_command

DIE_WITH_PARENT = "COORDEXP_DIE_WITH_PARENT"
OWNER_PID = "COORDEXP_ENGINE_OWNER_PID"
DP_COORDINATOR = "DPCoordinator"  # part of its process title
SERVER_API_KEY = "COORDEXP_ROLLOUT_API_KEY"  # the token itself, for servers that would show it in their command line
PLUGINS = "VLLM_PLUGINS"
MEDIA_CONNECTOR = "coordexp"  # the name by which vLLM finds our class that opens images
VISIBLE = "CUDA_VISIBLE_DEVICES"

_EVERYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the guard is a logits processor of the first runner's interface
    "TOKENIZERS_PARALLELISM": "false",
    # A forked engine would inherit the server's threads, event loop and socket. vLLM spawns on CPUs, and forks on GPUs.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Spinning OpenMP threads of an engine next to a trainer on few cores made generation 25 times slower.
    "OMP_WAIT_POLICY": "passive",
}
_THREADS_PER_ENGINE = 8
_PLUGIN_GROUPS = tuple(f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger"))


def num_gpus() -> int:
    """Number of visible GPUs."""
    import torch

    return torch.cuda.device_count()  # does not initialise CUDA, so children may still choose devices


def has_gpu() -> bool:
    return num_gpus() > 0


def names_of_gpus(devices: Iterable[int]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a process that gets these of the GPUs that are visible here, where torch numbers them
    from 0. Theirs are other numbers, or UUIDs, if this process sees only some of the machine's."""
    visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return ",".join(visible[device] if 0 <= device < len(visible) else str(device) for device in devices)


def image_threads(num_engines: int = 1) -> int:
    """Number of threads that open and process images for this process's engines: its share of the machine's cores."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_THREADS_PER_ENGINE * num_engines, len(os.sched_getaffinity(0)) // num_processes))


def engine_environment(given: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """``given`` (usually ``os.environ``), plus the variables that engine processes need. Existing values are kept."""
    needed = _EVERYWHERE if gpu else _EVERYWHERE | _ON_CPU
    if gpu and importlib.util.find_spec("flashinfer") is None:
        needed = needed | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # vLLM imports it otherwise, without asking
    return {**needed, **given}


def complete_environment(*, gpu: bool) -> None:
    """Apply :func:`engine_environment` and :func:`needed_plugins` to this process, before vLLM is imported."""
    os.environ.update(engine_environment({PLUGINS: needed_plugins(), **os.environ}, gpu=gpu))


def needed_plugins() -> str:
    """``VLLM_PLUGINS``: every installed plugin but ms-swift's, which would make each engine process import ms-swift,
    trl and datasets (several seconds) to register an embedding model."""
    installed = importlib.metadata.entry_points()
    plugins = [plugin for group in _PLUGIN_GROUPS for plugin in installed.select(group=group)]
    return ",".join(plugin.name for plugin in plugins if not plugin.value.startswith("swift."))


# vLLM's engine processes do not notice when their server is killed. Each worker can ask the kernel to end it with its
# parent, and watches the server from a thread: it then ends the engine process above it and the coordinator that vLLM
# starts for data-parallel engines too.


def set_engine_owner() -> None:
    """Make engines that this process starts from now on end with it. Children inherit the variable."""
    os.environ[OWNER_PID] = str(os.getpid())


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    if not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # the parent ended before prctl was called
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_owner() -> None:
    """In a vLLM worker: end it and its engine's other processes when the owner ends. Does nothing without an owner."""
    owner = int(os.environ.get(OWNER_PID, "0"))
    if not owner or owner == os.getpid() or not sys.platform.startswith("linux"):
        return
    try:
        handle = os.pidfd_open(owner)
        children = psutil.Process(owner).children()
    except (ProcessLookupError, psutil.NoSuchProcess):
        os.kill(os.getpid(), signal.SIGKILL)
        return
    parent = os.getppid()
    relatives = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            if child.pid == parent or DP_COORDINATOR in " ".join(child.cmdline()):
                relatives.append(child)

    def watch() -> None:
        select.select([handle], [], [])  # a pidfd turns readable when its process ends
        for process in relatives:
            with suppress(psutil.NoSuchProcess):  # psutil does not kill another process that reuses the pid
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-owner", daemon=True).start()


def skip_main_reimport() -> None:
    """Keep spawned children from importing this process's main module again. For ``swift rollout``'s worker that is
    ms-swift with its trainers: seconds and 130 MB for each engine, which needs none of it."""
    program = sys.modules["__main__"]
    program.__spec__ = None
    program.__file__ = None


class _ImportsFirst:
    """vLLM's main function of an engine process. Where it is unpickled, vLLM is imported without what slows imports
    down; its arguments, which are unpickled next, would otherwise import it."""

    def __init__(self, run_engine_core: Callable[..., None]) -> None:
        self._run_engine_core = run_engine_core

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._run_engine_core(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _imported_main, ()


def _imported_main() -> Callable[..., None]:
    process_is_a_command()
    with heavy_imports():
        from vllm.v1.engine.core import EngineCoreProc
    return EngineCoreProc.run_engine_core


def engines_import_quickly() -> None:
    """Let engine processes that this process spawns import vLLM by :func:`heavy_imports`. On two cores an engine of a
    tiny model was ready after 7.6 seconds of CPU time, not 10.8."""
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(EngineCoreProc.run_engine_core, _ImportsFirst):
        EngineCoreProc.run_engine_core = _ImportsFirst(EngineCoreProc.run_engine_core)


# An engine inside the trainer's process: vLLM replaces torch.set_num_threads, seeds every random generator, sets
# environment variables that the trainer's children would inherit (LD_PRELOAD, LOCAL_WORLD_SIZE …), and destroys the
# default process group when it ends.


@contextmanager
def environment_kept(needed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Add ``needed`` to the environment, and restore it afterwards. (vLLM reads its variables once, at its start.)"""
    before = dict(os.environ)
    os.environ.update(needed or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore afterwards: torch's threads, precision and dtype, all random states, the CUDA device and its stream."""
    import torch

    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    stream = None if device is None else torch.cuda.current_stream()
    with torch.random.fork_rng(devices=[] if device is None else [device]):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if stream is not None:
                torch.cuda.set_device(device)
                # With tensor parallelism vLLM's current_stream() makes a new, non-blocking stream current for good.
                stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.set_stream(stream)


@contextmanager
def default_group_kept(is_trainers: bool) -> Iterator[None]:
    """vLLM calls ``destroy_process_group()`` at its end. Let it destroy the default group only if vLLM created it."""
    import torch.distributed as dist

    if not is_trainers:
        yield
        return
    destroy = dist.destroy_process_group

    def destroy_other_groups(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_other_groups
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def api_key_from_environment(variable: str | None) -> str | None:
    """The bearer token in the environment variable that the configuration names, if any. Raises ConfigError if the
    variable is not set, or contains characters that an HTTP header cannot."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(
            f"rollout_matching.vllm.server.api_key_env: the environment variable {variable} is not set; export it for "
            "the trainer and the servers, or remove the key"
        )
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the token in {variable} contains characters that an HTTP header cannot; use printable ASCII"
        )
    return token
