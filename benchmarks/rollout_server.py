"""A `coordexp serve` process for benchmarks; runs nothing itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from coordexp.engine.trainer.client import ServerClient
from coordexp.errors import RolloutError
from support.ports import free_ports

TIMEOUT_S = 600.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def server_entry() -> dict[str, Any]:
    """A server of this machine, as ``rollout_matching.vllm.server.servers`` lists it."""
    http_port, group_port = free_ports(2)
    return {"base_url": f"http://127.0.0.1:{http_port}", "group_port": group_port}


@contextmanager
def serving(config: Path, environment: Mapping[str, str] = ONE_THREAD) -> Iterator[ServerClient]:
    """The first server of this configuration: it answers within, and is gone afterwards."""
    entry = yaml.safe_load(config.read_text("utf-8"))["rollout_matching"]["vllm"]["server"]["servers"][0]
    log = config.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "coordexp", "serve", "--config", str(config)],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    client = ServerClient(
        entry["base_url"], entry["group_port"], timeout_s=TIMEOUT_S, infer_timeout_s=TIMEOUT_S, api_key=None
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(RolloutError):
                client.wait_until_healthy(5.0)
                break
        client.health()
        yield client
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        client.close()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
