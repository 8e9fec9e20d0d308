"""vLLM on CPUs: weights that stay loadable, and the environment of engine processes."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Mapping
from typing import Any

DIE_WITH_PARENT = "COORDEXP_DIE_WITH_PARENT"
SERVER_API_KEY = "COORDEXP_ROLLOUT_API_KEY"  # the token itself, for servers whose command line would show it

SPIN_S = 0.02  # a decoding step of a small model is shorter
DOZE_S = 1.0  # a queue that was not written to for so long is left to its writer's notes,
IDLE_MS = 100  # and looked at so often all the same

_EVERYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the guard is a logits processor of the first runner's interface
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Spinning OpenMP threads of an engine beside a learner on few cores made generation 25 times slower.
    "OMP_WAIT_POLICY": "passive",
}
PLUGINS = "VLLM_PLUGINS"
_PLUGIN_GROUPS = tuple(f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger"))


def num_gpus() -> int:
    """Visible GPUs. Does not initialise CUDA, so children may still choose devices."""
    import torch

    return torch.cuda.device_count()


def has_gpu() -> bool:
    """Whether engines of this machine run on GPUs."""
    return num_gpus() > 0


def engine_environment(given: Mapping[str, str], *, gpu: bool) -> dict[str, str]:
    """``given`` completed with what engine processes need; a variable that is already set keeps its value.

    Args:
        given: usually ``os.environ``. gpu: whether the engine runs on GPUs.
    """
    needed = _EVERYWHERE if gpu else _EVERYWHERE | _ON_CPU
    return {**needed, **given}


def complete_environment(*, gpu: bool) -> None:
    """Apply :func:`engine_environment` to this process, before vLLM is imported; children inherit it. Of vLLM's plugins
    they load :func:`needed_plugins`."""
    os.environ.update(engine_environment({PLUGINS: needed_plugins(), **os.environ}, gpu=gpu))


def needed_plugins() -> str:
    """``VLLM_PLUGINS``: every installed plugin but ms-swift's.

    Where ms-swift is installed, its plugin has each process of each engine import ms-swift, trl and datasets, several
    seconds, to register an embedding model, which nobody trains here.
    """
    installed = importlib.metadata.entry_points()
    plugins = [plugin for group in _PLUGIN_GROUPS for plugin in installed.select(group=group)]
    return ",".join(plugin.name for plugin in plugins if not plugin.value.startswith("swift."))


def executor_name(tensor_parallel_size: int) -> str:
    """``distributed_executor_backend`` of an engine on CPUs, as a name that its core process imports."""
    name = "CoreExecutor" if tensor_parallel_size == 1 else "WorkersExecutor"
    return f"coordexp.engine.cpu_executor.{name}"


def keep_weights_loadable() -> None:
    """On a CPU, make vLLM compute linear layers from their plain weights. Call it before the engine loads its model.

    vLLM packs each linear weight into a private layout and empties the parameter, so new weights could not be loaded,
    and a tied language head would keep its old packed copy. Does nothing where vLLM runs on GPUs; safe to call twice.
    """
    import torch
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]

    utils.dispatch_cpu_unquantized_gemm = plain_linear


def wait_asleep() -> None:
    """On a CPU, let vLLM's processes sleep while they wait for each other; for queues that are opened from now on.

    They spin on their shared-memory queues, up to a second after the last message. Beside a GPU that is cheap; on a CPU
    it takes a core from the learner that pushes weights to them. Between two decoding steps they spin still.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    spinning: Any = shm_broadcast.SpinCondition
    if not current_platform.is_cpu() or hasattr(spinning, "coordexp_sleeps"):
        return

    class SleepingCondition(spinning):
        coordexp_sleeps = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.busy_loop_s = 0
            self._waiting_since: float | None = None

        def record_read(self) -> None:
            super().record_read()
            self._waiting_since = None

        def wait(self, timeout_ms: int | None = None) -> None:
            """Return before or when there may be something to read; the caller looks, and waits again."""
            now = time.monotonic()
            self._waiting_since = self._waiting_since or now
            waited_s = now - self._waiting_since
            if waited_s < SPIN_S:
                os.sched_yield()
            elif waited_s < DOZE_S:
                time.sleep(nap_s(waited_s))
            else:
                super().wait(IDLE_MS if timeout_ms is None else min(IDLE_MS, timeout_ms))

    shm_broadcast.SpinCondition = SleepingCondition  # pyright: ignore[reportAttributeAccessIssue]


def nap_s(waited_s: float) -> float:
    """Naps in proportion to what was waited already: a message is late by an eighth of its time at most. The writer's
    notes, which end a wait at once, cannot be relied on while messages are frequent: ZeroMQ may drop them."""
    return min(waited_s / 8, 5e-3)
