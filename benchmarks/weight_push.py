"""How fast do new weights reach a rollout server, and how much of that is the wire?

Starts a real `coordexp serve` on a model of random weights (Qwen3-VL's architecture, several hundred MB), pushes full
weights to it, and compares with the bare broadcast of the same bytes, in buckets of the same size, by the same backend
(Gloo on CPUs), between this process and one that does nothing but receive. Both take turns in one run.

A push is all of it: HTTP, gathering small weights, transfer, loading into the engine's fused layout, resetting caches,
commit. "Received" and "loaded" are the worker's own accounts; loading runs while the next bucket arrives.

ms-swift's own push (``VLLMClient.update_named_param``, ``update_flattened_params``) is not compared: it supports only
NCCL. On a CPU vLLM's communicator for it switches itself off and sends nothing, without an error, and ms-swift then
calls ``torch.cuda.synchronize``. A line below the table says so, with what NCCL's library answers on this machine.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table
from rollout_server import TIMEOUT_S, server_entry, serving

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import require
from coordexp.modeling.load import load_model
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.weight_sync.group import Communicator, GroupAddress, join
from support.ports import free_ports

CPU = torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--hidden", type=positive, default=1024, help="width of the model, a multiple of 64")
    flags.add_argument("--layers", type=positive, default=8, help="depth of the model")
    flags.add_argument("--bucket-mb", type=positive, default=64, help="size of a bucket, in 2^20 bytes")
    flags.add_argument("--repeats", type=positive, default=5, help="pushes and broadcasts that are timed")
    options = flags.parse_args(argv)
    require("vllm", "this benchmark")
    options.threads = set_threads(options.threads)
    where, console = machine(), Console()
    spec = TinySpec(
        hidden=options.hidden,
        layers=options.layers,
        heads=options.hidden // 64,
        kv_heads=max(1, options.hidden // 256),
        mlp=4 * options.hidden,
    )
    with tempfile.TemporaryDirectory(prefix="coordexp-push-") as name:
        checkpoint = build_tiny_checkpoint(Path(name) / "model", seed=0, spec=spec)
        model = load_model(checkpoint, "float32").model
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        settings = {**vars(options), "megabytes": round(size / 1e6), "dtype": "float32", "device": "cpu"}
        print_machine(console, where, **{key: value for key, value in settings.items() if key != "json"})
        config = server_config(Path(name), checkpoint)
        with serving(config) as client, raw_receiver(size, options.bucket_mb << 20) as group:
            results = measure(client, model, group, size, options.bucket_mb, options.repeats)
    console.print(render(results))
    console.print(
        f"a push reaches {results['share_of_raw']:.0%} of the bare broadcast's rate "
        f"(single rounds: {', '.join(f'{share:.0%}' for share in results['share_by_round'])})"
    )
    results["ms-swift's own push"] = {"why": no_swift_push()}
    console.print(f"ms-swift's own push: {no_swift_push()}", highlight=False, markup=False)
    write_json(options.json, "weight_push", where, settings, results)


def measure(
    client: ServerClient, model: Any, group: Communicator, size: int, bucket_mb: int, repeats: int
) -> dict[str, Any]:
    """Broadcasts and pushes in turn. The first of each is not counted: it opens groups and touches memory."""
    sync = ServerPusher([client], TrainerWeights(model), SyncConfig(bucket_mb=bucket_mb, timeout_s=TIMEOUT_S))
    first = sync.push(1)
    raw_s, push_s, receive_s, load_s = [], [], [], []
    broadcast(group, size, bucket_mb << 20)
    for version in range(2, repeats + 2):
        raw_s.append(broadcast(group, size, bucket_mb << 20))
        report = sync.push(version)
        assert report.bytes == size
        push_s.append(report.seconds)
        status = client.status()
        assert status is not None
        receive_s.append(status["workers"][0]["receive_s"])
        load_s.append(status["workers"][0]["load_s"])
    sync.close()
    gigabytes = size / 1e9
    raw, push = statistics.median(raw_s), statistics.median(push_s)
    return {
        "gigabytes": gigabytes,
        "raw": {"seconds": raw, "gb_per_s": gigabytes / raw},
        "push": {"seconds": push, "gb_per_s": gigabytes / push},
        "first push, with group and checksum": {"seconds": first.seconds, "gb_per_s": gigabytes / first.seconds},
        "received": {"seconds": statistics.median(receive_s)},
        "loaded": {"seconds": statistics.median(load_s)},
        "share_of_raw": raw / push,
        "share_by_round": [one_raw / one_push for one_raw, one_push in zip(raw_s, push_s, strict=True)],
    }


def render(results: dict[str, Any]) -> Table:
    table = Table("what", "seconds", "GB/s", title=f"{results['gigabytes']:.2f} GB of weights")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("raw", "push", "received", "loaded", "first push, with group and checksum"):
        figures = results[name]
        rate = f"{figures['gb_per_s']:.2f}" if "gb_per_s" in figures else ""
        label = {"raw": "bare broadcast", "received": "  of it: received", "loaded": "  of it: loaded (meanwhile)"}
        table.add_row(label.get(name, name), f"{figures['seconds']:.3f}", rate)
    return table


def no_swift_push() -> str:
    """Why ms-swift's push has no figure, by what it needs and this machine lacks."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except (OSError, ValueError, RuntimeError) as error:
        return f"needs NCCL, which cannot be loaded here ({error}); vLLM's communicator then sends nothing"
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return f"needs NCCL and a GPU for each end; this machine has {gpus}"
    return "not part of this benchmark, which has its weights on the CPU"


