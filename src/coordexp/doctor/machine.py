"""The machine: versions, driver, GPUs, and the memory around them."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch.cuda import nccl

from coordexp.doctor.check import Row, Settings
from coordexp.engine import TESTED_VERSIONS, versions
from coordexp.errors import ConfigError
from coordexp.training.run import check_driver

GB = 1e9
FREE_SHARE = 0.8  # of a GPU's memory: less means that another program uses it
HOST_GB, HOST_GB_PER_GPU = 4, 16  # weights of 8B in bfloat16, which a sleeping engine keeps in main memory
SHM_GB = 1  # NCCL's and loader processes' shared memory; Docker's default is 0.064
NO_GPU = "no GPU is visible: everything runs on the CPU"


def machine(settings: Settings) -> Iterator[Row]:
    """Rows of the section; the one named GPUs has the number of usable ones."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    yield Row(
        "python", "ok", f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores"
    )
    yield _versions()
    gpus = yield from _gpus(settings.gpus)
    yield from _between_gpus(gpus)
    needed = HOST_GB + HOST_GB_PER_GPU * gpus
    enough = memory.available >= needed * GB
    figure = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free, {needed} needed"
    yield Row("host memory", "ok" if enough else "failed", figure, "end other programs, or use fewer GPUs")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = limit != resource.RLIM_INFINITY
    figure = f"{limit / 2**20:.0f} MiB" if is_limited else "unlimited"
    fails = is_limited and gpus > 1 and Path("/sys/class/infiniband").is_dir()
    advice = "InfiniBand registers memory: raise it (ulimit -l unlimited; docker run --ulimit memlock=-1)"
    yield Row("memlock", "failed" if fails else "ok", figure, advice)
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Row("/dev/shm", "failed", "there is none", "mount a tmpfs on /dev/shm")
        return
    free, needed = shutil.disk_usage(shared).free, SHM_GB * max(1, gpus)
    figure = f"{free / GB:.1f} GB free, {needed} needed"
    yield Row("/dev/shm", "ok" if free >= needed * GB else "failed", figure, "docker run --shm-size=16g, or --ipc=host")


def _versions() -> Row:
    installed = versions()
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    others = [
        f"{name}=={TESTED_VERSIONS[name][0]}"
        for name, version in installed.items()
        if name in TESTED_VERSIONS and version.partition("+")[0] not in TESTED_VERSIONS[name]
    ]
    advice = (
        f"CoordExp uses undocumented parts of these packages; install the tested ones: pip install {' '.join(others)}"
    )
    return Row("versions", "failed" if others else "ok", listed, advice)


def _gpus(wanted: int | None) -> Iterator[Row]:
    """Rows about the GPUs themselves. Returns how many torch can use."""
    try:
        check_driver()
    except ConfigError as error:
        yield Row("GPUs", "failed", f"driver {_driver()}", str(error), {"usable_gpus": 0})
        yield Row("GPU memory", "skipped", "torch cannot use the GPUs")
        return 0
    count = torch.cuda.device_count()
    if not count:
        result, figure, advice = "skipped", NO_GPU, ""
        if wanted or shutil.which("nvidia-smi"):
            result, figure = "failed", f"none is visible to torch {torch.__version__} (CUDA {torch.version.cuda})"
            advice = "see whether nvidia-smi lists one, CUDA_VISIBLE_DEVICES is right, and torch is a CUDA build"
        yield Row("GPUs", result, figure, advice, {"usable_gpus": 0})
        yield Row("GPU memory", "skipped", NO_GPU)
        return 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    figure = f"{listed}; driver {_driver()}, CUDA {torch.version.cuda} in torch"
    enough = wanted is None or wanted <= count
    yield Row(
        "GPUs", "ok" if enough else "failed", figure, f"--gpus {wanted}: there are {count}", {"usable_gpus": count}
    )
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    figure = ", ".join(f"{free / GB:.0f} of {total / GB:.0f}" for free, total in memory) + " GB free"
    is_free = all(free >= FREE_SHARE * total for free, total in memory)
    yield Row("GPU memory", "ok" if is_free else "failed", figure, "end the programs that nvidia-smi lists")
    return count


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return (
        asked.stdout.splitlines()[0] if asked.returncode == 0 and asked.stdout else f"unknown ({asked.stdout.strip()})"
    )


def _between_gpus(gpus: int) -> Iterator[Row]:
    if gpus < 2:
        yield Row("P2P", "skipped", "needs 2 GPUs")
    else:
        pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        through = "" if direct == len(pairs) else "; the others go through main memory, which is slower"
        yield Row("P2P", "ok", f"{direct} of {len(pairs)} pairs{through}")
    if not gpus:
        yield Row("NCCL", "skipped", NO_GPU)
        return
    ours = ".".join(map(str, nccl.version()))
    if "vllm" not in versions():
        yield Row("NCCL", "ok", f"torch's {ours}; vLLM is not installed")
        return
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    theirs = NCCLLibrary().ncclGetVersion()
    advice = "unset VLLM_NCCL_SO_PATH and LD_LIBRARY_PATH, so that both load the one that torch was installed with"
    yield Row("NCCL", "ok" if ours == theirs else "failed", f"torch's {ours}, vLLM's {theirs}", advice)
