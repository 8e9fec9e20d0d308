"""Real rollout servers and engines on a tiny model that vLLM's CPU kernels can run, and trainers that use them."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from coordexp.config import RunConfig, load_config, resolved_rollout
from coordexp.config.rollout import SyncConfig
from coordexp.data.images import open_rgb
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.engine.trainer.push import ServerPusher
from coordexp.launch.plan import LaunchPlan, ProcessPlan, plan_launch
from coordexp.launch.supervisor import descendants
from coordexp.modeling.load import LoadedModel, load_model
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.records import RolloutRequest
from coordexp.rollouts import build_backend
from support.config_samples import set_keys, stage2, write_yaml
from support.forked import ENGINES, SWIFT, Handle, coordexp, forked
from support.forked import swift_rollout as rollout_program
from support.ports import free_ports
from support.settings import client_to
from support.tiny_run import PROMPT, _session_folder, run_config, tiny_samples, tiny_scenes

# Heads of 64: vLLM's CPU attention has no kernel for the smallest ones.
SPEC = TinySpec(
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=64, mlp=96,
    vision_hidden=32, vision_depth=2, vision_heads=2, vision_mlp=64, min_pixels=32 * 32,
)  # fmt: skip
BOOT_S = 900.0
STOP_S = 30.0
NEW_TOKENS = 16
# The sharpened tiny model repeats itself at different steps: of six answers of 64 tokens, two stay below these limits.
GUARD: dict[str, Any] = {
    "enabled": True,
    "min_new_tokens": 40,
    "max_consecutive_token_repeats": 30,
    "ngram_size": 20,
    "ngram_repeats": 2,
}
GUARDED_TOKENS = 64
COLOCATED: dict[str, Any] = {
    "rollout_matching__rollout_backend": "vllm",
    "rollout_matching__vllm__tensor_parallel_size": 1,
    "rollout_matching__vllm__gpu_memory_utilization": 0.02,
    "rollout_matching__vllm__enforce_eager": True,
}


@lru_cache(maxsize=1)
def served_checkpoint() -> Path:
    """Random weights, sharpened so that greedy answers are unambiguous; built once per session. Its
    generation_config.json lists every token as an end token, and only <|im_end|> may end an answer."""
    folder = build_tiny_checkpoint(_session_folder() / "served", seed=5, spec=SPEC)
    loaded = load_model(folder, "float32")
    sharpen(loaded.model)
    loaded.model.save_pretrained(folder)
    settings = folder / "generation_config.json"
    every = json.loads(settings.read_text()) | {"eos_token_id": list(range(len(loaded.vocab)))}
    settings.write_text(json.dumps(every))
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
            "engine_args": {"block_size": 32, "max_num_seqs": 8},  # that a real server of either kind takes some
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
    return set_keys(config, keys)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server process, its address, and where it logs."""

    process: subprocess.Popen[bytes] | Handle
    base_url: str
    group_port: int
    log: Path

    def client(self, **keys: Any) -> ServerClient:
        return client_to(self.base_url, self.group_port, **{"timeout_s": 60.0, "infer_timeout_s": 120.0, **keys})

    def status(self) -> dict[str, Any]:
        client = self.client()
        status = client.status()
        client.close()
        assert status is not None
        return status

    def children(self) -> list[int]:
        return descendants(self.process.pid)


def serving_environment(**more: str) -> dict[str, str]:
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
    process: subprocess.Popen[bytes] | Handle
    if by_shell:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "coordexp", *command], stdout=output, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
    else:
        process = Handle(forked(coordexp, command, log=log, environment=environment, behind=ENGINES))
    server = RunningServer(process, entry["base_url"], entry["group_port"], log)
    try:
        yield server
    finally:
        end(server)


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


