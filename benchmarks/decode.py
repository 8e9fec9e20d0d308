"""The gain of skipping forced tokens: engine steps, boxes and tokens per second of a vLLM engine, with and without.

First, without a model: forward passes per box of canonical answers, in the demo's tokenizer and in Qwen's real one,
as greedy decoding takes them. Then the demo's checkpoint in a real engine, at each batch size:
the same greedy answers with and without, in turn, in one run. In bfloat16, answers of other batch sizes differ by
rounding, without skipping too: compare the last two columns.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import yaml
from reporting import machine, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # Qwen's tokenizer is the tests'

LIMIT = 32  # drafted tokens, as the engine has it
NAMES = ("person", "car", "traffic light", "dog", "chair", "fire hydrant", "cup", "bicycle")


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", type=Path, default=Path("checkpoints/demo-stage1"), help="[checkpoints/demo-stage1]")
    flags.add_argument("--batches", type=positive_list, default=[1, 8, 32], help="sequences at once [1,8,32]")
    flags.add_argument("--images", type=positive, default=32, help="scenes to answer [32]")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engine [float32]")
    flags.add_argument("--rounds", type=positive, default=3, help="of both forms in turn [3]")
    flags.add_argument("--no-engine", action="store_true", help="only the first table")
    options = flags.parse_args(argv)
    threads = set_threads(options.threads)
    console, where = Console(), machine()
    print_machine(console, where, threads=threads)
    results = list(counted_steps(options.model))
    table = Table("tokenizer", "objects", "names", "tokens per box", "forward passes per box", "µs per draft")
    for one in results:
        cells = (one["tokens_per_box"], one["passes_per_box"], one["draft_us"])
        table.add_row(one["tokenizer"], str(one["objects"]), one["names"], *(f"{cell:.1f}" for cell in cells))
    console.print(table)
    if not options.no_engine:
        headings = ("boxes per CPU s", "tokens per CPU s", "drafts", "equal to decoded", "equal to the first row")
        table = Table("batch", "forced tokens", "steps", "tokens", *headings)
        for one in engine_runs(options):
            results.append(one)
            cells = (
                f"{one['boxes_per_cpu_s']:.1f}",
                f"{one['tokens_per_cpu_s']:.0f}",
                f"{one['drafting']:.1%}",
                f"{one['equal']} of {one['answers']}",
                f"{one['equal_first']}",
            )
            form = "skipped" if one["skip"] else "decoded"
            table.add_row(str(one["batch"]), form, str(one["steps"]), str(one["tokens"]), *cells)
            write_json(options.json, "decode", where, vars(options), results, complete=False)
        console.print(table)
    write_json(options.json, "decode", where, vars(options), results)


def counted_steps(model: Path) -> Iterator[dict[str, Any]]:
    """Forward passes of greedy decoding for answers of 3, 10 and 40 boxes: names differ, or are all the same."""
    from transformers import AutoTokenizer

    from coordexp.coords import CoordVocab, serialize_objects
    from coordexp.records import GTObject
    from coordexp.rollouts.answer_state import AnswerGrammar
    from support.qwen_tokenizer import qwen_vocab

    vocabularies = {"demo": CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(model)), "Qwen": qwen_vocab()}
    for tokenizer, vocab in vocabularies.items():
        grammar = AnswerGrammar(vocab)
        for count in (3, 10, 40):
            for kind, names in (("different", NAMES), ("the same", NAMES[:1])):
                drawn = random.Random(count)
                objects = [
                    GTObject(names[k % len(names)], "bbox_2d", tuple(drawn.randrange(1000) for _ in range(4)))
                    for k in range(count)
                ]
                ids = [*vocab.encode(serialize_objects(objects)), vocab.eos_id]
                state, at, passes, spent = grammar.start(), 0, 0, 0.0
                while at < len(ids):
                    began = time.process_time()
                    draft = state.draft(LIMIT)
                    spent += time.process_time() - began
                    right = next(
                        (k for k, token in enumerate(draft) if ids[at + k : at + k + 1] != [token]), len(draft)
                    )
                    for token in ids[at : at + right + 1]:
                        state.push(token)
                    at += right + 1
                    passes += 1
                yield {
                    "tokenizer": tokenizer, "objects": count, "names": kind, "tokens_per_box": len(ids) / count,
                    "passes_per_box": passes / count, "draft_us": 1e6 * spent / passes,
                }  # fmt: skip


def engine_runs(options: Any) -> Iterator[dict[str, Any]]:
    """Both forms at each batch size; one engine at a time, ``rounds`` of each in turn; medians of CPU seconds."""
    first: list[Sequence[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in options.batches:
            cells: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _ in range(options.rounds):
                for skip in cells:
                    cells[skip].append(one_run(options, Path(folder), batch, skip))
            first = first or cells[False][0]["answers"]
            for skip, runs in cells.items():
                cpu_s = sorted(run["cpu_s"] for run in runs)[len(runs) // 2]
                answers, decoded = runs[0]["answers"], cells[False][0]["answers"]
                tokens = sum(map(len, answers))
                yield {
                    "batch": batch, "skip": skip, "steps": runs[0]["steps"], "tokens": tokens, "cpu_s": cpu_s,
                    "boxes_per_cpu_s": runs[0]["boxes"] / cpu_s, "tokens_per_cpu_s": tokens / cpu_s,
                    "drafting": sum(run["draft_s"] for run in runs) / sum(run["cpu_s"] for run in runs),
                    "equal": equal(answers, decoded), "equal_first": equal(answers, first), "answers": len(answers),
                }  # fmt: skip


def equal(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(a == b for a, b in zip(answers, expected, strict=True))


def one_run(options: Any, folder: Path, batch: int, skip: bool) -> dict[str, Any]:
    """One engine: all images, ``batch`` at a time."""
    from coordexp.coords import CoordVocab
    from coordexp.data.jsonl import read_jsonl
    from coordexp.data.scenes import SPECS, write_scenes
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.parsing import parse_rollout
    from coordexp.rollouts import SeedContext, rollout_session

    scenes = folder / "scenes" / "scenes.jsonl"
    if not scenes.is_file():
        scenes = write_scenes(folder / "scenes", options.images, SPECS["sparse"], seed=7)
    with started(options.model, folder, batch, skip, options.dtype) as (backend, loaded):
        prompt = yaml.safe_load((options.model / "resolved_config.yaml").read_text())["template"].get("prompt")
        encoder = PromptEncoder(loaded.processor, prompt, None)
        requests = [encoder.encode(record) for record in read_jsonl(scenes)]
        with rollout_session(backend, 0):
            backend.generate(requests[:1], SeedContext(0, 0, 0, 0))
        engine, steps, draft_s = backend.engine.vllm, 0, 0.0
        step = engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        def timed(propose: Any) -> Any:
            def draft(*args: Any, **keys: Any) -> Any:
                nonlocal draft_s
                began = time.process_time()
                drafts = propose(*args, **keys)
                draft_s += time.process_time() - began
                return drafts

            return draft

        engine.step = counted
        if skip:
            drafter = backend.engine.ask_worker(lambda worker: worker.model_runner.drafter)
            drafter.propose = timed(drafter.propose)
        with rollout_session(backend, 1):
            began = time.process_time()
            rollouts = backend.generate(requests, SeedContext(0, 0, 0, 0))
            cpu_s = time.process_time() - began
        vocab: CoordVocab = loaded.vocab
        boxes = sum(
            len(parse_rollout(one.response_token_ids, vocab, ended=not one.truncated).objects) for one in rollouts
        )
        answers = [one.response_token_ids for one in rollouts]
        return {"steps": steps, "cpu_s": cpu_s, "draft_s": draft_s, "answers": answers, "boxes": boxes}


@contextmanager
def started(model: Path, folder: Path, batch: int, skip: bool, dtype: str) -> Iterator[tuple[Any, Any]]:
    from coordexp.config import load_config, resolved_rollout
    from coordexp.data.images import open_rgb
    from coordexp.modeling.load import load_model
    from coordexp.modeling.weights import LearnerWeights
    from coordexp.rollouts import build_backend
    from coordexp.rollouts.learner import LearnerParts

    config = {
        "model": {"model": str(model), "dtype": dtype},
        "custom": {"train_jsonl": str(folder / "scenes" / "scenes.jsonl")},
        "training": {"output_dir": str(folder / "run")},
        "global_max_length": 1400,
        "rollout_matching": {
            "rollout_backend": "vllm", "decode_batch_size": batch, "max_new_tokens": 600,
            "decoding": {"skip_forced_tokens": skip},
            "vllm": {"mode": "colocate", "tensor_parallel_size": 1, "max_num_seqs": batch, "max_model_len": 1400},
        },
    }  # fmt: skip
    path = folder / "decode.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_model(model, dtype)
    loaded.model.eval()
    parts = LearnerParts(
        loaded.model, loaded.vocab, loaded.image_token_id, LearnerWeights(loaded.model), model, open_rgb
    )
    backend = build_backend(resolved_rollout(load_config(path)), parts)
    try:
        yield backend, loaded
    finally:
        backend.close()


if __name__ == "__main__":
    main()
