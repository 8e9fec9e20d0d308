"""What an engine inside the learner's process may not change for good: settings, random states, environment, groups.

vLLM replaces ``torch.set_num_threads``, seeds every random generator, sets environment variables that the learner's
children would inherit (``LD_PRELOAD``, ``LOCAL_WORLD_SIZE`` …), and destroys the default process group when it ends.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def environment_kept(needed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Inside, the environment holds ``needed`` too; afterwards it is what it was before, whatever was set meanwhile.

    Around an engine's start this suffices: vLLM keeps the variables that it has read by then.
    """
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
    """Random states, torch's settings and the current device, as they were before."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
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
            if device is not None:
                torch.cuda.set_device(device)


@contextmanager
def default_group_kept(is_learners: bool) -> Iterator[None]:
    """vLLM ends with ``destroy_process_group()``. The default group goes only if vLLM made it."""
    if not is_learners:
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