def all_gone(pids: Sequence[int], seconds: float = 20.0) -> bool:
    """Whether all of these processes end within ``seconds``."""
    deadline = time.monotonic() + seconds
    while (left := any(map(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


def load_served(checkpoint: Path | None = None) -> LoadedModel:
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
    """Answers of transformers' own ``generate``, one request at a time, end token included."""
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
    """A server's answers; asserts that its prompts are the trainer's."""
    items = client.infer(payload(requests, max_tokens))
    for request, item in zip(requests, items, strict=True):
        assert tuple(item["response"]["prompt_token_ids"]) == request.prompt_token_ids
    return [item["response"]["choices"][0]["token_ids"] for item in items]


def greedy_answers(
    loaded: LoadedModel, requests: Sequence[RolloutRequest], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """As :func:`greedy_tokens`, without the end token."""
    eos = loaded.vocab.eos_id
    return [ids[: ids.index(eos)] if eos in ids else ids for ids in greedy_tokens(loaded, requests, max_tokens)]


def disturb(loaded: LoadedModel, seed: int) -> LoadedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return loaded


@contextmanager
def pushing(client: ServerClient, source: Any, **keys: Any) -> Iterator[ServerPusher]:
    """A pusher of ``source`` (a trainer or its weights) to one server. ``keys``: of ``vllm.sync``."""
    weights = TrainerWeights(source.model) if isinstance(source, LoadedModel) else source
    pusher = ServerPusher([client], weights, SyncConfig(**{"bucket_mb": 1, "timeout_s": 60.0, **keys}))
    try:
        yield pusher
    finally:
        pusher.close()


# -- swift rollout -----------------------------------------------------------------------------------------------------


def guarded_config(folder: Path, server: str, **keys: Any) -> dict[str, Any]:
    """As :func:`server_config`, with the guard on. ``server``: the program, swift or coordexp."""
    return server_config(
        folder,
        launch={"server": server, "wait_s": 240.0},
        rollout_matching__repeat_terminate=GUARD,
        rollout_matching__max_new_tokens=GUARDED_TOKENS,
        **keys,
    )


def plan_of(folder: Path, config: Mapping[str, Any], name: str = "launch.yaml") -> LaunchPlan:
    folder.mkdir(parents=True, exist_ok=True)
    path = write_yaml(folder, dict(config), name)
    return plan_launch(load_config(path), path)


def with_arguments(process: ProcessPlan, **flags: Any) -> ProcessPlan:
    """``process`` with values of its flags changed: ms-swift takes the last one given."""
    more = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return replace(process, command=(*process.command, *more))


@contextmanager
def swift_rollout(folder: Path, config: Mapping[str, Any], **flags: Any) -> Iterator[RunningServer]:
    """``swift rollout``, healthy: :mod:`forked <support.forked>`, and its workers from it. From the command line it is
    started by ``coordexp launch``, and tested there. Ended with everything it started."""
    (server,) = plan_of(folder, config).servers
    assert server.process is not None
    process = with_arguments(server.process, **flags)
    assert process.command[1:3] == ("-m", "swift.cli.rollout")
    process.log.parent.mkdir(parents=True, exist_ok=True)
    environment = serving_environment(**process.environment)
    arguments = list(process.command[3:])
    started = Handle(forked(rollout_program, arguments, log=process.log, environment=environment, behind=SWIFT))
    running = RunningServer(started, server.base_url, server.group_port, process.log)
    try:
        wait_until_healthy(running)
        yield running
    finally:
        end(running)


# -- servers and engines of trainers -----------------------------------------------------------------------------------


class Plain(NamedTuple):
    """A server, and the configuration that it was started with."""

    config: dict[str, Any]
    running: RunningServer


class PlainServer:
    """A ``coordexp serve`` for adapters and full weights; boots at the first use, and again if it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._plain: Plain | None = None

    def get(self) -> Plain:
        """The healthy server. Its weights are those of the last push."""
        if self._plain is None or self._plain.running.process.poll() is not None:
            self._stack.close()
            # Data that do not exist: only the trainer needs them.
            config = server_config(
                self._folder,
                custom__train_jsonl=str(self._folder / "nowhere.jsonl"),
                rollout_matching__vllm__enable_lora=True,
                rollout_matching__vllm__max_lora_rank=8,
            )
            config["custom"].pop("val_jsonl")
            self._plain = Plain(config, self._stack.enter_context(serving(self._folder, config)))
        return self._plain

    def close(self) -> None:
        self._stack.close()


def vllm_config(folder: Path, name: str = "run", /, **keys: Any) -> RunConfig:
    """As :func:`tiny_run.run_config` of stage 2, with a model that vLLM's CPU kernels can run."""
    return run_config(folder, 2, name, model__model=str(served_checkpoint()), **keys)


def colocated(
    trainer: LoadedModel, folder: Path, open_image: Any = open_rgb, checkpoint: Path | None = None,
    names: Sequence[str] = (), **keys: Any,
) -> ColocatedBackend:  # fmt: skip
    """A backend with an engine in this process, which is not started yet."""
    config = vllm_config(folder, **COLOCATED | keys)
    parts = trainer.parts(checkpoint=checkpoint or served_checkpoint(), open_image=open_image)
    backend = build_backend(resolved_rollout(config), parts, names)
    assert isinstance(backend, ColocatedBackend)
    return backend


def server_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of :func:`server_config` that a trainer of those servers needs."""
    vllm = config["rollout_matching"]["vllm"]
    return {
        "rollout_matching__rollout_backend": "vllm",
        "rollout_matching__vllm__mode": "server",
        "rollout_matching__vllm__tensor_parallel_size": 1,
        "rollout_matching__vllm__server": vllm["server"],
        "rollout_matching__vllm__sync": vllm["sync"],
    }
