"""Writes the tables of one H100 or H200 in ``docs/gpu.md``, ``docs/training-step.md`` and both READMEs: measured
figures from the results of ``make gpu`` in ``benchmarks/results``, estimates from shapes, and traces of ``make
fake-gpu``; the text between them is written by hand.

python docs/generate_gpu.py            # write them
python docs/generate_gpu.py --check    # exit 1 if a table is not what would be written
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TARGETS = (DOCS / "gpu.md", DOCS / "training-step.md", ROOT / "README.md", ROOT / "benchmarks" / "README.md")
RESULTS = ROOT / "benchmarks" / "results"
# With which the names of result folders begin. By their data sheets both have the same arithmetic, which MFU is a share
# of; an H200 has more memory, and reads it faster.
HARDWARE = ("h100-80gb", "h200")
ON_PAPER = RESULTS / "cpu-2core-epyc-2026-11-25" / "decode_wide_batch_1.json"
TRACES = RESULTS / "trace-2026-11-27" / "steps.jsonl"  # by `make fake-gpu`
_TABLE = re.compile(r"(?<=<!-- table: )([a-z_ ]+)( -->\n).*?(?=<!-- end of table -->)", re.S)
# Row → part of make gpu, shipped file, size.
TRAINED = {
    "2B, all weights": ("sft", "stage1/sft.yaml", "2B"),
    "4B, all weights": (None, "stage1/sft.yaml", "4B"),
    "8B, all weights": (None, "stage1/sft.yaml", "8B"),
    "2B, LoRA": ("lora", "stage1/lora.yaml", "2B"),
    "4B, LoRA": ("lora_4b", "stage1/lora.yaml", "4B"),
    "8B, LoRA": ("lora_8b", "stage1/lora.yaml", "8B"),
}
# Rows of a traced step, in their order → parts of the trace.
TRACED = {
    "products, forward": ("products, forward",),
    "products, recomputed": ("products, recomputed",),
    "products, backward": ("products, backward",),
    "attention, forward": ("attention, forward",),
    "attention, recomputed": ("attention, recomputed",),
    "attention, backward": ("attention, backward",),
    "element-wise, forward": ("element-wise, forward",),
    "element-wise, recomputed": ("element-wise, recomputed",),
    "element-wise, backward": ("element-wise, backward",),
    "language head and losses": ("head, forward", "head, backward"),
    "copies on the GPU": ("copies, forward", "copies, recomputed", "copies, backward"),
    "copies from the host": ("from the host",),
    "clipping, optimizer, masters": ("optimizer",),
}
# Parts of a traced step, by first words, against kinds of kernels that the profiler measured.
AS_PROFILED = {
    "products, with the head": (("products", "head"), ("matrix products",)),
    "attention": (("attention",), ("attention",)),
    "element-wise, copies": (("element-wise", "copies"), ("element-wise", "fused layers", "reductions", "other")),
    "optimizer": (("optimizer",), ("optimizer",)),
    "from the host": (("from the host",), ("copies",)),
}
SPLIT = {
    "2B, all weights": "sft",
    "2B, LoRA": "lora",
    "8B, LoRA": "lora_8b",
    "stage 2, colocated, 300 tokens an answer": "rewritten_colocate",
    "stage 2, colocated, answers of ten boxes": "colocate_answers",
    "stage 2, transformers, 64 tokens an answer": "rewritten",
}
PARTS = ("reading", "push", "answers", "targets", "packing", "rows", "forward and backward", "optimizer")


def page(text: str) -> str:
    """``text`` with every table as the results have it. KeyError for a table that is not defined."""
    return _TABLE.sub(lambda match: f"{match[1]}{match[2]}" + "\n".join(TABLES[match[1]]()) + "\n", text)


def results(name: str) -> list[Path]:
    """Result files of that name, the newest last."""
    files = [file for hardware in HARDWARE for file in RESULTS.glob(f"{hardware}*/{name}")]
    return sorted(files, key=lambda file: file.parent.name[-10:])


@cache
def measured(part: str | None) -> Mapping[str, Any] | None:
    """The newest complete result of a part."""
    found = [json.loads(file.read_text(encoding="utf-8")) | {"file": file} for file in results(f"{part}.json")]
    complete = [one for one in found if one["complete"]]
    return complete[-1] if complete else None


def cell(result: Mapping[str, Any] | None, show: Callable[[Any], str]) -> str:
    return "–" if result is None else show(result["results"])


def training() -> Iterator[str]:
    yield "| | tokens/s | at most, by trace | images/s | MFU | of whole steps | peak memory, GB | estimated |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, (part, file, size) in TRAINED.items():
        found = measured(part)
        cells = [
            cell(found, lambda r: f"{r['tokens_per_s']:,.0f}"),
            f"{traced(file, size)['tokens_per_s']:,.0f}",
            cell(found, lambda r: f"{r['images_per_s']:.1f}"),
            cell(found, lambda r: f"{r['mfu']:.3f}"),
            cell(found, lambda r: f"{r['mfu_of_step']:.3f}"),
            cell(found, lambda r: f"{r['allocated_peak_gb']:.1f}"),
            f"{estimated_gb(file, size):.1f}",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


@cache
def traces() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TRACES.read_text(encoding="utf-8").splitlines()]


def traced(file: str, size: str, fused: bool = True, photos: bool = False) -> dict[str, Any]:
    """The step of a shipped file that `make fake-gpu` traced; ``photos``: the one like the measured profile."""
    (found,) = [
        one
        for one in traces()
        if (one["file"], one["size"], one["fused"], one["image"] == [768, 768]) == (file, size, fused, photos)
    ]
    return found


def steps() -> Iterator[str]:
    """Whole traced steps."""
    headings = ("recomputed", "rows", "kernels", "least ms", "tokens/s at most", "MFU at most", "with attention")
    yield f"| | {' | '.join(headings)} | peak GB | estimated |"
    yield "|---" * (len(headings) + 3) + "|"
    for name, (_, file, size) in TRAINED.items():
        one = traced(file, size)
        layers = {0: "no layer", 1: "all layers"}.get(
            one["checkpoint_every"], f"every {one['checkpoint_every']}. layer"
        )
        cells = [
            layers, str(one["rows"]), f"{one['kernels']:,}", f"{1e3 * one['least_s']:,.0f}",
            f"{one['tokens_per_s']:,.0f}", f"{one['mfu']:.3f}", f"{one['mfu_with_attention']:.3f}",
            f"{one['peak_gb']:.1f}", f"{one['estimate_gb']:.1f}",
        ]  # fmt: skip
        yield f"| {name} | {' | '.join(cells)} |"


def step_parts() -> Iterator[str]:
    """Parts of each traced step: kernels, GB, TFLOP, least milliseconds."""
    for name, (_, file, size) in TRAINED.items():
        one = traced(file, size)
        yield f"| {name}: a step of {one['tokens']:,} tokens | kernels | GB | TFLOP | least ms | share |"
        yield "|---" * 6 + "|"
        for row, parts in TRACED.items():
            kernels, moved, flops, seconds = (_sum(one, parts, key) for key in ("kernels", "bytes", "flops", "seconds"))
            yield (
                f"| {row} | {kernels:,.0f} | {moved / 1e9:,.1f} | {flops / 1e12:,.1f} | {1e3 * seconds:,.1f} | "
                f"{seconds / one['least_s']:.0%} |"
            )
        total = f"{one['kernels']:,} | {one['gb_moved']:,.1f} | {one['tflop']:,.1f} | {1e3 * one['least_s']:,.1f}"
        yield f"| all | {total} | |"
        waits = ", ".join(f"{place} {count}" for place, count in one["waits"].items() if count)
        yield f"| the host waits for the GPU | {sum(one['waits'].values())} times: {waits} | | | | |"
        yield ""


def _sum(one: Mapping[str, Any], parts: Sequence[str], key: str) -> float:
    return sum(one["parts"][part][key] for part in parts if part in one["parts"])


def step_measured() -> Iterator[str]:
    """The measured profile next to the trace of such a step."""
    yield "| 2B, all weights, 2 rows of photographs | kernels, traced | least ms, traced | ms, measured |"
    yield "|---|---|---|---|"
    one, found = traced("stage1/sft.yaml", "2B", photos=True), measured("profile")
    for row, (firsts, kinds) in AS_PROFILED.items():
        parts = [part for part in one["parts"] if part.startswith(firsts)]
        ms = cell(found, lambda r, k=kinds: f"{sum(r['kinds_ms'].get(kind, 0.0) for kind in k):.0f}")
        yield f"| {row} | {_sum(one, parts, 'kernels'):,.0f} | {1e3 * _sum(one, parts, 'seconds'):.0f} | {ms} |"
    ms, launches = (cell(found, show) for show in (lambda r: f"{r['device_ms']:.0f}", lambda r: f"{r['launches']:,}"))
    yield f"| all | {one['kernels']:,} (measured {launches}) | {1e3 * one['least_s']:.0f} | {ms} |"


def least_times() -> Iterator[str]:
    """In docs/training-step.md: peak and least time of a row."""
    yield "| a row of 12,000 tokens | 2B | 4B | 8B |"
    yield "|---|---|---|---|"
    for kind in ("all weights", "LoRA"):
        found = [traced(file, size) for name, (_, file, size) in TRAINED.items() if name.endswith(kind)]
        peaks, seconds = [f"{one['peak_gb']:.1f}" for one in found], [one["least_s"] / one["rows"] for one in found]
        yield f"| {kind}, peak memory (GB) | {' | '.join(peaks)} |"
        yield f"| {kind}, time (s) | {' | '.join(f'{each:.2f}' for each in seconds)} |"


@cache
def estimated_gb(file: str, size: str) -> float:
    """The estimate of ``coordexp config check`` for a shipped file and a checkpoint of that size."""
    sys.path.append(str(ROOT / "tests"))
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    from coordexp.checkpoints.memory import estimate_memory
    from coordexp.config import load_config
    from support.qwen_sizes import qwen3_vl_config

    config = qwen3_vl_config(size)
    with torch.device("meta"):
        model: Any = Qwen3VLForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    run = load_config(ROOT / "configs" / file, {"model.fused_kernels": True})
    return estimate_memory(run, config.to_dict(), shapes).total / 1e9


def parts() -> Iterator[str]:
    yield f"| seconds | {' | '.join(PARTS)} | a step | images |"
    yield "|---" * (len(PARTS) + 3) + "|"
    for name, part in SPLIT.items():
        found = measured(part)
        cells = [cell(found, lambda r, p=p: f"{r[f'{p}_s']:.2f}") for p in PARTS]
        cells += [cell(found, lambda r: f"{r['step_s']:.2f}"), cell(found, lambda r: f"{r['images']:.0f}")]
        yield f"| {name} | {' | '.join(cells)} |"


def decoding() -> Iterator[str]:
    rows = json.loads(ON_PAPER.read_text(encoding="utf-8"))["results"]
    of_ten = [row for row in rows if (row.get("objects"), row.get("names")) == (10, "different")]
    (tokens_per_box,) = [row["tokens_per_box"] for row in of_ten if row.get("tokenizer") == "Qwen"]
    paper = {row["batch"]: row for row in of_ten if "on_paper" in row}
    headings = (
        "answers at once",
        "tokens/s",
        "at most, on paper",
        "skipping",
        "at most, on paper",
        "boxes/s",
        "skipping",
    )
    yield f"| {' | '.join(headings)} | tokens a box | equal answers |"
    yield "|---" * (len(headings) + 2) + "|"
    plain, skipped = measured("engine_plain"), measured("engine_skipped")
    for batch in (1, 8, 64):
        key = f"batch_{batch}"
        cells = [
            cell(plain, lambda r, k=key: f"{r[k]['tokens_per_s']:,.0f}"),
            f"{tokens_per_box * paper[batch]['decoded_boxes_per_s']:,.0f}",
            cell(skipped, lambda r, k=key: f"{r[k]['tokens_per_s']:,.0f}"),
            f"{tokens_per_box * paper[batch]['skipped_boxes_per_s']:,.0f}",
            cell(plain, lambda r, k=key: f"{r[k]['boxes_per_s']:,.0f}"),
            cell(skipped, lambda r, k=key: f"{r[k]['boxes_per_s']:,.0f}"),
            cell(plain, lambda r, k=key: f"{r[k]['tokens'] / max(1, r[k]['boxes']):.1f}"),
            cell(skipped, lambda r, k=key: f"{r[k].get('equal_to_plain', '–')} of {r[k]['images']}"),
        ]
        yield f"| {batch} | {' | '.join(cells)} |"


def profile() -> Iterator[str]:
    yield "| kernels | ms | share |"
    yield "|---|---|---|"
    if (found := measured("profile")) is None:
        return
    r = found["results"]
    for kind, milliseconds in r["kinds_ms"].items():
        yield f"| {kind} | {milliseconds:.0f} | {milliseconds / r['device_ms']:.0%} |"
    step_ms = 1e3 * (r["accumulate_s"] + r["update_s"])
    yield f"| all, of a step of {step_ms:.0f} ms | {r['device_ms']:.0f} | |"
    yield f"| launches | {r['launches']:,} | |"


def engine() -> Iterator[str]:
    yield "| | measured |"
    yield "|---|---|"
    plain, again = measured("engine_plain"), measured("engine_start")
    for found, name in ((plain, "first start"), (again, "second start")):
        shown = cell(
            found, lambda r: f"{r['start_s']:.0f} s, " + ("compiled before" if r["cache_was_there"] else "compiling")
        )
        yield f"| {name} | {shown} |"
    for key, name in (
        ("full", "push of all weights"),
        ("full_with_checksums", "the same with checksums"),
        ("lora_merged", "push of adapters, merged"),
    ):

        def push(r: Any, key: str = key) -> str:
            return f"{r['push'][key]['push_s']:.3f} s for {r['push'][key]['bytes'] / 1e9:.1f} GB"

        yield f"| {name} | {cell(plain, push)} |"
    for key, name in (("sleep_s", "sleep"), ("wake_s", "wake")):

        def seconds(r: Any, key: str = key) -> str:
            return f"{r['push']['full'][key]:.2f} s, with adapters {r['push']['lora_merged'][key]:.2f} s"

        yield f"| {name} | {cell(plain, seconds)} |"


def sources() -> Iterator[str]:
    yield "| part | commit | date | GPU | torch, vLLM, liger-kernel | figures |"
    yield "|---|---|---|---|---|---|"
    yield from _tests()
    for part in (
        *dict.fromkeys([*SPLIT.values(), "lora_4b"]),
        "profile",
        "engine_plain",
        "engine_skipped",
        "engine_start",
    ):
        found = measured(part)
        if found is None:
            yield f'| `{part}` | not measured: `make gpu GPU_ARGS="--only {part}"` | | | | |'
            continue
        where = found["machine"]
        versions = ", ".join(str(where["packages"].get(name)) for name in ("torch", "vllm", "liger-kernel"))
        cells = (commit_of(found), where["date"][:10], where["gpu"], versions, link_to(found["file"], "../"))
        yield f"| `{part}` | {' | '.join(cells)} |"


def commit_of(result: Mapping[str, Any]) -> str:
    return (result["machine"].get("commit") or commit_of_all(result["file"].parent))[:8]


def link_to(file: Path, root: str = "") -> str:
    return f"[{file.name}]({root}{file.relative_to(ROOT).as_posix()})"


def origin(result: Mapping[str, Any]) -> str:
    """The GPU, when a result was measured, by which commit, and its file."""
    gpu = result["machine"]["gpu"].split()[1]  # of NVIDIA H100 80GB HBM3
    return f"{gpu}, {result['machine']['date'][:10]}, {commit_of(result)} | {link_to(result['file'])}"


def in_short() -> Iterator[str]:
    """The README's table: each measurement in a line."""
    yield "| one GPU | measured | estimated | GPU, date, commit | results |"
    yield "|---|---|---|---|---|"
    if (found := newest_summary()) is not None and (note := found["tests"]):
        yield f"| the tests for GPUs | {note.partition(' in ')[0]} | | {origin(found)} |"
    for name, (part, file, size) in TRAINED.items():
        if (found := measured(part)) is not None:
            r = found["results"]
            shown = (
                f"{r['tokens_per_s']:,.0f} tokens/s, {r['images_per_s']:.1f} images/s, {r['allocated_peak_gb']:.1f} GB"
            )
            yield f"| steps of {name} | {shown} | {estimated_gb(file, size):.1f} GB | {origin(found)} |"
    if (found := measured("rewritten_colocate")) is not None:
        r = found["results"]
        shown = f"{r['images_per_s']:.1f} images/s"
        yield f"| stage 2 of 2B, colocated, 300 tokens an answer | {shown} | | {origin(found)} |"
    for part, how in (("engine_plain", "token by token"), ("engine_skipped", "skipping forced tokens")):
        if (found := measured(part)) is not None:
            billions = found["results"]["push"]["full"]["bytes"] / 2e9
            rates = [found["results"][f"batch_{batch}"]["boxes_per_s"] for batch in (1, 64)]
            shown = f"{rates[0]:,.0f} boxes/s, 64 at once {rates[1]:,.0f}"
            yield f"| answers of {billions:.1f} B parameters, {how} | {shown} | | {origin(found)} |"
    if (found := measured("engine_plain")) is not None:
        pushed = found["results"]["push"]["full_with_checksums"]
        shown = f"{pushed['push_s']:.2f} s"
        yield f"| push of {pushed['bytes'] / 1e9:.1f} GB, with checksums | {shown} | | {origin(found)} |"


