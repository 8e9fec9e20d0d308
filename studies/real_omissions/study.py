"""Real omissions: annotators drew half of the cells; the judge is the boxes of others, who drew nearly all.

    python study.py start others [--work FOLDER]    # trains and exports starts/others; interrupted, it continues
    python study.py run [--start others] [--variants …] [--seeds 0] [--splits val test]
    python study.py whole [--start others] [--variants …]   # whole photographs, by --tiles of coordexp evaluate
    python study.py table [--start others] [--split test] [--against sft]

README.md declares what is compared, variants.yaml how it is trained. A finished (start, variant, seed, split) is one
line of results.jsonl with its answers in answers/, and is not run again. Both annotators' files are below --bccd and
--txl.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from photographs import MIN_VISIBLE, NAMES, TILE, joined, prepare, prepare_whole, with_views

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, ANSWERS, WHOLE = HERE / "results.jsonl", HERE / "answers", HERE / "whole.jsonl"
TILES = f"{TILE[0]}x{TILE[1]}"
METHODS = HERE.parent / "when_stage2_helps" / "configs"
DECODING = ["rollout_matching.max_new_tokens=256", "rollout_matching.decode_batch_size=64"]


def coordexp(*words: str | Path) -> str:
    """Run a command of CoordExp to its end; returns what it printed."""
    command = [sys.executable, "-m", "coordexp", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def children_cpu_s() -> float:
    """CPU seconds of all commands that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def dotted(keys: dict[str, Any]) -> list[str]:
    """Keys of variants.yaml as arguments of a command line."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def timed(folder: Path, *words: str | Path) -> float:
    """Run a command unless ``folder`` says that it was; returns its CPU seconds. (A start that was interrupted goes on,
    and only its last part counts; variants begin again.)"""
    done = folder / "cpu_seconds.json"
    if not done.exists():
        before = children_cpu_s()
        coordexp(*words)
        done.write_text(json.dumps(children_cpu_s() - before))
    return json.loads(done.read_text())


def train_start(name: str, data: dict[str, Path], work: Path) -> None:
    """Train a start and write it to starts/, in bfloat16."""
    start = declared()["starts"][name]
    folder = work / "starts" / name
    jsonl = data[start["data"]]
    seconds = timed(
        folder, "train", HERE / start["config"], f"model.model={ROOT / 'checkpoints' / 'demo-stage1'}",
        f"custom.train_jsonl={jsonl}", f"training.output_dir={folder}",
    )  # fmt: skip
    coordexp("model", "export", folder, HERE / "starts" / name, "--dtype", "bfloat16")
    print(f"{name}: {seconds:.0f} CPU s")


def declared() -> dict[str, Any]:
    return yaml.safe_load((HERE / "variants.yaml").read_text())


def train_variant(start: Path, name: str, seed: int, data: dict[str, Path], work: Path) -> tuple[Path, float]:
    """The model of a variant, and CPU seconds that it took after the start, completion included."""
    variant = declared()["variants"][name]
    if "config" not in variant:
        return start, 0.0
    runs = work / "runs" / start.name
    jsonl, seconds = data[variant["data"]], 0.0
    if "complete" in variant:
        words = [f"--{key}={value}" for key, value in variant["complete"].items()]
        folder = runs / "-".join(["completed", *words]).replace("--", "").replace("=", "-")
        folder.mkdir(parents=True, exist_ok=True)
        completed = folder / "completed.jsonl"
        seconds += timed(
            folder, "data", "complete", jsonl, "--model", start, "--out", completed, "--batch-size", "64",
            "--known-descs", "--overwrite", *words, "rollout_matching.max_new_tokens=256",
        )  # fmt: skip
        jsonl = completed
        if "tiles" in variant["complete"]:  # whole photographs were completed; train on tiles as the others do
            jsonl = folder / "tiles.jsonl"
            coordexp(
                "data", "tile", completed, "--size", TILES, "--overlap", "0", "--min-area-ratio", str(MIN_VISIBLE),
                "--negatives", "0", "--overwrite", "--out", jsonl,
            )  # fmt: skip
    folder = runs / f"{name}-seed-{seed}"
    seconds += timed(
        folder, "train", METHODS / f"{variant['config']}.yaml", f"model.model={start}", "model.dtype=float32",
        f"custom.train_jsonl={with_views(jsonl)}", f"training.output_dir={folder}", f"training.seed={seed}",
        f"training.max_steps={variant['steps']}", f"training.learning_rate={variant['lr']}",
        "training.overwrite_output_dir=true", "global_max_length=8192", *DECODING, *dotted(variant.get("set", {})),
    )  # fmt: skip
    return folder, seconds


def run(options: argparse.Namespace, data: dict[str, Path]) -> None:
    """Run what results.jsonl does not have."""
    start = HERE / "starts" / options.start
    if not start.is_dir():
        train_start(options.start, data, options.work)
    for seed in options.seeds:
        for name in options.variants or declared()["variants"]:
            for split in options.splits:
                known = [(r["start"], r["variant"], r["seed"], r["split"]) for r in rows()]
                if (options.start, name, seed, split) not in known:
                    row = run_one(start, name, seed, split, data, options.work)
                    with RESULTS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                    shown = ("variant", "seed", "split", "train_cpu_s", "answer_cpu_s", "wall_s", "f1", "f1_inside")
                    print(json.dumps({key: row[key] for key in shown}), flush=True)


def run_one(start: Path, name: str, seed: int, split: str, data: dict[str, Path], work: Path) -> dict[str, Any]:
    """Train and evaluate a variant; stores its answers, returns its row."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.evaluation.answers import read_answers
    from coordexp.geometry import aabb

    began = time.time()
    model, seconds = train_variant(start, name, seed, data, work)
    folder, before = work / "evaluations" / start.name / f"{name}-seed-{seed}-{split}", children_cpu_s()
    coordexp("evaluate", "--model", model, "--data", data[split], "--out", folder, "--overwrite", *DECODING)
    answer_s = children_cpu_s() - before
    records = read_jsonl(data[split])
    photographs = joined(read_answers(folder), records)
    number_of = {name: number for number, name in enumerate(NAMES)}
    file = ANSWERS / f"{start.name}-{name}-seed-{seed}-{split}.jsonl.gz"
    store(file, [
        {"photograph": one.sample_id, "truncated": one.truncated, "tokens": one.num_tokens,
         "pred": [[number_of.get(o.desc, o.desc), *aabb(o), round(o.score or 0.0, 4)] for o in one.pred]}
        for one in photographs
    ])  # fmt: skip
    truth = ANSWERS / f"truth-{split}.jsonl.gz"
    if not truth.exists():
        store(truth, [
            {"photograph": one.sample_id, "size": [one.width, one.height],
             "gt": [[number_of[o.desc], *o.bins] for o in one.gt or ()]}
            for one in photographs
        ])  # fmt: skip
    from tables import figures, stored

    found = figures(stored(split, file))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=ROOT)
    return {
        "start": start.name, "variant": name, "seed": seed, "split": split, "declared": declared()["variants"][name],
        "start_sha256": hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()[:16],
        "commit": commit.strip(), "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.0f}",
        "train_cpu_s": round(seconds, 1), "answer_cpu_s": round(answer_s, 1), "wall_s": round(time.time() - began),
        "answers": file.name, **{key: round(value, 4) for key, value in found.items()},
    }  # fmt: skip


