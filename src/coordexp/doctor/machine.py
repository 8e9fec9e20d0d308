"""The machine: versions, driver, GPUs, and the memory around them."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.cuda import nccl

from coordexp.doctor.check import Row, Settings, judged, measured
from coordexp.engine.wire.versions import TESTED_VERSIONS, versions
from coordexp.errors import ConfigError
from coordexp.out_of_memory import THIS_MACHINES, main_memory
from coordexp.training.checked_run import check_driver

GB = 1e9
FREE_SHARE = 0.8  # of a GPU's memory: less means that another program uses it
HOST_GB, HOST_GB_PER_GPU = 4, 16  # weights of 8B in bfloat16, which a sleeping engine keeps in main memory
SHM_GB = 1  # NCCL's and loader processes' shared memory; Docker's default is 0.064
# Row → its module, purpose, and what to do without it.
OPTIONAL = {
    "liger-kernel": (
        "liger_kernel", "fused layers (model.fused_kernels); without them a step takes about a half longer",
        "pip install 'coordexp[kernels]'",
    ),
    "flashinfer": (
        "flashinfer", "vLLM's sampler; without it CoordExp lets vLLM sample by torch",
        "pip install flashinfer-python, in the version that vLLM requires; only sampled answers are faster with it",
    ),
    "flash-attn": (
        "flash_attn", "model.attn_implementation: flash; packed and varlen do not need it",
        "nothing to do, unless you write attn_implementation: flash",
    ),
}  # fmt: skip
NO_GPU = "no GPU is visible: everything runs on the CPU"


def machine(settings: Settings) -> Iterator[Row]:
    """Python, versions and GPUs; the row named GPUs has the number of usable ones."""
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.machine()}"
    yield measured("python", f"Python {platform.python_version()}, {system}, {cores} cores")
    installed = versions()
    others = [
        f"{name}=={TESTED_VERSIONS[name][0]}"
        for name, version in installed.items()
        if name in TESTED_VERSIONS and version.partition("+")[0] not in TESTED_VERSIONS[name]
    ]
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    advice = f"CoordExp uses undocumented parts of them; install the tested ones: pip install {' '.join(others)}"
    yield judged("versions", not others, listed, advice)
    gpus = yield from _gpus(settings.gpus)
    yield from _between_gpus(gpus)


def host(settings: Settings) -> Iterator[Row]:
    """Memory around the GPUs."""
    gpus = settings.gpus or 0
    needed = HOST_GB + HOST_GB_PER_GPU * gpus
    found = main_memory()
    assert found is not None, "Linux says how much memory there is"
    free, total, whose = found
    is_limited = whose != THIS_MACHINES
    figure = f"{free / GB:.1f} of {f'{whose} ' if is_limited else ''}{total / GB:.1f} GB free, {needed} needed"
    advice = (f"raise {whose} limit, " if is_limited else "") + "end other programs, or use fewer GPUs"
    yield judged("host memory", free >= needed * GB, figure, advice)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = limit != resource.RLIM_INFINITY
    matters = gpus > 1 and Path("/sys/class/infiniband").is_dir()
    figure = f"{limit / 2**20:.0f} MiB" if is_limited else "unlimited"
    advice = "InfiniBand registers memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    yield judged("memlock", not (is_limited and matters), figure, advice)
    free, needed = shutil.disk_usage("/dev/shm").free, SHM_GB * max(1, gpus)
    figure = f"{free / GB:.1f} GB free, {needed} needed"
    yield judged("/dev/shm", free >= needed * GB, figure, "docker run --shm-size=16g, or --ipc=host")


def nccl_versions(settings: Settings) -> Iterator[Row]:
    """Whether torch and vLLM load the same NCCL."""
    if not settings.gpus or "vllm" not in versions():
        yield Row("NCCL", "skipped", "vLLM for CUDA is not installed" if settings.gpus else NO_GPU)
        return
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    ours, theirs = ".".join(map(str, nccl.version())), NCCLLibrary().ncclGetVersion()
    advice = "unset VLLM_NCCL_SO_PATH and LD_LIBRARY_PATH, so that both load the one that torch was installed with"
    yield judged("NCCL", ours == theirs, f"torch's {ours}, vLLM's {theirs}", advice)


def packages(settings: Settings) -> Iterator[Row]:
    """Packages that a GPU can do without, and what each is for."""
    for name, (module, purpose, advice) in OPTIONAL.items():
        if not settings.gpus:
            yield Row(name, "skipped", NO_GPU)
        elif importlib.util.find_spec(module) is None:
            yield Row(name, "skipped", f"not installed: {purpose}", advice)
        else:
            yield measured(name, f"installed: {purpose}")


def _gpus(wanted: int | None) -> Iterator[Row]:
    """Rows about the GPUs themselves. Returns how many torch can use."""
    try:
        check_driver()
    except ConfigError as error:
        yield judged("GPUs", False, f"driver {_driver()}", str(error), usable_gpus=0)
        yield Row("GPU memory", "skipped", "torch cannot use the GPUs")
        return 0
    count = torch.cuda.device_count()
    if not count:
        if wanted or (wanted is None and shutil.which("nvidia-smi")):
            figure = f"none is visible to torch {torch.__version__} (CUDA {torch.version.cuda})"
            advice = "see whether nvidia-smi lists one, CUDA_VISIBLE_DEVICES is right, and torch is a CUDA build"
            yield judged("GPUs", False, figure, advice, usable_gpus=0)
        else:
            yield Row("GPUs", "skipped", NO_GPU, numbers={"usable_gpus": 0})
        yield Row("GPU memory", "skipped", NO_GPU)
        return 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    listed = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    figure = f"{listed}; driver {_driver()}, CUDA {torch.version.cuda} in torch"
    is_enough = wanted is None or wanted <= count
    yield judged("GPUs", is_enough, figure, f"--gpus {wanted}: there are {count}", usable_gpus=count)
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    figure = ", ".join(f"{free / GB:.0f} of {total / GB:.0f}" for free, total in memory) + " GB free"
    is_free = all(free >= FREE_SHARE * total for free, total in memory)
    yield judged("GPU memory", is_free, figure, "end the programs that nvidia-smi lists")
    return count


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return asked.stdout.partition("\n")[0] if asked.returncode == 0 else f"unknown ({asked.stdout.strip()})"


def _between_gpus(gpus: int) -> Iterator[Row]:
    if gpus < 2:
        yield Row("P2P", "skipped", "needs 2 GPUs")
    else:
        pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        through = "" if direct == len(pairs) else "; the others go through main memory, which is slower"
        yield measured("P2P", f"{direct} of {len(pairs)} pairs{through}")
