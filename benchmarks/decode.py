"""The gain of skipping forced tokens: engine steps, boxes and tokens per second of vLLM engines, with and without.

First, without a model: forward passes per box of canonical answers, in the demo's tokenizer and in Qwen's real one,
as greedy decoding takes them; and from these a roofline of Qwen3-VL-2B on an H100, on paper. Then a checkpoint in a
real engine, at each batch size: prompts alone (answers of one token), then the same greedy answers token by token, with
vLLM's own n-gram proposer, and with forced tokens skipped, in turn, in one run. In bfloat16, answers of other batch
sizes differ by rounding, without drafts too: compare the last two columns. `wide_checkpoint.py` writes a wide
checkpoint, for `--model` and `--objects`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import yaml
from reporting import machine, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # Qwen's tokenizer is the tests'

LIMIT = 32  # drafted tokens, as the engine has it
NAMES = ("person", "car", "traffic light", "dog", "chair", "fire hydrant", "cup", "bicycle")
FORMS = ("prompts", "decoded", "n-gram", "skipped")  # prompts: answers end after one token
# Of vLLM's proposer: lengths that it looks for in prompt and answer, and tokens drafted. 32 cost more than they save.
NGRAM, NGRAM_DRAFTED = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, 8
# An H100's memory bandwidth, and the operations per second that matrix products in bfloat16 reach.
BYTES_PER_S, FLOP_PER_S = 3.35e12, 6e14
CONTEXT = 1200  # tokens of image and prompt


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", type=Path, default=Path("checkpoints/demo-stage1"), help="[checkpoints/demo-stage1]")
    flags.add_argument("--batches", type=positive_list, default=[1, 8, 32], help="sequences at once [1,8,32]")
    flags.add_argument("--images", type=positive, default=32, help="scenes to answer [32]")
    flags.add_argument(
        "--objects",
        type=positive_list,
        metavar="3,10,40",
        help="scenes of this many boxes, not the demo's",
    )
    flags.add_argument(
        "--boxes", type=positive, default=30, help="with --objects: images for as many, at least a batch [30]"
    )
    flags.add_argument("--forms", choices=FORMS, nargs="+", default=list(FORMS), help="[all]")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engine [float32]")
    flags.add_argument("--rounds", type=positive, default=3, help="of all forms in turn [3]")
    flags.add_argument(
        "--warm-up",
        action="store_true",
        help="answer all images once before measuring: a CPU's first products of each size are slow",
    )
    flags.add_argument("--no-engine", action="store_true", help="only the first two tables")
    options = flags.parse_args(argv)
    options.threads = set_threads(options.threads)
    console, where = Console(), machine()
    print_machine(console, where, threads=options.threads)
    counted = list(counted_steps(options.model))
    console.print(counted_table(counted))
    on_paper = list(roofline(counted))
    console.print(roofline_table(on_paper))
    results: list[dict[str, Any]] = [*counted, *on_paper]
    if not options.no_engine:
        measured = []
        for one in engine_runs(options):
            measured.append(one)
            write_json(options.json, "decode", where, vars(options), [*results, *measured], complete=False)
        console.print(measured_table(measured))
        results += measured
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
                state, at, passes, drafted, spent = grammar.start(), 0, 0, 0, 0.0
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
                    drafted += len(draft)
                yield {
                    "tokenizer": tokenizer, "objects": count, "names": kind, "tokens_per_box": len(ids) / count,
                    "passes_per_box": passes / count, "drafted_per_pass": drafted / passes,
                    "draft_us": 1e6 * spent / passes,
                }  # fmt: skip


def counted_table(counted: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("tokenizer", "objects", "names", "tokens per box", "forward passes per box", "µs per draft")
    for one in counted:
        cells = (one["tokens_per_box"], one["passes_per_box"], one["draft_us"])
        table.add_row(one["tokenizer"], str(one["objects"]), one["names"], *(f"{cell:.1f}" for cell in cells))
    return table


def roofline(counted: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Boxes per second of Qwen3-VL-2B in bfloat16 on one H100, by memory and arithmetic alone: on paper.

    A step of B answers with p positions each takes ::

        max((2 N + B c k) / BYTES_PER_S, B p (2 N + 4 a c) / FLOP_PER_S)

    with N weights, c tokens of context (prompt and half of the answer), k bytes of keys and values per token, and a the
    sizes of all layers' query heads together. p is 1 token by token; with drafts, 1 and the mean draft. A box takes the
    counted forward passes. Time to launch kernels, to sample, to draft and to read the image is left out.
    """
    from support.qwen_sizes import VOCABULARY, qwen3_vl_config

    text: Any = qwen3_vl_config("2B").text_config
    queries, keys = (heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads))
    layer = 2 * text.hidden_size * (queries + keys) + 3 * text.hidden_size * text.intermediate_size
    weights = text.num_hidden_layers * layer + VOCABULARY * text.hidden_size
    cached = 2 * 2 * keys * text.num_hidden_layers
    for one in counted:
        if one["tokenizer"] != "Qwen":
            continue
        context = CONTEXT + one["objects"] * one["tokens_per_box"] / 2
        flop = 2 * weights + 4 * queries * text.num_hidden_layers * context
        for batch in (1, 8, 64):
            positions = 1 + one["drafted_per_pass"]
            memory_s = (2 * weights + batch * context * cached) / BYTES_PER_S
            step_s = {n: max(memory_s, batch * n * flop / FLOP_PER_S) for n in (1, positions)}
            before = batch / (one["tokens_per_box"] * step_s[1])
            after = batch / (one["passes_per_box"] * step_s[positions])
            yield {
                "on_paper": "Qwen3-VL-2B, H100", "objects": one["objects"], "names": one["names"], "batch": batch,
                "decoded_step_ms": 1e3 * step_s[1], "skipped_step_ms": 1e3 * step_s[positions],
                "positions": positions,
                "decoded_boxes_per_s": before, "skipped_boxes_per_s": after, "times": after / before,
            }  # fmt: skip


