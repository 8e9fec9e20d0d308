"""One colocated vLLM engine on this machine: its start, answers at each batch size, pushes, sleep and wake.

`--kind plain` decodes token by token; `--kind skipped` skips forced tokens; `--kind start` is a plain one that answers
nothing: after another, its start finds vLLM's cache of compiled models (VLLM_CACHE_ROOT). One engine answers all batch
sizes, so its CUDA graphs are those of the largest. `gpu.py` runs this script for each kind.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from reporting import machine, parser, positive_list, print_machine, set_threads, write_json
from rich.console import Console

KINDS = ("plain", "skipped", "start")
LONGEST = 1600  # tokens of an answer
PUSHES = 3  # of each kind


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--kind", choices=KINDS, required=True)
    flags.add_argument("--model", type=Path, required=True, help="checkpoint that writes answers")
    flags.add_argument("--scenes", type=Path, required=True, help="JSONL of the images to answer")
    flags.add_argument("--folder", type=Path, required=True, help="for the configuration and the answers")
    flags.add_argument("--batches", type=positive_list, default=[64, 8, 1], help="answers at once [64,8,1]")
    flags.add_argument("--images", type=positive_list, default=[128, 16, 6], help="answered at each [128,16,6]")
    flags.add_argument("--turn", type=Path, help="file to lock while measuring: several engines may start together")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="[bfloat16]")
    options = flags.parse_args(argv)
    if len(options.batches) != len(options.images):
        flags.error(f"--images: {options.images} are not as many numbers as --batches, {options.batches}")
    set_threads(options.threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # seconds of loading, compiling and capturing graphs
    options.folder.mkdir(parents=True, exist_ok=True)
    console, where = Console(), machine()
    name = f"engine_{options.kind}"
    save = options.json if options.json is None or options.json.suffix == ".json" else options.json / f"{name}.json"
    print_machine(console, where, kind=options.kind, model=options.model)
    results: dict[str, Any] = {}
    for found in measured(options):
        results |= found
        console.print_json(json.dumps(found))
        write_json(save, name, where, vars(options), results, complete=False)
    write_json(save, name, where, vars(options), results)


def measured(options: Any) -> Iterator[dict[str, Any]]:
    """Results of one engine, part by part."""
    import decode
    import torch
    from wide_checkpoint import PROMPT

    from coordexp.data.jsonl import read_jsonl
    from coordexp.modeling.inputs import PromptEncoder

    skips = options.kind == "skipped"
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
    compiled = (cache / "torch_compile_cache").is_dir()
    with ExitStack() as stack:
        backend, loaded = stack.enter_context(
            decode.started(
                options.model,
                options.folder,
                options.scenes,
                max(options.batches),
                skips,
                options.dtype,
                LONGEST,
                sleep_level=1,
            )
        )
        if torch.cuda.is_available():
            loaded.model.cuda()  # as a trainer's weights are
        began = time.perf_counter()
        backend.sync_weights(0)
        backend.release()
        drafts = backend.engine.ask_worker(lambda worker: worker.vllm_config.speculative_config is not None)
        if drafts != skips:
            raise SystemExit(
                f"--kind {options.kind}: the engine {'skips' if drafts else 'does not skip'} forced tokens"
            )
        yield {"start_s": time.perf_counter() - began, "cache_was_there": compiled}
        if options.turn is not None:
            fcntl.flock(stack.enter_context(options.turn.open("w")), fcntl.LOCK_EX)
        encoder = PromptEncoder(loaded.processor, PROMPT, None)
        requests = [encoder.encode(record) for record in read_jsonl(options.scenes)]
        if options.kind != "start":
            yield from decoded(options, backend, loaded, requests)
        pushes: dict[str, Any] = {}
        for found in pushed(backend.engine, loaded):
            pushes |= found
            yield {"push": pushes}


def decoded(options: Any, backend: Any, loaded: Any, requests: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Rates at each batch size, after a round that is not counted."""
    import decode

    counts, version = decode.Counts(backend.engine), 0
    for batch, images in zip(options.batches, options.images, strict=True):
        backend.engine.max_in_flight = batch
        chosen = (requests * -(-images // len(requests)))[:images]
        version += 1
        decode.timed_answers(backend, chosen[:batch], version)
        version += 1
        counts.reset()
        rollouts, cpu_s, wall_s = decode.timed_answers(backend, chosen, version)
        answers = decode.answers_of(rollouts, loaded.vocab)
        file = options.folder / f"answers_{options.kind}_{batch}.json"
        file.write_text(json.dumps([list(one) for one in answers["answers"]]), encoding="utf-8")
        row = {
            "images": images, "wall_s": wall_s, "cpu_s": cpu_s, "boxes": answers["boxes"], "tokens": answers["tokens"],
            "truncated": sum(one.truncated for one in rollouts), "boxes_per_s": answers["boxes"] / wall_s,
            "tokens_per_s": answers["tokens"] / wall_s, "step_ms": 1e3 * wall_s / max(1, counts.found["steps"]),
            **counts.found,
        }  # fmt: skip
        plain = options.folder / f"answers_plain_{batch}.json"
        if options.kind == "skipped" and plain.is_file():
            theirs = json.loads(plain.read_text(encoding="utf-8"))
            row["equal_to_plain"] = decode.equal([list(one) for one in answers["answers"]], theirs)
        yield {f"batch_{batch}": row}


def pushed(engine: Any, loaded: Any) -> Iterator[dict[str, Any]]:
    """Medians of pushes, each after the engine slept and woke up: all weights without and with checksums, and adapters
    merged into them."""
    from coordexp.config.rollout import SyncConfig
    from coordexp.doctor.engine import LORA
    from coordexp.engine.trainer.colocated import ColocatedPusher
    from coordexp.modeling.adapter import tune
    from coordexp.modeling.trainer_weights import TrainerWeights

    def push(name: str, checksum_every: int) -> dict[str, Any]:
        pusher = ColocatedPusher(TrainerWeights(loaded.model), SyncConfig(mode="full", checksum_every=checksum_every))
        pusher.engine = engine
        seconds: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "push_s": []}
        size = 0
        for version in range(1 + PUSHES):  # the first one compares always
            seconds["sleep_s"].append(timed(lambda: engine.sleep(1)))
            weights = timed(lambda: engine.wake_up(["weights"]))
            began = time.perf_counter()
            size = pusher.push(version).bytes
            seconds["push_s"].append(time.perf_counter() - began + timed(lambda: None))
            seconds["wake_s"].append(weights + timed(lambda: engine.wake_up(["kv_cache"])))
        return {name: {"bytes": size, **{what: statistics.median(one[1:]) for what, one in seconds.items()}}}

    yield push("full", 0)
    yield push("full_with_checksums", 1)
    tune(loaded.model, LORA, loaded.vocab.coord_token_ids)
    yield push("lora_merged", 0)


def timed(act: Callable[[], object]) -> float:
    """Seconds until ``act`` and all that the GPU has to do is done."""
    import torch

    began = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