def _tests() -> Iterator[str]:
    """The results of tests/gpu in the newest summary."""
    if (found := newest_summary()) is not None and found["tests"]:
        where = found["machine"]
        yield f"| `tests` | {commit_of(found)} | {where['date'][:10]} | {where['gpu']} | | {found['tests']} |"


def newest_summary() -> dict[str, Any] | None:
    """The newest summary, its ``file``, and what it notes of the ``tests``."""
    for file in results("summary.json")[-1:]:
        summary = json.loads(file.read_text(encoding="utf-8"))
        notes = [row["note"] for row in summary["results"] if row["part"] == "tests"]
        return summary | {"file": file, "tests": notes[0] if notes else None}
    return None


def commit_of_all(folder: Path) -> str:
    """The commit of a folder's summary; a dash if it was not noted."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8"))["machine"].get("commit", "–") if file.is_file() else "–"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "training": training,
    "parts of a step": parts,
    "decoding": decoding,
    "profile": profile,
    "engine": engine,
    "sources": sources,
    "one gpu": in_short,
    "traced steps": steps,
    "parts of traced steps": step_parts,
    "a traced step as measured": step_measured,
    "least times": least_times,
}


def main() -> None:
    """Write the tables, or compare them with ``--check``."""
    for target in TARGETS:
        text = target.read_text(encoding="utf-8")
        wanted = page(text)
        if "--check" in sys.argv[1:]:
            if text != wanted:
                sys.exit(f"{target} is out of date; run: python docs/generate_gpu.py")
        else:
            target.write_text(wanted, encoding="utf-8")
            print(f"wrote the tables of {target}")


if __name__ == "__main__":
    main()