def roofline_table(on_paper: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("step, ms", "step with drafts, ms", "boxes/s", "boxes/s with drafts", "times")
    table = Table("batch", "objects", "names", *headings, title="on paper: Qwen3-VL-2B in bfloat16 on one H100")
    for one in sorted(on_paper, key=lambda one: one["batch"]):
        cells = (f"{one['decoded_step_ms']:.2f}", f"{one['skipped_step_ms']:.2f}")
        rates = (f"{one['decoded_boxes_per_s']:.0f}", f"{one['skipped_boxes_per_s']:.0f}")
        table.add_row(str(one["batch"]), str(one["objects"]), one["names"], *cells, *rates, f"{one['times']:.1f}")
    return table


def engine_runs(options: Any) -> Iterator[dict[str, Any]]:
    """All forms at each batch size and size of answers; ``rounds`` of each in turn; medians of seconds."""
    first: dict[str, Sequence[Sequence[int]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for batch in options.batches:
            groups = written_scenes(options, folder, batch)
            cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
            for _ in range(options.rounds):
                # One engine at a time; a second one has a drafter, which can be replaced.
                for forms in (("prompts",), ("decoded",), ("n-gram", "skipped")):
                    if chosen := [form for form in forms if form in options.forms]:
                        for key, run in in_process(options, folder, groups, batch, chosen):
                            cells[key].append(run)
            for group in groups:
                decoded = cells["decoded", group][0]["answers"] if "decoded" in options.forms else None
                first.setdefault(group, decoded or ())
                for form in options.forms:
                    runs = cells[form, group]
                    row = {"form": form, "objects": group, "batch": batch, **summary(runs)}
                    if decoded is not None and form != "prompts":
                        row |= {"equal": equal(runs[0]["answers"], decoded)}
                        row |= {"equal_first": equal(runs[0]["answers"], first[group])}
                    yield row


def in_process(*arguments: Any) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """Results of :func:`one_engine` in a new process: vLLM 0.32 starts no engine on a CPU after importing numba, which
    its n-gram proposer does."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        return pool.submit(_all_of, *arguments).result()


def _all_of(options: Any, *arguments: Any) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    # numba, which the n-gram proposer uses, sets the number of OpenMP threads of all later forward passes to its own.
    os.environ["NUMBA_NUM_THREADS"] = str(set_threads(options.threads))
    return list(one_engine(options, *arguments))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of one form's runs, whose answers are the same."""
    cpu_s, wall_s = (statistics.median(run[key] for run in runs) for key in ("cpu_s", "wall_s"))
    boxes, tokens, steps = runs[0]["boxes"], runs[0]["tokens"], runs[0]["steps"]
    passes = runs[0]["verified"] or tokens
    return {
        "answers": len(runs[0]["answers"]), "boxes": boxes, "tokens": tokens, "steps": steps,
        "passes_per_box": passes / max(1, boxes), "cpu_s": cpu_s, "wall_s": wall_s,
        "boxes_per_cpu_s": boxes / cpu_s, "tokens_per_cpu_s": tokens / cpu_s,
        "boxes_per_s": boxes / wall_s, "tokens_per_s": tokens / wall_s,
        "drafted": runs[0]["drafted"], "accepted": tokens - passes,
        "drafting": sum(run["draft_s"] for run in runs) / sum(run["cpu_s"] for run in runs),
    }  # fmt: skip


def measured_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("boxes per CPU s", "tokens per CPU s", "boxes/s", "accepted", "drafts", "equal", "to the first")
    table = Table("objects", "batch", "tokens", "steps", "passes per box", "CPU s", *headings)
    for one in measured:
        accepted = f"{one['accepted'] / one['drafted']:.0%} of {one['drafted']}" if one["drafted"] else ""
        cells = (
            f"{one['passes_per_box']:.1f}",
            f"{one['cpu_s']:.2f}",
            f"{one['boxes_per_cpu_s']:.2f}",
            f"{one['tokens_per_cpu_s']:.0f}",
            f"{one['boxes_per_s']:.2f}",
            accepted,
            f"{one['drafting']:.1%}",
            f"{one['equal']} of {one['answers']}" if "equal" in one else "",
            str(one.get("equal_first", "")),
        )
        table.add_row(one["objects"], str(one["batch"]), one["form"], str(one["steps"]), *cells)
    return table


def equal(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(a == b for a, b in zip(answers, expected, strict=False))


def written_scenes(options: Any, folder: Path, batch: int) -> dict[str, Path]:
    """Data sets by the objects of their images; with ``--objects`` whole batches, the same images in any batch size."""
    from wide_checkpoint import write_images

    from coordexp.data.scenes import SPECS, write_scenes

    if not options.objects:
        scenes = folder / "scenes" / "scenes.jsonl"
        return {"1-4": scenes if scenes.is_file() else write_scenes(scenes.parent, options.images, SPECS["sparse"], 7)}
    groups = {}
    for objects in options.objects:
        count = max(1, -(-options.boxes // (objects * batch))) * batch
        groups[str(objects)] = write_images(folder / f"{objects}-{batch}", {objects: count}, seed=7)
    return groups


def one_engine(
    options: Any, folder: Path, groups: Mapping[str, Path], batch: int, forms: Sequence[str]
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """One engine: all images of each group, ``batch`` at a time, in each of ``forms``."""
    from wide_checkpoint import PROMPT

    from coordexp.data.jsonl import read_jsonl
    from coordexp.modeling.inputs import PromptEncoder
    from coordexp.rollouts import SeedContext, rollout_session

    scenes = next(iter(groups.values()))
    drafts, tokens = "skipped" in forms or "n-gram" in forms, 1 if forms == ["prompts"] else 1600
    with started(options.model, folder, scenes, batch, drafts, options.dtype, tokens) as (backend, loaded):
        training = loaded.card.training
        encoder = PromptEncoder(loaded.processor, PROMPT if training is None else training.prompt, None)
        version = 0
        with rollout_session(backend, version):
            backend.generate([encoder.encode(next(iter(read_jsonl(scenes))))], SeedContext(0, 0, 0, 0))
        counts = Counts(backend.engine)
        ours = counts.runner.drafter if drafts else None
        for form in forms:
            if ours is not None:
                counts.runner.drafter = ours if form == "skipped" else NgramDrafter(counts.runner.vllm_config)
            for group, path in groups.items():
                requests = [encoder.encode(record) for record in read_jsonl(path)]
                if options.warm_up:
                    version += 1
                    timed_answers(backend, requests, version)
                version += 1
                counts.reset()
                rollouts, cpu, wall = timed_answers(backend, requests, version)
                yield (
                    (form, group),
                    {"cpu_s": cpu, "wall_s": wall, **counts.found, **answers_of(rollouts, loaded.vocab)},
                )


def timed_answers(backend: Any, requests: Sequence[Any], version: int) -> tuple[Sequence[Any], float, float]:
    """Answers of weights of a new ``version``, CPU seconds and seconds."""
    from coordexp.rollouts import SeedContext, rollout_session

    with rollout_session(backend, version):  # empties the cache of prompts
        cpu, wall = time.process_time(), time.perf_counter()
        rollouts = backend.generate(requests, SeedContext(0, 0, 0, 0))
        return rollouts, time.process_time() - cpu, time.perf_counter() - wall


def answers_of(rollouts: Sequence[Any], vocab: Any) -> dict[str, Any]:
    from coordexp.parsing import parse_rollout

    parsed = [parse_rollout(one.response_token_ids, vocab, ended=not one.truncated) for one in rollouts]
    return {
        "answers": [one.response_token_ids for one in rollouts],
        "tokens": sum(len(one.response_token_ids) + (not one.truncated) for one in rollouts),  # ends count too
        "boxes": sum(len(one.objects) for one in parsed),
    }


class NgramDrafter:
    """vLLM's own n-gram proposer, called as a custom one is."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        speculative = SimpleNamespace(**NGRAM, num_speculative_tokens=NGRAM_DRAFTED)
        names = ("model_config", "scheduler_config", "parallel_config")
        proxy = SimpleNamespace(speculative_config=speculative, **{name: getattr(vllm_config, name) for name in names})
        self._proposer: Any = NgramProposer(proxy)  # pyright: ignore[reportArgumentType]

    def propose(self, sampled: Any, lengths: Any, token_ids: Any, slot_mappings: Any = None) -> list[list[int]]:
        return self._proposer.propose(NGRAM_DRAFTED, sampled, lengths, token_ids)


class Counts:
    """Counts an engine's steps and drafts, in ``found``. ``verified``: steps times the answers that took part, of an
    engine with drafts; ``draft_s``: CPU seconds of the proposer."""

    def __init__(self, engine: Any) -> None:
        self.runner: Any = engine.ask_worker(lambda worker: worker.model_runner)
        self.reset()
        step, propose = engine.vllm.step, self.runner.propose_draft_token_ids

        def counted_step() -> Any:
            self.found["steps"] += 1
            return step()

        def counted(scheduled: Any, sampled: Any, *rest: Any) -> Any:
            drafts = scheduled.scheduled_spec_decode_tokens.values()
            self.found["drafted"] += sum(token >= 0 for draft in drafts for token in draft)
            self.found["verified"] += sum(len(tokens) > 0 for tokens in sampled)
            began = time.process_time()
            result = propose(scheduled, sampled, *rest)
            self.found["draft_s"] += time.process_time() - began
            return result

        engine.vllm.step, self.runner.propose_draft_token_ids = counted_step, counted

    def reset(self) -> None:
        self.found: dict[str, Any] = {"steps": 0, "drafted": 0, "verified": 0, "draft_s": 0.0}


@contextmanager
def started(
    model: Path,
    folder: Path,
    scenes: Path,
    batch: int,
    drafts: bool,
    dtype: str,
    tokens: int = 1600,
    sleep_level: int = 0,
) -> Iterator[tuple[Any, Any]]:
    from coordexp.config import load_config, resolved_rollout
    from coordexp.modeling.load import load_model
    from coordexp.rollouts import build_backend

    config = {
        "model": {"model": str(model), "dtype": dtype},
        "custom": {"train_jsonl": str(scenes)},
        "training": {"output_dir": str(folder / "run")},
        "global_max_length": 2000,
        "rollout_matching": {
            "rollout_backend": "vllm", "decode_batch_size": batch, "max_new_tokens": tokens,
            "decoding": {"skip_forced_tokens": drafts},
            "vllm": {"mode": "colocate", "tensor_parallel_size": 1, "engine_args": {"max_num_seqs": batch},
                     "max_model_len": 2000, "sleep_level": sleep_level},
        },
    }  # fmt: skip
    path = folder / f"{'skipped' if drafts else 'plain'}.yaml"  # of its own: several engines may start in one folder
    path.write_text(yaml.safe_dump(config))
    loaded = load_model(model, dtype)
    loaded.model.eval()
    backend = build_backend(resolved_rollout(load_config(path)), loaded.parts(checkpoint=model))
    try:
        yield backend, loaded
    finally:
        backend.close()


if __name__ == "__main__":
    main()
