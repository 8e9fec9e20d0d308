"""The servers of a configuration, and checks, before a model is loaded, whether they can serve this run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from coordexp.config.rollout import RepeatTerminateConfig, RolloutMatchingConfig
from coordexp.engine.arguments import NAMES_ENABLE, NAMES_STATUS
from coordexp.engine.client import ServerClient, api_key_from_environment
from coordexp.engine.guard_activation import ACTIVATION_PATH, check_guard
from coordexp.errors import ConfigError, MissingDependency, RolloutError
from coordexp.rollouts.chunking import chunk_size


def make_clients(config: RolloutMatchingConfig) -> tuple[ServerClient, ...]:
    """One client per entry of ``servers[]``; no request is sent yet."""
    server = config.vllm.server
    assert server is not None, "the schema requires servers for mode: server"
    key = api_key_from_environment(server.api_key_env)
    return tuple(
        ServerClient(
            entry.base_url,
            entry.group_port,
            timeout_s=server.timeout_s,
            infer_timeout_s=server.infer_timeout_s,
            api_key=key,
        )
        for entry in server.servers
    )


def check_servers(config: RolloutMatchingConfig, learner_world_size: int, closed_names: bool = False) -> None:
    """Wait until every server is up, and refuse what cannot work: before any model is loaded.

    Args:
        closed_names: answers will be held to a closed list of class names.

    Raises:
        RolloutError: a server does not answer within ``server.timeout_s``, or takes no such list. ConfigError: too few
            devices for the ranks, or one that server and learner would share. MissingDependency: weights could not be
            pushed to GPUs.
    """
    clients = make_clients(config)
    try:
        chunk_size(config.decode_batch_size, world_sizes(clients), learner_world_size)
        for client in clients:
            status = client.status()
            _check_guard(client, status, config.repeat_terminate)
            if closed_names:
                check_names(client, status)
            if status is not None:
                _check_devices(client, status["workers"])
    finally:
        for client in clients:
            client.close()


def world_sizes(clients: Sequence[ServerClient]) -> tuple[int, ...]:
    """Devices of each server, once it is up.

    Raises:
        RolloutError: a server does not answer within ``server.timeout_s``.
    """
    for client in clients:
        client.wait_until_healthy()
    return tuple(client.world_size() for client in clients)


def _check_devices(client: ServerClient, workers: Sequence[Mapping[str, Any]]) -> None:
    """Whether NCCL can carry weights from this process to ``workers``: on GPUs of their own, by vLLM's binding."""
    if not any(str(worker.get("device", "")).startswith("cuda") for worker in workers):
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{client.base_url}: its weights are on GPUs and this learner has none, so no group can hold both; train "
            "on a GPU, or start the server on the CPU"
        )
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependency(
            f"{client.base_url}: its weights are on GPUs, and pushes to GPUs go through vLLM's NCCL binding, which the "
            "learner needs too; pip install 'coordexp[vllm]' where it trains"
        )
    own = own_device_uuid()
    if own in [worker.get("device_uuid") for worker in workers]:
        raise ConfigError(
            f"{client.base_url}: it and this learner are on the same GPU ({own}), where NCCL cannot connect them; give "
            "each a device of its own (launch.server_devices, launch.learner_devices, CUDA_VISIBLE_DEVICES), or share "
            "one with rollout_matching.vllm.mode: colocate"
        )


def own_device_uuid() -> str:
    """The GPU that this process trains on: its local rank's."""
    import torch

    return str(torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).uuid)


def _check_guard(client: ServerClient, status: Mapping[str, Any] | None, wanted: RepeatTerminateConfig) -> None:
    if status is not None:
        check_guard(status["workers"], wanted)
    elif wanted.enabled:
        raise RolloutError(
            f"{client.base_url}: rollout_matching.repeat_terminate is enabled, and this server has no /status/ to say "
            f"whether it guards its answers; it is activated by {ACTIVATION_PATH}"
        )


def check_names(client: ServerClient, status: Mapping[str, Any] | None) -> None:
    """Raises RolloutError if a server takes no closed list of class names: it would ignore one silently.

    Args:
        status: the server's ``/status/``; None if it has none.
    """
    workers = [] if status is None else status["workers"]
    if not workers or not all(one.get(NAMES_STATUS) for one in workers):
        raise RolloutError(
            f"{client.base_url}: this server would not hold descriptions to the list of class names; start it with "
            f"rollout_matching.vllm.server.closed_names: true (swift rollout: {NAMES_ENABLE}=1 and CoordExp's plugin), "
            "or write rollout_backend: hf, or vllm.mode: colocate"
        )
