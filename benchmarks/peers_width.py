"""``peers.py --shape``: the peers on photographs, at the width, vocabulary and precision of a published Qwen3-VL.

A module for peers.py; running it does nothing. Weights are random: the cost of a step does not depend on them. All
variants train on the same images in each step, so losses of SFT must agree; the tokens of each sample, and which of
them are supervised, are compared before training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_checkpoint import write_checkpoint
from reporting import machine, positive, print_machine, write_json
from rich.console import Console
from rich.table import Table

PROMPT = "Detect every object."
VARIANT = Path(__file__).with_name("peers_variant.py")
SOURCES = Path(__file__).parents[1] / "src"


@dataclass(frozen=True)
class Variant:
    """``one_by_one``: micro-steps of one sample, so nothing is padded; else all images of a step at once. ``group``:
    answers per prompt."""

    family: str
    kind: str  # sft; own: training on the model's own answers
    what: str
    one_by_one: bool = False
    masters: bool = False
    tuners: tuple[str, ...] = ("lora", "full")
    group: int = 1


# ms-swift's packing and padding-free need flash attention, so a GPU; TRL 1.16 refuses both for images. Batches of one
# are their only form without padding here, and cost as many operations as packing does.
VARIANTS = {
    "coordexp-sft": Variant("coordexp", "sft", "CoordExp, one packed row"),
    "coordexp-sft-masters": Variant("coordexp", "sft", "… with float32 masters", masters=True, tuners=("full",)),
    "coordexp-sft-one": Variant("coordexp", "sft", "CoordExp, a row per sample", one_by_one=True),
    "trl-sft": Variant("trl", "sft", "TRL, padded batch"),
    "trl-sft-one": Variant("trl", "sft", "TRL, batches of one", one_by_one=True),
    "swift-sft": Variant("swift", "sft", "ms-swift, padded batch"),
    "swift-sft-one": Variant("swift", "sft", "ms-swift, batches of one", one_by_one=True),
    "coordexp-stage2": Variant("coordexp", "own", "CoordExp stage 2, one answer"),
    "coordexp-stage2-one": Variant("coordexp", "own", "CoordExp stage 2, a row per sample", one_by_one=True),
    "trl-grpo-2": Variant("trl", "own", "TRL GRPO, 2 answers", group=2),
    "trl-grpo-2-one": Variant("trl", "own", "TRL GRPO, 2 answers, one by one", one_by_one=True, group=2),
    "trl-grpo-4": Variant("trl", "own", "TRL GRPO, 4 answers", group=4),
    "swift-grpo-2": Variant("swift", "own", "ms-swift GRPO, 2 answers", group=2),
    "swift-grpo-2-one": Variant("swift", "own", "ms-swift GRPO, 2 answers, one by one", one_by_one=True, group=2),
    "swift-grpo-4": Variant("swift", "own", "ms-swift GRPO, 4 answers", group=4),
}


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Flags of ``--shape``."""
    group = flags.add_argument_group("at real width")
    group.add_argument("--shape", choices=("2B", "4B", "8B"), help="width, vocabulary and precision of this Qwen3-VL")
    add = group.add_argument
    add("--layers", type=positive, default=4, help="of its language model [4]; vision tower in proportion")
    add("--photos", type=Path, metavar="DATA.jsonl", help="annotated photographs, by `coordexp data convert`")
    add("--max-objects", type=positive, help="of a chosen photograph, for short answers [any number]")
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="these alone [all]")
    add("--tuners", nargs="+", choices=("lora", "full"), default=["lora", "full"], help="[lora full]")
    add("--rounds", type=positive, default=2, help="of all variants, in alternating order [2]")
    add("--answer-tokens", type=positive, help="tokens of every generated answer [mean of the annotated ones]")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and products [bfloat16]")
    add("--at-once", type=positive, default=1, help="variants at a time; CPU seconds are each process's own [1]")
    add("--trl-python", default=sys.executable, help="Python of an environment with a newer TRL [this one]")


