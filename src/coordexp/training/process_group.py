"""What a run holds: the group of torchrun's processes, and its output folder, into which no other run may write."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.errors import ConfigError

_LOST = re.compile(
    r"gloo|nccl|ProcessGroup|Connection (closed|reset|refused)|Timed out waiting|Socket Timeout|recvValue|sendBytes"
    r"|Broken pipe|TCPStore|DistStore",
    re.IGNORECASE,
)


def join_processes(config: RunConfig) -> None:
    """Meet the other processes, where transformers would not do it as the configuration says: on CPUs it forgets
    ``training.ddp_timeout``, and it knows no meeting in a file, as ``coordexp launch`` arranges it. Nothing alone, or
    where they have met."""
    import torch
    import torch.distributed as dist

    meeting = os.environ.get(distributed.RENDEZVOUS)
    training = config.training
    on_cpus = training.use_cpu or not torch.cuda.is_available()
    if distributed.world_size() == 1 or dist.is_initialized() or not (on_cpus or meeting):
        return
    timeout = timedelta(seconds=training.ddp_timeout)
    on_gpus = "cuda:nccl,cpu:gloo" if config.fsdp.enabled else "nccl"
    backend = training.ddp_backend or ("gloo" if on_cpus else on_gpus)
    if not on_cpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if meeting is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.FileStore(meeting, distributed.world_size())
    store.set_timeout(timeout)
    dist.init_process_group(
        backend, store=store, rank=distributed.rank(), world_size=distributed.world_size(), timeout=timeout
    )


def lost_each_other(error: BaseException) -> bool:
    """Whether ``error`` is what torch says of a process that is gone, or does not answer in time."""
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    if distributed.world_size() == 1:
        return False
    if isinstance(error, (DistBackendError, DistNetworkError, DistStoreError)):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None


LOCK = "run.lock"


@contextmanager
def only_run_in(output_dir: Path) -> Iterator[None]:
    """Hold ``output_dir`` for this run. A collective call.

    The kernel lets go of the lock however the process ends, so a lock file that lies there says nothing by itself.

    Raises:
        ConfigError: another process trains into the folder.
    """
    with distributed.raise_on_all_ranks("training.output_dir"):
        descriptor = _take(output_dir) if distributed.is_main() else None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take(output_dir: Path) -> int:
    output_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Of the process, not of the open file: loader processes do not inherit it, and network file systems know it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 1024).decode(errors="replace").strip() or "nobody wrote which"
        os.close(descriptor)
        raise ConfigError(
            f"training.output_dir: another run trains into {output_dir} ({holder}); end it, or choose another folder"
        ) from error
    os.ftruncate(descriptor, 0)
    told = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    os.write(descriptor, json.dumps(told).encode())
    return descriptor
