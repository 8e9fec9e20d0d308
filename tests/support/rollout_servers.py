"""Real rollout servers in processes of their own, on a tiny model that vLLM's CPU kernels can run."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from coordexp.engine.client import ServerClient
from coordexp.launch.supervisor import descendants
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.records import RolloutRequest
from support.config_samples import set_key, stage2, write_yaml
from support.forked import ENGINES, Handle, coordexp, forked
from support.ports import free_ports
from support.settings import client_to
from support.tiny_run import PROMPT, _session_folder, tiny_samples, tiny_scenes

# Heads of 64: vLLM's CPU attention has no kernel for the smallest ones.
SPEC = TinySpec(
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=64, mlp=96,
    vision_hidden=32, vision_depth=2, vision_heads=2, vision_mlp=64, min_pixels=32 * 32,
)  # fmt: skip
BOOT_S = 400.0
STOP_S = 30.0
NEW_TOKENS = 16


@lru_cache(maxsize=1)
def served_checkpoint() -> Path:
    """Random weights, sharpened so that they say something decided; built once per session."""
    folder = build_tiny_checkpoint(_session_folder() / "served", seed=5, spec=SPEC)
    loaded = load_model(folder, "float32")
    sharpen(loaded.model)
    loaded.model.save_pretrained(folder)
    return folder


def sharpen(model: torch.nn.Module, factor: float = 4.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(factor)


def server_config(folder: Path, num_servers: int = 1, checkpoint: Path | None = None, **keys: Any) -> dict[str, Any]:
    """A stage-2 configuration in server mode on free ports; ``keys``: dotted keys with ``__`` for the dot."""
    config = stage2(max_new_tokens=NEW_TOKENS, decode_batch_size=3)
    config["model"] = {"model": str(checkpoint or served_checkpoint()), "dtype": "float32"}
    config["template"] = {"prompt": PROMPT}
    config["custom"] |= {"train_jsonl": str(tiny_scenes()), "val_jsonl": str(tiny_scenes())}
    config["global_max_length"] = 512
    config["training"] |= {"output_dir": str(folder / "run"), "use_cpu": True, "report_to": "none"}
    ports = free_ports(2 * num_servers)
    config["rollout_matching"] |= {
        "rollout_backend": "vllm",
        "vllm": {
            "mode": "server",
            "tensor_parallel_size": 1,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "server": {
                "servers": [
                    {"base_url": f"http://127.0.0.1:{ports[2 * i]}", "group_port": ports[2 * i + 1]}
                    for i in range(num_servers)
                ],
                "timeout_s": 60.0,
                "infer_timeout_s": 120.0,
            },
            "sync": {"timeout_s": 60.0, "bucket_mb": 1},
        },
    }
    for key, value in keys.items():
        config = set_key(config, key.replace("__", "."), value)
    return config


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server process, its address, and where it logs."""

    process: subprocess.Popen[bytes] | Handle
    base_url: str
    group_port: int
    log: Path

    def client(self, **keys: Any) -> ServerClient:
        return client_to(self.base_url, self.group_port, **{"timeout_s": 60.0, "infer_timeout_s": 120.0, **keys})

    def children(self) -> list[int]:
        """Processes that it started, and theirs."""
        return descendants(self.process.pid)


def serving_environment(**more: str) -> dict[str, str]:
    """The environment of a server under test: one thread, no network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


@contextmanager
def serving(folder: Path, config: Mapping[str, Any], **how: Any) -> Iterator[RunningServer]:
    """As :func:`started`, and healthy."""
    with started(folder, config, **how) as server:
        wait_until_healthy(server)
        yield server


@contextmanager
def started(
    folder: Path,
    config: Mapping[str, Any],
    index: int = 0,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    by_shell: bool = False,
) -> Iterator[RunningServer]:
    """``coordexp serve`` of entry ``index``; ended with everything it started.

    Args:
        by_shell: in an interpreter of its own, as a shell would start it, which imports torch and vLLM first, as do its
            engines. Otherwise the command is run in a :mod:`forked <support.forked>` process, which forks its engines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = write_yaml(folder, dict(config), f"serve{index}.yaml")
    entry = config["rollout_matching"]["vllm"]["server"]["servers"][index]
    log = folder / f"server{index}.log"
    command = ["serve", "--config", str(path), "--index", str(index), *arguments]
    environment = serving_environment() if environment is None else environment
    process = _in_shell(command, log, environment) if by_shell else _forked(command, log, environment)
    server = RunningServer(process, entry["base_url"], entry["group_port"], log)
    try:
        yield server
    finally:
        end(server)


