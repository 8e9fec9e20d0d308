"""The processes of torchrun: joining the group, and telling an error of lost processes from others."""

from __future__ import annotations

import os
import re
from datetime import timedelta

from coordexp import distributed
from coordexp.config import RunConfig

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
