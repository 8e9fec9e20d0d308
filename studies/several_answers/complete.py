"""Does the majority of several answers complete annotations better than one answer, at equal cost of decoding?

    cd studies/several_answers
    python complete.py run incomplete few --work ../../outputs/several_answers     # what results/ lacks of study.yaml
    python complete.py table                                                       # Markdown

Every finished piece is one line of ``results/<regime>.jsonl`` and is not run again. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGE_2 = HERE.parent / "when_stage2_helps"
SCENE_SEEDS = {"train": 31, "val": 32, "test": 33}  # those of ../when_stage2_helps
DROP_SEED = 0  # the annotations that the starts were trained on
IOU = 0.5
ARMS = ("one", "three", "three-third", "one-wide", "one-long", "three-only")
EQUAL_DECODING = (("three-third", "one"), ("three-only", "one"), ("three", "one-wide"), ("three", "one-long"))


def declared_regimes() -> list[str]:
    return list(yaml.safe_load((HERE / "study.yaml").read_text())["regimes"])


class Cell:
    """A regime in the folder of its data, models and answers."""

    def __init__(self, regime: str, work: Path) -> None:
        self.declared = yaml.safe_load((HERE / "study.yaml").read_text())
        self.name, self.keys = regime, self.declared["regimes"][regime]
        self.images = {**self.declared["images"], **self.keys.get("images", {})}
        self.training = self.with_keys(self.declared["training"])
        self.folder = work / regime
        self.results = HERE / "results" / f"{regime}.jsonl"

    def with_keys(self, training: dict[str, Any]) -> dict[str, Any]:
        """Rules of a training with the keys that the regime sets."""
        return {**training, "set": {**training.get("set", {}), **self.keys.get("set", {})}}

    def known(self, kind: str) -> list[dict[str, Any]]:
        from rows import read_rows

        return [line for line in read_rows(self.results) if line["kind"] == kind]

    def note(self, **line: Any) -> None:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        with self.results.open("a") as file:
            file.write(json.dumps({**line, "date": time.strftime("%Y-%m-%d"), "machine": machine}) + "\n")
        shown = {key: value for key, value in line.items() if key != "counts"}
        print(time.strftime("%H:%M:%S"), self.name, shown, flush=True)

    def scenes(self, split: str, first: int, count: int) -> tuple[Path, Path]:
        """Scenes of a split: their complete annotations, and what the regime keeps of them."""
        from coordexp.data.jsonl import read_jsonl, write_jsonl
        from coordexp.data.scenes import SPECS, write_scenes
        from coordexp.data.subset import DropRates, drop_annotations

        drawn = self.folder / f"{split}-{first + count}"
        whole, part = drawn / f"whole-{first}.jsonl", drawn / f"incomplete-{first}.jsonl"
        if not part.is_file():
            path = write_scenes(drawn, first + count, SPECS[self.keys["spec"]], SCENE_SEEDS[split])
            records = read_jsonl(path)[first:]
            write_jsonl(records, whole)
            write_jsonl(drop_annotations(records, DropRates(self.keys["keep"]), DROP_SEED)[0], part)
        return whole, part

    def start(self) -> Path:
        """The checkpoint that all arms start from. It is trained once unless it is in the repository."""
        from study import train

        rules = self.keys["start"]
        if isinstance(rules, str):
            return ROOT / rules
        data = self.scenes("train", 0, rules["images"])[1]
        output = self.folder / "start"
        train("sft", data, ROOT / "checkpoints" / "demo-stage1", output, 0, self.with_keys(rules))
        return output


def complete(
    cell: Cell, model: Path, data: Path, output: Path, answers: int, rules: dict[str, Any]
) -> tuple[float, int]:
    """Answer and complete, or complete only if answers are there. Returns: CPU seconds, decoded tokens."""
    from stopping import stop_threshold

    from coordexp.cli import main
    from coordexp.evaluation.answers import read_answers

    words = ["data", "complete", str(data), "--model", str(model), "--out", str(output), "--overwrite",
             "--threshold", str(rules["threshold"]), "--weight", str(cell.declared["weight"]),
             "--answers", str(answers), "--batch-size", "64",
             f"rollout_matching.max_new_tokens={cell.keys['max_new_tokens']}"]  # fmt: skip
    if rules["stop"] is not None:  # drafting uses no logits processor of generate
        words.append("rollout_matching.decoding.skip_forced_tokens=false")
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    with stop_threshold(model, rules["stop"]):
        try:
            main(words)
        except SystemExit as ended:
            if ended.code:
                raise
    seconds = time.process_time() - started
    tokens = sum(answer.num_tokens for answer in read_answers(output.with_name(f"{output.stem}.answers")))
    return seconds, tokens


def quality(whole: Path, completed: Path) -> dict[str, int]:
    """Objects of a completed dataset: annotated, hidden, added, and added that are hidden ones."""
    from coordexp.data.jsonl import read_jsonl
    from coordexp.evaluation.answers import ScoredObject
    from coordexp.evaluation.detection import assigner

    totals = {"annotated": 0, "hidden": 0, "added": 0, "correct": 0}
    for truth, record in zip(read_jsonl(whole), read_jsonl(completed), strict=True):
        kept = [obj for obj in record.objects if obj.soft is None]
        added = [ScoredObject(obj.desc, obj.kind, obj.bins) for obj in record.objects if obj.soft is not None]
        hidden = [obj for obj in truth.objects if obj not in kept]
        totals["annotated"] += len(kept)
        totals["hidden"] += len(hidden)
        totals["added"] += len(added)
        totals["correct"] += len(assigner(added, hidden, IOU)(True))
    return totals


def rates(totals: dict[str, int]) -> dict[str, float]:
    """Precision and recall of added objects, and F1 of the completed annotations."""
    annotated, correct = totals["annotated"], totals["correct"]
    return {
        "precision": correct / max(1, totals["added"]),
        "recall": correct / max(1, totals["hidden"]),
        "f1": 2 * (annotated + correct) / (2 * annotated + totals["added"] + totals["hidden"]),
    }


def show_grid(cell: Cell) -> None:
    """Note the quality of completed validation scenes, for every pair of the grid."""
    grid = cell.declared["grid"]
    model, (whole, part) = cell.start(), cell.scenes("val", 0, cell.images["val"])
    for answers in (1, cell.declared["answers"]):
        for stop in grid["stop"]:
            for threshold in grid["threshold"]:
                rules = {"answers": answers, "threshold": threshold, "stop": stop}
                same = [one for one in cell.known("grid") if (one["answers"], one["stop"]) == (answers, stop)]
                if any(one["threshold"] == threshold for one in same):
                    continue
                output = cell.folder / "tuning" / f"{answers}-stop-{stop}.jsonl"
                seconds, tokens = complete(cell, model, part, output, answers, rules)
                seconds = same[0]["cpu_s"] if same else round(seconds, 1)  # later thresholds reuse the answers
                cell.note(kind="grid", **rules, cpu_s=seconds, tokens=tokens, **quality(whole, output))


def completed(
    cell: Cell, name: str, block: int, answers: int, threshold: float, images: int | None = None
) -> tuple[Path, float, int]:
    """A block of training scenes, or only its first ``images``, completed by the start. Returns: the JSONL, CPU seconds
    and tokens of its answers. Block s is the one of seed s."""
    count = cell.images["train"]
    whole, part = cell.scenes("train", block * count, count if images is None else images)
    output = cell.folder / f"seed-{block}" / f"{name}.jsonl"
    copy = output.with_name(f"{name}-{threshold}.jsonl")
    same = [one for one in cell.known("completion") if (one["name"], one["seed"]) == (name, block)]
    noted = [one for one in same if one["threshold"] == threshold]
    if noted and copy.is_file():
        return copy, noted[0]["cpu_s"], noted[0]["tokens"]
    rules = {"threshold": threshold, "stop": cell.declared["stop"]}
    seconds, tokens = complete(cell, cell.start(), part, output, answers, rules)
    shutil.copy(output, copy)
    seconds = same[0]["cpu_s"] if same else round(seconds, 1)  # later thresholds reuse the answers
    if not noted:
        cell.note(kind="completion", name=name, seed=block, threshold=threshold, cpu_s=seconds, tokens=tokens,
                  **quality(whole, copy))  # fmt: skip
    return copy, seconds, tokens


def arm_data(cell: Cell, arm: str, seed: int, threshold: float) -> tuple[Path, float, int]:
    """Complete the data of an arm. Returns: the JSONL, CPU seconds and tokens of the answers that completed it."""
    from coordexp.data.jsonl import read_jsonl, write_jsonl

    answers, count = cell.declared["answers"], cell.images["train"]
    if arm in ("one", "one-long", "three"):
        return completed(cell, *(("three", seed, answers) if arm == "three" else ("one", seed, 1)), threshold)
    if arm == "one-wide":
        parts = [completed(cell, "one", seed + number, 1, threshold) for number in range(answers)]
        others = []
    else:
        parts = [completed(cell, "three-third", seed, answers, threshold, count // answers)]
        others = read_jsonl(cell.scenes("train", seed * count, count)[1])[count // answers :]
    if arm == "three-only":
        return parts[0]
    data = cell.folder / f"seed-{seed}" / f"{arm}-{threshold}-data.jsonl"
    write_jsonl([record for path, _, _ in parts for record in read_jsonl(path)] + others, data)
    return data, sum(seconds for _, seconds, _ in parts), sum(tokens for _, _, tokens in parts)


def tune(cell: Cell) -> None:
    """Train with each threshold, and note its F1 on validation scenes."""
    from study import counts, evaluate, train
    from tables import figures

    test = cell.scenes("val", 0, cell.images["val"])[0]
    for arm in ("one", "three"):
        for threshold in cell.declared["trained_thresholds"]:
            if any((one["arm"], one["threshold"]) == (arm, threshold) for one in cell.known("trial")):
                continue
            data = arm_data(cell, arm, 0, threshold)[0]
            model = cell.folder / "seed-0" / f"model-{arm}-{threshold}"
            train("sft", data, cell.start(), model, 0, cell.training)
            found = counts(evaluate(model, test, arm, None, {})[0])["as_answered"]
            cell.note(kind="trial", arm=arm, threshold=threshold, f1=round(figures([found])["F1@.5"], 4), counts=found)


def chosen_thresholds(cell: Cell) -> dict[str, float]:
    chosen = {}
    for arm in ("one", "three"):
        trials = [one for one in cell.known("trial") if one["arm"] == arm]
        chosen[arm] = max(trials, key=lambda one: one["f1"])["threshold"]
    return chosen


def run_arm(cell: Cell, arm: str, seed: int, chosen: dict[str, float]) -> None:
    """Complete, train and evaluate an arm."""
    from study import train

    threshold = chosen["three" if arm.startswith("three") else "one"]
    data, decode_s, tokens = arm_data(cell, arm, seed, threshold)
    runs = cell.folder / f"seed-{seed}"
    start, model, train_s = cell.start(), runs / f"model-{arm}-{threshold}", 0.0
    if arm == "one-long":
        start = runs / f"model-one-{threshold}"
        train_s = json.loads((start / "cpu_seconds.json").read_text())
    train_s += train("sft", data, start, model, seed, cell.training)
    cell.note(kind="arm", arm=arm, seed=seed, threshold=threshold, decode_cpu_s=round(decode_s, 1), tokens=tokens,
              train_cpu_s=round(train_s, 1), **tested(cell, model, arm))  # fmt: skip


def tested(cell: Cell, model: Path, name: str) -> dict[str, Any]:
    """Average precision and counts per image of the test split."""
    from study import counts, evaluate

    scenes = cell.scenes("test", 0, cell.images["test"])[0]
    keys = {"rollout_matching.max_new_tokens": cell.keys["max_new_tokens"]}
    found, precision, _ = evaluate(model, scenes, name, None, keys)
    return {**precision, "counts": counts(found)["as_answered"]}


def evaluate_start(cell: Cell) -> None:
    folder = cell.folder / "start-evaluated"  # evaluations are written to the model's folder
    folder.mkdir(exist_ok=True)
    for file in cell.start().iterdir():
        if file.is_file() and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    cell.note(kind="arm", arm="start", seed=0, decode_cpu_s=0.0, tokens=0, train_cpu_s=0.0,
              **tested(cell, folder, "start"))  # fmt: skip


def run(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    (HERE / "results").mkdir(exist_ok=True)
    for seed in options.seeds:
        for regime in options.regimes:
            cell = Cell(regime, options.work.resolve())
            cell.folder.mkdir(parents=True, exist_ok=True)
            # Imports are not a cost of the first completion.
            complete(cell, ROOT / "checkpoints" / "demo-stage1", cell.scenes("val", 0, 2)[1],
                     cell.folder / "imports.jsonl", 1, {"threshold": 0.5, "stop": None})  # fmt: skip
            other = cell.keys.get("thresholds_of")
            if other is None:
                show_grid(cell)
                tune(cell)
            chosen = chosen_thresholds(cell if other is None else Cell(other, options.work.resolve()))
            print(regime, "chosen:", chosen, flush=True)
            done = {(line["arm"], line["seed"]) for line in cell.known("arm")}
            for arm in options.arms:
                if (arm, seed) not in done:
                    run_arm(cell, arm, seed, chosen)
            for arm in ("one", "three"):  # from the same answers, to compare both at equal precision
                for threshold in cell.declared["grid"]["threshold"] if arm in options.arms else ():
                    arm_data(cell, arm, seed, threshold)
            if ("start", 0) not in done:
                evaluate_start(cell)


def table(options: argparse.Namespace) -> None:
    for regime in sorted(declared_regimes()):
        cell = Cell(regime, Path())
        print(f"\n{cell.name}: completion of validation scenes\n")
        print_rows(
            ["answers", "stop", "threshold", "added", "precision", "recall", "F1 of annotations", "tokens", "CPU s"],
            [
                [str(o["answers"]), str(o["stop"]), str(o["threshold"]), str(o["added"]),
                 *(f"{value:.3f}" for value in rates(o).values()), str(o["tokens"]), f"{o['cpu_s']:.0f}"]
                for o in cell.known("grid")
            ],
        )  # fmt: skip
        print(f"\n{cell.name}: completions of training scenes\n")
        print_rows(*completion_rows(cell))
        if cell.known("arm"):
            print(f"\n{cell.name}: variants\n")
            print_rows(*arm_rows(cell, options.against))
            print(f"\n{cell.name}: equal decoding\n")
            print_rows(*equal_rows(cell))


def completion_rows(cell: Cell) -> tuple[list[str], list[list[str]]]:
    by_name: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in cell.known("completion"):
        if line["seed"] not in cell.declared["seeds"]:
            continue  # further blocks of `one-wide`
        by_name[f"{line['name']}, {line['threshold']}"].append(line)
    rows = []
    for name, lines in sorted(by_name.items()):
        keys = ("annotated", "hidden", "added", "correct", "tokens")
        totals = {key: sum(line[key] for line in lines) for key in keys}
        per_seed = " ".join(f"{rates(line)['f1']:.3f}" for line in sorted(lines, key=lambda line: line["seed"]))
        rows.append([name, str(len(lines)), str(totals["hidden"]), str(totals["added"]), str(totals["correct"]),
                     *(f"{value:.3f}" for value in rates(totals).values()), per_seed, str(totals["tokens"]),
                     f"{sum(line['cpu_s'] for line in lines):.0f}"])  # fmt: skip
    heads = ["completion", "seeds", "hidden", "added", "correct", "precision", "recall", "F1 of annotations", "by seed",
             "tokens", "CPU s"]  # fmt: skip
    return heads, rows


def arms_by_seed(cell: Cell) -> dict[str, dict[int, dict[str, Any]]]:
    by_arm: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in cell.known("arm"):
        by_arm[line["arm"]][line["seed"]] = line
    return by_arm


def gain(of_seed: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]]) -> str:
    """The difference in F1 at IoU 0.5 over the seeds that both have."""
    from tables import difference

    shared = sorted(of_seed.keys() & reference.keys())
    if not shared:
        return ""
    parts = [[of[seed]["counts"] for seed in shared] for of in (of_seed, reference)]
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference(*parts))


def mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    return sum(line[key] for line in lines) / len(lines)


def arm_rows(cell: Cell, against: str) -> tuple[list[str], list[list[str]]]:
    from tables import figures

    by_arm = arms_by_seed(cell)
    rows = []
    for arm, of_seed in sorted(by_arm.items(), key=lambda item: [*ARMS, "rounds", "start"].index(item[0])):
        lines = list(of_seed.values())
        found = figures([line["counts"] for line in lines])
        costs = [f"{mean(lines, key):.0f}" for key in ("tokens", "decode_cpu_s", "train_cpu_s")]
        shown = [f"{found[key]:.3f}" for key in ("F1@.5", "F1@.7", "precision", "recall", "objects")]
        difference = "" if arm in ("start", against) else gain(of_seed, by_arm.get(against, {}))
        rows.append([arm, str(len(lines)), *costs, *shown, f"{mean(lines, 'AP'):.3f}", difference])
    heads = ["variant", "seeds", "tokens", "decode CPU s", "train CPU s", "F1@.5", "F1@.7", "precision", "recall",
             "objects", "AP", f"F1@.5 less {against}"]  # fmt: skip
    return heads, rows


def equal_rows(cell: Cell) -> tuple[list[str], list[list[str]]]:
    """Pairs of arms with the same cost, over the seeds that both have."""
    by_arm = arms_by_seed(cell)
    rows = []
    for pair in EQUAL_DECODING:
        shared = sorted(by_arm.get(pair[0], {}).keys() & by_arm.get(pair[1], {}).keys())
        if not shared:
            continue
        lines = [[by_arm[arm][seed] for seed in shared] for arm in pair]
        costs = [
            " / ".join(f"{mean(of, key):.0f}" for of in lines) for key in ("tokens", "decode_cpu_s", "train_cpu_s")
        ]
        by_seed = [gain({seed: by_arm[pair[0]][seed]}, {seed: by_arm[pair[1]][seed]}).split()[0] for seed in shared]
        rows.append(
            [" / ".join(pair), str(len(shared)), *costs, gain(by_arm[pair[0]], by_arm[pair[1]]), " ".join(by_seed)]
        )
    return ["variants", "seeds", "tokens", "decode CPU s", "train CPU s", "F1@.5, first less second", "by seed"], rows


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (heads, ["---"] * len(heads), *rows):
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="run everything of study.yaml that results/ lacks")
    running.add_argument("regimes", nargs="+", choices=declared_regimes())
    running.add_argument("--work", type=Path, required=True, help="folder of data, models and answers")
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS, help="only these [all]")
    running.set_defaults(do=run)
    showing = commands.add_parser("table", help="figures with intervals, as Markdown")
    showing.add_argument("--against", choices=ARMS, default="one", help="the arm that differences are taken to")
    showing.set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(STAGE_2), str(HERE.parent)]
    main()
