"""Processes of vLLM engines: their environment, how they end with their owner, the trainer's settings that an engine in
its process must not change, and the heartbeat of ``swift rollout``'s workers."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

DIE_WITH_PARENT = "COORDEXP_DIE_WITH_PARENT"
OWNER_PID = "COORDEXP_ENGINE_OWNER_PID"
DP_COORDINATOR = "DPCoordinator"  # part of its process title
SERVER_API_KEY = "COORDEXP_ROLLOUT_API_KEY"  # the token itself, for servers that would show it in their command line
PLUGINS = "VLLM_PLUGINS"

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


# ms-swift's pipe to a worker is silent until an answer is complete. So each worker writes a page of memory after every
# step of its engine, and the HTTP process reads it. (Here, because importing ms-swift patches transformers' trainers.)

HEARTBEAT_PATH = "COORDEXP_SWIFT_HEARTBEAT"  # the page's file, for the workers
# time.monotonic() at the end of the last step, a clock that all processes of a machine share; number of steps.
_ENTRY = np.dtype([("stepped_at", "<f8"), ("num_steps", "<u8")])


class SharedHeartbeat:
    """A page of memory with one entry for each worker."""

    def __init__(self, path: str) -> None:
        self._page = np.memmap(path, _ENTRY, "r+")

    @classmethod
    def create(cls, num_workers: int) -> SharedHeartbeat:
        """A page for the workers that this process starts afterwards."""
        descriptor, path = tempfile.mkstemp(prefix="coordexp-heartbeat-")
        os.ftruncate(descriptor, _ENTRY.itemsize * num_workers)
        os.close(descriptor)
        os.environ[HEARTBEAT_PATH] = path
        return cls(path)

    def forget_name(self) -> None:
        """Remove the page's file name. Call it when all workers have mapped the page, which lives until the last one
        ends."""
        Path(os.environ[HEARTBEAT_PATH]).unlink(missing_ok=True)

    def record_step(self, worker: int) -> None:
        self._page[worker] = time.monotonic(), self._page[worker]["num_steps"] + 1

    def silent_s(self, busy_since: dict[int, float]) -> float:
        """Seconds since the last step of the slowest worker that has requests; ``busy_since``: start of their call."""
        now, stepped_at = time.monotonic(), self._page["stepped_at"].tolist()
        return max((now - max(since, stepped_at[worker]) for worker, since in busy_since.items()), default=0.0)

    def num_steps(self) -> int:
        return int(self._page["num_steps"].sum())


def with_heartbeat(step: Callable[..., Any], worker: int) -> Callable[..., Any]:
    """``step`` of this worker's engine, recorded on the HTTP process's page; ``step`` itself without a page."""
    path = os.environ.get(HEARTBEAT_PATH)
    if path is None:
        return step
    page = SharedHeartbeat(path)

    def step_and_record(*arguments: Any, **options: Any) -> Any:
        outputs = step(*arguments, **options)
        page.record_step(worker)
        return outputs

    return step_and_record


class SerializeRequests:
    """ASGI middleware: one request at a time, as ms-swift's pipes to its workers require, except ``/health/``.
    (ms-swift itself blocks its event loop while it waits for a worker, so health checks would wait too.)"""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") == "/health":
            await self._app(scope, receive, send)
            return
        async with self._turn:
            await self._app(scope, receive, send)


def seeded_by_place(config: Any, sizes: Sequence[int]) -> list[Any]:
    """``config`` for each worker, with the seed of its first request: workers add only the index within their own
    requests. ``sizes``: number of requests of each worker."""
    if config is None or config.seed is None:
        return [config] * len(sizes)
    return [replace(config, seed=config.seed + sum(sizes[:index])) for index in range(len(sizes))]