def chunks(size: int, bucket_bytes: int) -> list[int]:
    return [min(bucket_bytes, size - start) for start in range(0, size, bucket_bytes)]


def broadcast(group: Communicator, size: int, bucket_bytes: int) -> float:
    """Seconds to send ``size`` bytes that lie ready in memory, and to hear that they arrived."""
    ready = [torch.ones(chunk, dtype=torch.uint8) for chunk in chunks(size, bucket_bytes)]
    started = time.perf_counter()
    for bucket in ready:
        group.broadcast([bucket], 1)
    group.broadcast([torch.zeros(1, dtype=torch.uint8)], 0)
    return time.perf_counter() - started


def receive(port: int, size: int, bucket_bytes: int) -> None:
    """The other end of :func:`broadcast`, again and again, until its sender leaves."""
    torch.set_num_threads(1)
    group = join(GroupAddress("127.0.0.1", port, 0, 2, TIMEOUT_S), CPU)
    buffers = [torch.empty(chunk, dtype=torch.uint8) for chunk in chunks(size, bucket_bytes)]
    while True:
        for buffer in buffers:
            group.broadcast([buffer], 1)
        group.broadcast([torch.zeros(1, dtype=torch.uint8)], 0)


@contextmanager
def raw_receiver(size: int, bucket_bytes: int) -> Iterator[Communicator]:
    (port,) = free_ports(1)
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(port, size, bucket_bytes), daemon=True)
    process.start()
    try:
        yield join(GroupAddress("127.0.0.1", port, 1, 2, TIMEOUT_S), CPU)
    finally:
        process.kill()
        process.join()


def server_config(folder: Path, checkpoint: Path) -> Path:
    """A file: the configuration of a server with this model."""
    config = {
        "model": {"model": str(checkpoint), "dtype": "float32"},
        "custom": {"train_jsonl": str(checkpoint / "config.json")},
        "training": {"output_dir": str(folder / "run")},
        "global_max_length": 1024,
        "rollout_matching": {
            "rollout_backend": "vllm",
            "vllm": {
                "mode": "server",
                "tensor_parallel_size": 1,
                "enforce_eager": True,
                "engine_args": {"max_num_seqs": 4},
                "server": {"servers": [server_entry()], "timeout_s": TIMEOUT_S},
                "sync": {"timeout_s": TIMEOUT_S},
            },
        },
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