def compare(options: argparse.Namespace) -> None:
    """Run the chosen variants, in the opposite order in every second round; print and write the figures."""
    console, where, threads = Console(), machine(), options.threads or 1
    runs = [(name, tuner) for tuner in options.tuners for name in options.variants if tuner in VARIANTS[name].tuners]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="coordexp-peers-") as name:
        folder = Path(name)
        write_checkpoint(folder / "checkpoint", options.shape, options.layers, coord_tokens=True)
        work = write_samples(folder, options.photos, options.images, options.answer_tokens, options.max_objects)
        settings = {**vars(options), "threads": threads, "work": work["shown"]}
        print_machine(console, where, shape=options.shape, layers=options.layers, **work["shown"])
        with ThreadPoolExecutor(options.at_once, "variant") as pool:
            for number in range(options.rounds):
                order = runs if number % 2 == 0 else runs[::-1]
                waiting = {pool.submit(measure, *run, folder, work, options, threads): run for run in order}
                for done in as_completed(waiting):
                    (name, tuner), found = waiting[done], done.result()
                    row = results.setdefault(f"{name} {tuner}", {"what": VARIANTS[name].what, "rounds": []})
                    row["rounds"].append(found)
                    shown = found.get("why") or f"{found['cpu_s']:.1f} CPU s an image, {found['peak_gb']:.1f} GB"
                    line = f"round {number + 1}, {name} {tuner}: {shown}, load {os.getloadavg()[0]:.1f}"
                    console.print(line, style="dim", highlight=False, markup=False)
                    write_json(options.json, "peers_width", where, settings, results, complete=False)
    summarise(results)
    for title, tuner, kind in ((f"{t}, {k}", t, k) for t in options.tuners for k in ("sft", "own")):
        rows = {name: row for name, row in results.items() if is_of(name, tuner, kind)}
        if rows:
            console.print(table(title, rows))
    write_json(options.json, "peers_width", where, settings, results)


def is_of(name: str, tuner: str, kind: str) -> bool:
    variant, _, tuned = name.partition(" ")
    return tuned == tuner and VARIANTS[variant].kind == kind


def write_samples(
    folder: Path, photos: Path, count: int, answer_tokens: int | None = None, max_objects: int | None = None
) -> dict[str, Any]:
    """``count`` photographs as CoordExp's JSONL and as conversations; the tokens that every variant must train on.
    ``answer_tokens``: of every generated answer, instead of the annotated ones' mean."""
    from transformers import AutoProcessor

    from coordexp.coords import serialize_objects
    from coordexp.data.jsonl import order_objects, read_jsonl, write_jsonl
    from coordexp.modeling.inputs import PromptEncoder

    processor: Any = AutoProcessor.from_pretrained(folder / "checkpoint")
    # The target of all variants ends with the end of turn; TRL's would have the template's line break after it.
    after_turn = "{%- if not loop.last or add_generation_prompt %}{{- '\\n' }}{%- endif %}"
    template = processor.chat_template.replace("{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>' }}" + after_turn)
    processor.chat_template = processor.tokenizer.chat_template = template
    processor.save_pretrained(folder / "checkpoint")
    encoder = PromptEncoder(processor, PROMPT, None)
    found = [one for one in read_jsonl(photos) if max_objects is None or len(one.objects) <= max_objects]
    if len(found) < count:
        raise SystemExit(f"{photos}: {len(found)} images that can be chosen, --images {count} needs more")
    chosen = random.Random(0).sample(found, count)
    write_jsonl(chosen, folder / "photos.jsonl")
    sequences, answers = [], []
    with (folder / "conversations.jsonl").open("w") as theirs:
        for record in chosen:
            answer = serialize_objects(order_objects(record.objects, "sorted"))
            ids = [*processor.tokenizer.encode(answer), processor.tokenizer.convert_tokens_to_ids("<|im_end|>")]
            sequences.append(([*encoder.encode(record).prompt_token_ids, *ids], len(ids)))
            answers.append(len(ids))
            user = {"role": "user", "content": f"<image>{PROMPT}"}
            messages = [user, {"role": "assistant", "content": answer}]
            theirs.write(json.dumps({"messages": messages, "images": [str(record.image)]}) + "\n")
    lengths = [len(ids) for ids, _ in sequences]
    answer_tokens = answer_tokens or round(statistics.mean(answers))
    return {
        "sequences": sequences,
        "answer_tokens": answer_tokens,
        "shown": {
            "images": count, "tokens": sum(lengths), "padded tokens": max(lengths) * count,
            "supervised": sum(answers), "generated per answer": answer_tokens,
        },
    }  # fmt: skip


