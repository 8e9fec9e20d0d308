"""The servers that a configuration names, and whether they can serve this run: found out before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from coordexp.config.rollout import RepeatTerminateConfig, RolloutMatchingConfig
from coordexp.errors import RolloutError
from coordexp.rollouts.chunking import chunk_size
from coordexp.servers.client import ServerClient, api_key_from_environment
from coordexp.vllm_engine.guard_activation import ACTIVATION_PATH, check_guard


def make_clients(config: RolloutMatchingConfig) -> tuple[ServerClient, ...]:
    """One client per entry of ``servers[]``; nothing is asked yet."""
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


def check_servers(config: RolloutMatchingConfig, learner_world_size: int) -> None:
    """Wait until every server is up, and refuse what cannot work: before any model is loaded.

    Raises:
        RolloutError: a server does not answer within ``server.timeout_s``. ConfigError: too few devices for the ranks.
    """
    clients = make_clients(config)
    try:
        chunk_size(config.decode_batch_size, world_sizes(clients), learner_world_size)
        for client in clients:
            _check_guard(client, config.repeat_terminate)
    finally:
        for client in clients:
            client.close()


def world_sizes(clients: Sequence[ServerClient]) -> tuple[int, ...]:
    """Devices behind each server, once it is up.

    Raises:
        RolloutError: a server does not answer within ``server.timeout_s``.
    """
    for client in clients:
        client.wait_until_healthy()
    return tuple(client.world_size() for client in clients)


def _check_guard(client: ServerClient, wanted: RepeatTerminateConfig) -> None:
    status = client.status()
    if status is not None:
        check_guard(status["workers"], wanted)
    elif wanted.enabled:
        raise RolloutError(
            f"{client.base_url}: rollout_matching.repeat_terminate is enabled, and this server has no /status/ to say "
            f"whether it guards its answers; it is activated by {ACTIVATION_PATH}"
        )