def whole(options: argparse.Namespace, data: dict[str, Path]) -> None:
    """Answer the test split's photographs by tiles, merged, with and without overlap; trains variants that are not."""
    from rows import read_rows
    from tables import figures

    from coordexp.evaluation.answers import read_answers

    start = HERE / "starts" / options.start
    done = read_rows(WHOLE)
    known = {(row["start"], row["variant"], row["overlap"]) for row in done}
    for name in options.variants or ["start"]:
        for overlap in (0.0, 0.25):
            if (options.start, name, overlap) in known:
                continue
            model, _ = train_variant(start, name, 0, data, options.work)
            folder, before = options.work / "whole" / f"{start.name}-{name}-{overlap}", children_cpu_s()
            coordexp(
                "evaluate", "--model", model, "--data", data["test_whole"], "--tiles", TILES, "--overlap", str(overlap),
                "--out", folder, "--overwrite", *DECODING,
            )  # fmt: skip
            found = {key: round(value, 4) for key, value in figures(read_answers(folder)).items()}
            row = {"start": start.name, "variant": name, "overlap": overlap, "date": time.strftime("%Y-%m-%d %H:%M"),
                   "answer_cpu_s": round(children_cpu_s() - before, 1), **found}  # fmt: skip
            with WHOLE.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def store(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # equal answers give equal files


def rows() -> list[dict[str, Any]]:
    from rows import read_rows

    return read_rows(RESULTS)


def main() -> None:
    starts, variants = list(declared()["starts"]), list(declared()["variants"])
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start", help="train a start and write it to starts/")
    starting.add_argument("name", choices=starts)
    running = commands.add_parser("run", help="run what results.jsonl does not have")
    running.add_argument("--start", choices=starts, default="others")
    running.add_argument(
        "--variants", nargs="+", choices=variants, metavar="VARIANT", help="only these [all, as declared]"
    )
    running.add_argument("--seeds", type=int, nargs="+", default=[0])
    running.add_argument("--splits", nargs="+", choices=["val", "test"], default=["val", "test"])
    merged = commands.add_parser("whole", help="answer whole photographs by tiles")
    merged.add_argument("--start", choices=starts, default="others")
    merged.add_argument("--variants", nargs="+", choices=variants, metavar="VARIANT", help="[start]")
    for command in (starting, running, merged):
        command.add_argument("--work", type=Path, default=ROOT / "outputs" / "real_omissions")
        command.add_argument("--bccd", type=Path, default=ROOT / "data" / "bccd", help="folder of BCCD/Annotations")
        command.add_argument("--txl", type=Path, default=ROOT / "data" / "txl_pbc", help="folder of images and labels")
    showing = commands.add_parser("table", help="print figures with intervals, as Markdown")
    showing.add_argument("--start", choices=starts, default="others")
    showing.add_argument("--split", choices=["val", "test"], default="test")
    showing.add_argument(
        "--against",
        choices=variants,
        metavar="VARIANT",
        default="sft",
        help="the variant that differences are taken to [sft]",
    )
    showing.add_argument(
        "--full", choices=variants, metavar="VARIANT", default="full", help="the variant of full supervision [full]"
    )
    options = flags.parse_args()
    if options.command == "table":
        from tables import markdown

        shown = [row for row in rows() if (row["start"], row["split"]) == (options.start, options.split)]
        print(markdown(shown, options.against, options.full))
        return
    options.work = options.work.resolve()
    sources = options.bccd.resolve(), options.txl.resolve(), options.work / "data"
    data = {**prepare(*sources), **prepare_whole(*sources)}
    if options.command == "start":
        train_start(options.name, data, options.work)
    elif options.command == "whole":
        whole(options, data)
    else:
        run(options, data)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