def _in_shell(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "coordexp", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _forked(command: list[str], log: Path, environment: Mapping[str, str]) -> Handle:
    return Handle(forked(coordexp, command, log=log, environment=environment, behind=ENGINES))


def wait_until_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + BOOT_S
    with_client = server.client()
    while True:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended with {server.process.returncode}:\n{tail(server.log)}")
        try:
            with_client.health(timeout_s=5)
            break
        except Exception as error:  # any: the server is still starting
            assert time.monotonic() < deadline, f"no healthy server ({error}):\n{tail(server.log)}"
            time.sleep(0.5)
    with_client.close()


def end(server: RunningServer) -> None:
    """SIGTERM, then SIGKILL to its whole group."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGCONT)
        server.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def tail(log: Path, size: int = 4000) -> str:
    return log.read_text(errors="replace")[-size:]


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def load_served(checkpoint: Path | None = None) -> LoadedModel:
    """The learner's model of a server under test."""
    return load_model(checkpoint or served_checkpoint(), "float32")


def requests_of(loaded: LoadedModel, count: int = 3) -> list[RolloutRequest]:
    return [sample.request for sample in tiny_samples(loaded, count)]


def payload(requests: Sequence[RolloutRequest], max_tokens: int = NEW_TOKENS, **config: Any) -> dict[str, Any]:
    """A call of ``/infer/``: greedy, with token ids."""
    return {
        "infer_requests": [
            {"messages": [{"role": "user", "content": f"<image>{PROMPT}"}], "images": [str(request.image)]}
            for request in requests
        ],
        "request_config": {"max_tokens": max_tokens, "temperature": 0.0, "return_details": True, "seed": 7, **config},
    }


def openai_payload(request: RolloutRequest, **more: Any) -> dict[str, Any]:
    """The request as an OpenAI client sends it, greedy and with token ids."""
    encoded = base64.b64encode(request.image.read_bytes()).decode()
    url = f"data:image/{request.image.suffix[1:]};base64,{encoded}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "return_token_ids": True,
        **more,
    }


def greedy_tokens(
    loaded: LoadedModel, requests: Sequence[RolloutRequest], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """What transformers' own ``generate`` answers, one request at a time, end token included."""
    model: Any = loaded.model.eval()
    answers = []
    for request in requests:
        ids_1L = torch.tensor([request.prompt_token_ids])
        output = model.generate(
            input_ids=ids_1L,
            attention_mask=torch.ones_like(ids_1L),
            mm_token_type_ids=(ids_1L == loaded.image_token_id).int(),
            pixel_values=request.model_inputs["pixel_values"],
            image_grid_thw=request.model_inputs["image_grid_thw"],
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=loaded.vocab.eos_id,
            pad_token_id=loaded.vocab.eos_id,
        )
        answers.append(output[0, ids_1L.shape[1] :].tolist())
    return answers


def served_tokens(
    client: ServerClient, requests: Sequence[RolloutRequest], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """What a server answers, and that its prompts are the learner's."""
    items = client.infer(payload(requests, max_tokens))
    for request, item in zip(requests, items, strict=True):
        assert tuple(item["response"]["prompt_token_ids"]) == request.prompt_token_ids
    return [item["response"]["choices"][0]["token_ids"] for item in items]
