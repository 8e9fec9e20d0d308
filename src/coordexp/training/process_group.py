"""The processes of torchrun: how they meet, and what is said where they lose each other."""

from __future__ import annotations

import re
from datetime import timedelta

from coordexp import distributed
from coordexp.config.training import TrainingConfig

_LOST = re.compile(
    r"gloo|nccl|ProcessGroup|Connection (closed|reset|refused)|Timed out waiting|Socket Timeout|recvValue|sendBytes"
    r"|Broken pipe|TCPStore|DistStore",
    re.IGNORECASE,
)


def join_processes(training: TrainingConfig) -> None:
    """Meet the other processes on CPUs, where transformers forgets ``training.ddp_timeout``. Nothing alone, on GPUs, or
    where they have met."""
    import torch
    import torch.distributed as dist

    on_cpus = training.use_cpu or not torch.cuda.is_available()
    if distributed.world_size() == 1 or not on_cpus or dist.is_initialized():
        return
    dist.init_process_group(training.ddp_backend or "gloo", timeout=timedelta(seconds=training.ddp_timeout))


def lost_each_other(error: BaseException) -> bool:
    """Whether ``error`` is what torch says of a process that is gone, or does not answer in time."""
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    if distributed.world_size() == 1:
        return False
    if isinstance(error, (DistBackendError, DistNetworkError, DistStoreError)):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None
