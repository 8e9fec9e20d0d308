"""The cost of turning an answer into a training target, by the answer's length.

Parse, match and build on one thread, for crowded images and two tokenizers: the tiny model's and the real Qwen one
(which needs `dashscope` for its merges and pytest for the code that reads them, both part of `make setup`). Building
remembers how the text between coordinates is encoded: *build* is a later image of a run, *cold* the very first one.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reporting import (
    bar,
    growth,
    machine,
    median_seconds,
    parser,
    positive,
    positive_list,
    print_machine,
    set_threads,
    write_json,
)
from rich.console import Console
from rich.table import Table

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.matching import MatchingConfig, match_objects
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject
from coordexp.targets import build_target

SIZES = [10, 30, 60, 100, 200, 500]
STAGES = ("parse", "match", "build")
# Figures of the implementation that this method was first published with, from its own report: not run here, and from
# another machine. Milliseconds; boxes unless it says polygons.
PUBLISHED = [
    ("parse, 60 objects", "parse_ms", 60, 0.0, 31.0),
    ("match, 60 with 60 boxes", "match_ms", 60, 0.0, 14.0),
    ("match, 20 with 20 polygons of 20 vertices", "match_ms", 20, 1.0, 6.0),
]
_TESTS = Path(__file__).resolve().parent.parent / "tests"
_CLASSES = ("person", "traffic light", "red blood cell", "手提包", "car", "book")


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--objects", type=positive_list, default=SIZES, help="objects per answer [10,30,60,100,200,500]")
    flags.add_argument("--repeats", type=positive, default=9, help="timed calls per figure; the median counts [9]")
    flags.add_argument(
        "--no-published", dest="published", action="store_false", help="leave out the published figures' cases"
    )
    options = flags.parse_args(argv)
    console = Console()
    threads = set_threads(options.threads or 1)
    where = machine()
    print_machine(console, where, repeats=options.repeats, threads=threads, matching=MatchingConfig())
    results: dict[str, list[dict[str, Any]]] = {}
    for name, load in _tokenizers(console):
        vocab = load()
        results[name] = [measure(vocab, count, options.repeats) for count in options.objects]
        console.print(_table(name, results[name]))
        for line in _growth_lines(results[name]):
            console.print(line, highlight=False, style="dim")
        if options.published:
            results[f"{name}_published"] = compare_published(vocab, options.repeats)
            console.print(_published_table(name, results[f"{name}_published"]))
    write_json(options.json, "targets", where, {**vars(options), "threads": threads}, results)


def measure(
    vocab: CoordVocab, count: int, repeats: int, polygons: float = 0.2, vertices: int | None = None
) -> dict[str, float]:
    """Milliseconds of each stage for an answer of ``count`` objects and as many in the ground truth."""
    truth, answered = make_image(count, polygons, vertices)
    token_ids = vocab.encode(serialize_objects(answered))
    matching = MatchingConfig()
    parsed = parse_rollout(token_ids, vocab, ended=True)
    assert len(parsed.objects) == count, "the benchmark's own answer must parse whole"
    match = match_objects(parsed.objects, truth, matching)
    seconds = {
        "parse": median_seconds(lambda: parse_rollout(token_ids, vocab, ended=True), repeats),
        "match": median_seconds(lambda: match_objects(parsed.objects, truth, matching), repeats),
        "build": median_seconds(lambda: build_target(parsed, match, truth, vocab, sample_id="benchmark"), repeats),
    }
    started = time.perf_counter()
    build_target(parsed, match, truth, vocab_without_memory(vocab), sample_id="benchmark")
    cold = time.perf_counter() - started
    total = sum(seconds.values())
    return {
        "objects": count,
        "tokens": len(token_ids),
        "matched": len(match.pairs),
        **{f"{stage}_ms": 1000 * seconds[stage] for stage in STAGES},
        "cold_ms": 1000 * cold,
        "total_ms": 1000 * total,
        "samples_per_s": 1 / total,
        "parse_us_per_token": 1e6 * seconds["parse"] / len(token_ids),
    }


def vocab_without_memory(vocab: CoordVocab) -> CoordVocab:
    """``vocab`` as it is when a process starts, without reading the tokenizer again."""
    fresh = copy.copy(vocab)
    fresh._ids_of_part = {}
    return fresh


def compare_published(vocab: CoordVocab, repeats: int) -> list[dict[str, Any]]:
    """This implementation's figures for the cases of :data:`PUBLISHED`."""
    rows = []
    for what, figure, count, polygons, published_ms in PUBLISHED:
        ours = measure(vocab, count, repeats, polygons, vertices=20 if polygons else None)[figure]
        rows.append({"case": what, "ours_ms": ours, "published_ms": published_ms})
    return rows


