"""How fast do the three rollout backends answer? transformers, vLLM in the trainer's process, a vLLM server.

One run, one set of weights, the same prompts: tokens per second of greedy answers that may be as long as the text of
``--objects`` objects, at each batch size. Counted are the tokens that were written; a random model hardly ever ends.
Each backend starts once, for the largest batch; before a batch is timed it gets the weights again, so nothing of its
prompts is in a cache, as in training. Every finished cell is a line, and ``--json`` holds it at once (``complete``
turns true with the last): ``--backends`` and ``--batches`` choose the cells of a run that should be short.
Without ``--model`` the model is a random tiny one: its figures show the cost of the machinery around a model, not how
vLLM compares on a real one. ``--check`` also counts answers that are token for token transformers' (float32 only).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

# Spinning OpenMP threads of one engine starve the next on few cores; read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from reporting import machine, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table
from rollout_server import TIMEOUT_S, server_entry, serving

BACKENDS = ("hf", "colocate", "server")


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", type=Path, help="checkpoint [a random tiny one]")
    flags.add_argument("--batches", type=positive_list, default=[1, 8, 32], help="sequences at once [1,8,32]")
    flags.add_argument("--objects", type=positive, default=60, help="objects an answer is long enough for [60]")
    flags.add_argument("--backends", default=",".join(BACKENDS), help="which of hf,colocate,server [all]")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="[float32]")
    flags.add_argument("--gpu-memory", type=float, default=0.3, help="share of device memory for each engine [0.3]")
    flags.add_argument("--check", action="store_true", help="count answers that equal transformers'")
    options = flags.parse_args(argv)
    names = options.backends.split(",")
    if unknown := [name for name in names if name not in BACKENDS]:
        flags.error(f"--backends: no {unknown[0]}; known are {', '.join(BACKENDS)}")
    threads = set_threads(options.threads)
    console, where = Console(), machine()
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(options, Path(folder))
        settings = {**vars(options), "threads": threads, "new_tokens": bench.new_tokens}
        print_machine(console, where, new_tokens=bench.new_tokens, dtype=options.dtype, threads=threads)
        results: list[dict[str, Any]] = []
        cells = len(names) * len(options.batches)
        for name in names:
            console.print(f"{name}: starting", highlight=False)
            with bench.started(name):
                for batch in options.batches:
                    results.append(row := bench.measure(name, batch))
                    console.print(_line(row, len(results), cells), highlight=False)
                    write_json(options.json, "rollouts", where, settings, results, complete=len(results) == cells)
    console.print(_table(results))


class _Bench:
    """Model, prompts and, one after the other, the backends."""

    def __init__(self, options: Any, folder: Path) -> None:
        import torch

        from coordexp.data.jsonl import read_jsonl, write_jsonl
        from coordexp.data.scenes import SceneSpec, make_scene
        from coordexp.modeling.inputs import PromptEncoder
        from coordexp.modeling.load import load_model
        from coordexp.modeling.tiny import build_tiny_checkpoint
        from coordexp.records import ImageRecord

        self._options, self._folder = options, folder
        self._checkpoint = options.model or build_tiny_checkpoint(folder / "model", seed=0)
        self.loaded = load_model(self._checkpoint, options.dtype)
        self.loaded.model.eval()
        if torch.cuda.is_available():
            torch.nn.Module.to(self.loaded.model, "cuda")
        self.new_tokens = len(self.loaded.vocab.encode(_dense_answer(options.objects)))
        records = []
        for index in range(max(options.batches)):
            image, objects = make_scene(SceneSpec(size=128), 7, index)
            path = folder / f"{index}.png"
            image.save(path)
            records.append(ImageRecord(str(index), path, 128, 128, objects))
        write_jsonl(records, folder / "scenes.jsonl")
        encoder = PromptEncoder(self.loaded.processor, None, None)
        self._requests = [encoder.encode(record) for record in read_jsonl(folder / "scenes.jsonl")]
        self._max_length = max(len(r.prompt_token_ids) for r in self._requests) + self.new_tokens + 16
        self._backend: Any = None
        self._start_s = 0.0
        self._version = 0
        self._truth: dict[int, list[tuple[int, ...]]] = {}

    @contextmanager
    def started(self, name: str) -> Iterator[None]:
        """Within it, :meth:`measure` asks this backend, which has answered once already."""
        from coordexp.config import load_config, resolved_rollout
        from coordexp.rollouts import SeedContext, build_backend, rollout_session

        path = self._write_config(name)
        config = load_config(path)
        assert config.rollout_matching is not None
        parts = self.loaded.parts(checkpoint=Path(self._checkpoint))
        began = time.perf_counter()
        with serving(path, environment={}) if name == "server" else nullcontext():
            self._backend = build_backend(resolved_rollout(config), parts)
            try:
                with rollout_session(self._backend, 0):
                    self._start_s = time.perf_counter() - began
                    self._backend.generate(self._requests[:1], SeedContext(0, 0, 0, 0))
                yield
            finally:
                self._backend.close()

    def measure(self, name: str, batch: int) -> dict[str, Any]:
        """Seconds of one batch by the started backend; start-up apart."""
        from coordexp.rollouts import SeedContext, rollout_session

        self._version += 1
        with rollout_session(self._backend, self._version):
            began = time.perf_counter()
            rollouts = self._backend.generate(self._requests[:batch], SeedContext(0, 0, 0, 0))
            seconds = time.perf_counter() - began
        answers = [rollout.response_token_ids for rollout in rollouts]
        self._truth.setdefault(batch, answers)
        tokens = sum(len(answer) for answer in answers)
        equal = sum(a == b for a, b in zip(answers, self._truth[batch], strict=True)) if self._options.check else None
        return {"backend": name, "batch": batch, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
                "start_s": self._start_s, "equal_to_first": equal}  # fmt: skip

    def _write_config(self, name: str) -> Path:
        import yaml

        batch = max(self._options.batches)
        vllm: dict[str, Any] = {
            "mode": "server" if name == "server" else "colocate", "tensor_parallel_size": 1,
            "engine_args": {"max_num_seqs": batch}, "gpu_memory_utilization": self._options.gpu_memory,
            "max_model_len": self._max_length,
        }  # fmt: skip
        if name == "server":
            vllm["server"] = {"servers": [server_entry()], "timeout_s": TIMEOUT_S}
        config = {
            "model": {"model": str(self._checkpoint), "dtype": self._options.dtype},
            "custom": {"train_jsonl": str(self._folder / "scenes.jsonl")},
            "training": {"output_dir": str(self._folder / "run")},
            "global_max_length": self._max_length,
            "rollout_matching": {
                "rollout_backend": "hf" if name == "hf" else "vllm",
                "decode_batch_size": batch,
                "max_new_tokens": self.new_tokens,
                "vllm": vllm,
            },
        }
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path


def _dense_answer(count: int) -> str:
    from coordexp.coords import serialize_objects
    from coordexp.records import GTObject

    rng = random.Random(1)
    corners = [(rng.randrange(900), rng.randrange(900)) for _ in range(count)]
    return serialize_objects([GTObject("red square", "bbox_2d", (x, y, x + 90, y + 90)) for x, y in corners])


def _line(row: dict[str, Any], done: int, cells: int) -> str:
    rate = f"{row['tokens']} tokens in {row['seconds']:.1f} s, {row['tokens_per_s']:.0f} tokens/s"
    return f"{done}/{cells}  {row['backend']}, batch {row['batch']}: {rate} (started in {row['start_s']:.1f} s)"


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table("backend", "batch", "tokens", "seconds", "tokens/s", "start, s", "equal")
    for row in results:
        equal = "" if row["equal_to_first"] is None else f"{row['equal_to_first']}/{row['batch']}"
        table.add_row(row["backend"], str(row["batch"]), str(row["tokens"]), f"{row['seconds']:.2f}",
                      f"{row['tokens_per_s']:.0f}", f"{row['start_s']:.1f}", equal)  # fmt: skip
    return table


if __name__ == "__main__":
    main()