def specification(
    name: str, tuner: str, folder: Path, work: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """All that a variant's process gets, see peers_variant.py."""
    variant = VARIANTS[name]
    group = variant.group
    # A group's answers are further micro-steps of the same size, not a larger batch.
    batch, accumulation = (1, options.images * group) if variant.one_by_one else (options.images, group)
    return {
        "name": name, "family": variant.family, "kind": variant.kind, "tuner": tuner, "masters": variant.masters,
        "checkpoint": str(folder / "checkpoint"), "data": str(folder / "photos.jsonl"),
        "conversations": str(folder / "conversations.jsonl"), "prompt": PROMPT, "dtype": options.dtype, "batch": batch,
        "accumulation": accumulation, "group": group, "warmup": options.warmup, "steps": options.steps,
        "answer_tokens": work["answer_tokens"], "sequences": work["sequences"],
        "output": str(folder / f"{name}-{tuner}"), "result": str(folder / f"{name}-{tuner}.result.json"),
    }  # fmt: skip


def measure(
    name: str, tuner: str, folder: Path, work: dict[str, Any], options: argparse.Namespace, threads: int
) -> dict[str, Any]:
    """One process: CPU seconds of an image, peak memory and losses, or why there are none."""
    spec = specification(name, tuner, folder, work, options)
    path, log = folder / f"{name}-{tuner}.json", folder / f"{name}-{tuner}.log"
    path.write_text(json.dumps(spec))
    Path(spec["result"]).unlink(missing_ok=True)
    python = options.trl_python if spec["family"] == "trl" else sys.executable
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SOURCES),  # tools/cpu_wheels.py reads it in TRL's environment too
    }  # fmt: skip
    try:
        with log.open("w") as output:
            ended = subprocess.run(
                [str(python), str(VARIANT), str(path)],
                stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=options.deadline, cwd=folder,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"why": f"not done after {options.deadline} s"}
    if ended.returncode:
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"why": f"ended with {ended.returncode}: {tail[-1][-400:] if tail else 'no output'}"}
    found = json.loads(Path(spec["result"]).read_text())
    if set(found["answer_tokens"]) - {spec["answer_tokens"]}:
        return {"why": f"answers of {found['answer_tokens']} tokens, not {spec['answer_tokens']}"}
    marks = found.pop("marks")
    first, last = marks[options.warmup], marks[options.warmup + options.steps]
    images = options.images * options.steps
    generating = found.pop("generate_s")[options.warmup : options.warmup + options.steps]
    if generating:
        found["generate_cpu_s"] = sum(generating) / images
    return {"wall_s": (last[0] - first[0]) / images, "cpu_s": (last[1] - first[1]) / images, **found}


def summarise(results: dict[str, Any]) -> None:
    """Add medians over rounds, and ratios to CoordExp's own variant of the same kind and tuner."""
    for row in results.values():
        done = [one for one in row["rounds"] if "why" not in one]
        if done:
            row["cpu_s"] = statistics.median(one["cpu_s"] for one in done)
            row["peak_gb"] = statistics.median(one["peak_gb"] for one in done)
            if "generate_cpu_s" in done[0]:
                row["generate_cpu_s"] = statistics.median(one["generate_cpu_s"] for one in done)
    for name, row in results.items():
        variant, _, tuner = name.partition(" ")
        base = results.get(f"coordexp-{'sft' if VARIANTS[variant].kind == 'sft' else 'stage2'} {tuner}", {})
        if "cpu_s" in row and "cpu_s" in base:
            row["cpu_ratio"] = row["cpu_s"] / base["cpu_s"]
            row["memory_ratio"] = row["peak_gb"] / base["peak_gb"]


def table(title: str, rows: dict[str, Any]) -> Table:
    """One row a variant: medians, ratios, the first round's losses; or why it has none."""
    columns = ("variant", "CPU s/image", "ratio", "rounds", "generation", "peak GB", "ratio", "losses", "answer")
    shown = Table(*columns, title=title)
    for row in rows.values():
        done = [one for one in row["rounds"] if "why" not in one]
        if not done:
            shown.add_row(row["what"], "-", "-", row["rounds"][0]["why"])
            continue
        shown.add_row(
            row["what"],
            f"{row['cpu_s']:.2f}",
            f"{row['cpu_ratio']:.2f}" if "cpu_ratio" in row else "-",
            " ".join(f"{one['cpu_s']:.2f}" for one in done),
            f"{row['generate_cpu_s']:.2f}" if "generate_cpu_s" in row else "-",
            f"{row['peak_gb']:.2f}",
            f"{row['memory_ratio']:.2f}" if "memory_ratio" in row else "-",
            " ".join(f"{loss:.4f}" for loss in done[0]["losses"]),
            " ".join(f"{length:.0f}" for length in done[0]["answer_tokens"]) or "-",
        )
    return shown