def make_image(count: int, polygons: float = 0.2, vertices: int | None = None) -> tuple[list[GTObject], list[GTObject]]:
    """Ground truth and answer, the same every time: four of five answers are near an object, the rest are anywhere;
    ``polygons`` of the shapes are polygons of ``vertices`` (6 to 12) vertices."""
    rng = np.random.default_rng(count)

    def anywhere() -> GTObject:
        return _shape(rng, rng.integers(40, 960, 2), polygons, vertices)

    truth = [anywhere() for _ in range(count)]
    answered = [_nudged(rng, truth[i]) if rng.random() < 0.8 else anywhere() for i in range(count)]
    return truth, answered


def _shape(rng: np.random.Generator, centre: np.ndarray, polygons: float, vertices: int | None) -> GTObject:
    desc = str(rng.choice(_CLASSES))
    half = rng.integers(10, 40, 2)
    if rng.random() < polygons:
        angle = np.sort(rng.uniform(0, 2 * np.pi, vertices or int(rng.integers(6, 13))))
        ring = centre + half * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return GTObject(desc, "poly", _bins(ring))
    return GTObject(desc, "bbox_2d", _bins(np.concatenate([centre - half, centre + half])))


def _nudged(rng: np.random.Generator, obj: GTObject) -> GTObject:
    shift = np.tile(rng.integers(-5, 6, 2), len(obj.bins) // 2)
    return GTObject(obj.desc, obj.kind, _bins(np.array(obj.bins) + shift))


def _bins(values: np.ndarray) -> tuple[int, ...]:
    return tuple(np.clip(np.round(values).astype(int), 0, 999).reshape(-1).tolist())


def _tokenizers(console: Console) -> list[tuple[str, Callable[[], CoordVocab]]]:
    """Those that can be had here; says what is missing for the others."""
    found = [("tiny", _tiny_vocab)]
    missing = [name for name in ("dashscope", "pytest") if importlib.util.find_spec(name) is None]
    if not (_TESTS / "support" / "qwen_tokenizer.py").is_file():
        missing.append(str(_TESTS / "support" / "qwen_tokenizer.py"))
    if missing:
        console.print(
            f"Qwen tokenizer left out: {', '.join(missing)} missing; in the source tree run make setup, "
            "or pip install --no-deps dashscope and pip install pytest",
            highlight=False,
        )
        return found
    return [("qwen", _qwen_vocab), *found]


def _qwen_vocab() -> CoordVocab:
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    from support.qwen_tokenizer import qwen_vocab

    return qwen_vocab()


def _tiny_vocab() -> CoordVocab:
    from coordexp.modeling.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 10**9  # only text is measured here; no model reads it
    return CoordVocab.from_tokenizer(tokenizer)


def _table(name: str, rows: Sequence[dict[str, float]]) -> Table:
    table = Table(title=f"{name} tokenizer, milliseconds per sample (median)", title_justify="left")
    for column in ("objects", "tokens", *STAGES, "total", "cold", "samples/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("total")
    largest = max(row["total_ms"] for row in rows)
    for row in rows:
        table.add_row(
            f"{row['objects']}",
            f"{row['tokens']:,}",
            *(f"{row[f'{stage}_ms']:.2f}" for stage in STAGES),
            f"{row['total_ms']:.2f}",
            f"{row['total_ms'] - row['build_ms'] + row['cold_ms']:.2f}",
            f"{row['samples_per_s']:,.0f}",
            bar(row["total_ms"], largest),
        )
    return table


def _published_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{name} tokenizer, next to published figures from another machine", title_justify="left")
    table.add_column("case")
    table.add_column("ours here, ms", justify="right")
    table.add_column("published there, ms", justify="right")
    for row in rows:
        table.add_row(row["case"], f"{row['ours_ms']:.2f}", f"{row['published_ms']:.0f}")
    return table


def _growth_lines(rows: Sequence[dict[str, float]]) -> list[str]:
    sizes = [row["objects"] for row in rows]
    exponents = {stage: growth(sizes, [row[f"{stage}_ms"] for row in rows]) for stage in STAGES}
    lines = [f"  parse: {rows[-1]['parse_us_per_token']:.2f} µs per token at {rows[-1]['objects']} objects"]
    if len(sizes) > 1:
        lines.append("  time ~ objects^k: " + ", ".join(f"{stage} k = {k:.2f}" for stage, k in exponents.items()))
    return lines


if __name__ == "__main__":
    main()
