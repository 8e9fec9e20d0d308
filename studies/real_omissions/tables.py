"""Stored answers → figures, and differences with bootstrap intervals over photographs and seeds."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from photographs import NAMES, at_border

from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.evaluation.coco_results import average_precision
from coordexp.evaluation.compare import Share, compare
from coordexp.evaluation.detection import count_image, detection_metrics, match_answer, sum_counts
from coordexp.matching import duplicate_indices
from coordexp.records import GTObject

ANSWERS = Path(__file__).resolve().parent / "answers"
DRAWS = 4000
Counts = list[tuple[int, int, int]]  # predictions, ground truth, matched of each photograph


def stored(split: str, file: Path) -> list[ImageAnswer]:
    """The answers of a file of answers/ with the ground truth of their split, a photograph each."""
    answers = []
    for truth, found in zip(_lines(ANSWERS / f"truth-{split}.jsonl.gz"), _lines(file), strict=True):
        assert truth["photograph"] == found["photograph"]
        gt = tuple(GTObject(NAMES[number], "bbox_2d", tuple(bins)) for number, *bins in truth["gt"])
        pred = tuple(
            ScoredObject(NAMES[name] if isinstance(name, int) else name, "bbox_2d", tuple(bins), score)
            for name, *bins, score in found["pred"]
        )
        width, height = truth["size"]
        answers.append(
            ImageAnswer(
                truth["photograph"], f"{truth['photograph']}.jpg", width, height, gt, pred,
                truncated=found["truncated"], num_tokens=found["tokens"],
            )
        )  # fmt: skip
    return answers


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def figures(answers: Sequence[ImageAnswer]) -> dict[str, float]:
    """Figures of one row: of all cells, of those inside their photograph, and with repeats removed."""
    of_all = detection_metrics(sum_counts(count_image(one).counts for one in answers))
    precision = average_precision([_known(one) for one in answers]).figures
    names = ("f1", "precision", "recall", "mean_matched_iou", "pred_per_image", "duplicate_rate", "truncated_rate")
    return {
        **{name: of_all[name] for name in names},
        **{name: precision.get(name, 0.0) for name in ("AP", "AP50")},
        "f1_inside": _f1(_counts([_inside(one) for one in answers])),
        "f1_no_repeats": _f1(_counts([_no_repeats(one) for one in answers])),
    }


def _known(answer: ImageAnswer) -> ImageAnswer:
    """Without names that no class has, which average precision cannot count."""
    return replace(answer, pred=tuple(one for one in answer.pred if one.desc in NAMES))


def _inside(answer: ImageAnswer) -> ImageAnswer:
    """Without cells that reach the edge of the photograph, and without predictions that found one or reach it."""
    gt = answer.gt or ()
    found = {i: j for i, j, _ in match_answer(answer)}
    kept = [
        one for i, one in enumerate(answer.pred)
        if not at_border(gt[found[i]] if i in found else one, answer)
    ]  # fmt: skip
    return replace(answer, gt=tuple(obj for obj in gt if not at_border(obj, answer)), pred=tuple(kept))


def _no_repeats(answer: ImageAnswer) -> ImageAnswer:
    repeats = set(duplicate_indices(answer.pred))
    return replace(answer, pred=tuple(one for i, one in enumerate(answer.pred) if i not in repeats))


def _counts(answers: Sequence[ImageAnswer]) -> Counts:
    counted = [count_image(one).counts for one in answers]
    return [(int(one["pred"]), int(one["gt"]), int(one["matched"])) for one in counted]


def _f1(counts: Counts | np.ndarray) -> float:
    pred, gt, matched = np.sum(np.asarray(counts, dtype=float).reshape(-1, 3), axis=0)
    return float(2 * matched / max(1.0, pred + gt))


def _drawn(runs: Sequence[Sequence[Counts]]) -> np.ndarray:
    """F1 of each run, (DRAWS + 1, runs): of the runs themselves, then of resamples. A resample draws seeds, and
    for each of them photographs, the same ones for all runs."""
    count_RSP3 = np.asarray(runs, dtype=float)
    _, seeds, photographs, _ = count_RSP3.shape
    rng = np.random.default_rng(0)
    f1 = [[_f1(run) for run in count_RSP3]]
    for _ in range(DRAWS):
        sums = np.zeros((len(runs), 3))
        for seed in rng.integers(seeds, size=seeds):
            sums += count_RSP3[:, seed, rng.integers(photographs, size=photographs)].sum(axis=1)
        f1.append([_f1(run) for run in sums])
    return np.array(f1)


def _shown(values_D: np.ndarray) -> str:
    low, high = np.quantile(values_D[1:], [0.025, 0.975])
    return f"{values_D[0]:+.3f} [{low:+.3f}, {high:+.3f}]"


def markdown(rows: Sequence[dict[str, Any]], against: str, full: str) -> str:
    """One row per variant in the order in which they ran: means over seeds; F1 less that of ``against`` and the share
    of ``full`` supervision, over the seeds that all of them have; objects lost and gained since the start."""
    by_variant: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_variant[row["variant"]][row["seed"]] = row
    if against not in by_variant:
        raise SystemExit(f"no results of {against!r} here; there are {', '.join(by_variant) or 'none'}")
    names = (
        "f1",
        "f1_inside",
        "f1_no_repeats",
        "precision",
        "recall",
        "AP",
        "AP50",
        "pred_per_image",
        "duplicate_rate",
    )
    heads = ["variant", "seeds", "CPU s", *names, f"F1 less {against}", "share of full", "lost", "gained"]
    lines = [heads, ["---"] * len(heads)]
    for name, of_seed in by_variant.items():
        values = [f"{mean(row[key] for row in of_seed.values()):.3f}" for key in names]
        cpu = f"{mean(row['train_cpu_s'] for row in of_seed.values()):.0f}"
        compared = (*_compared(by_variant, name, against, full), *_ledger(by_variant, name))
        lines.append([name, str(len(of_seed)), cpu, *values, *compared])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _answers(row: dict[str, Any]) -> list[ImageAnswer]:
    return stored(row["split"], ANSWERS / row["answers"])


def _compared(by_variant: dict[str, dict[int, dict[str, Any]]], name: str, against: str, full: str) -> tuple[str, str]:
    """F1 of a variant less that of ``against``, and the share of ``full`` supervision."""
    others = [one for one in (against, full) if one in by_variant]
    seeds = sorted(set.intersection(*(set(by_variant[one]) for one in (name, *others))))
    if name == against or not seeds:
        return "", ""
    drawn = _drawn([[_counts(_answers(by_variant[one][seed])) for seed in seeds] for one in (name, *others)])
    gain_D = drawn[:, 0] - drawn[:, 1]
    if name == full or full not in others:
        return _shown(gain_D), ""
    return _shown(gain_D), _shown(gain_D / (drawn[:, 2] - drawn[:, 1]))


def _ledger(by_variant: dict[str, dict[int, dict[str, Any]]], name: str) -> tuple[str, str]:
    """Shares of objects lost of those that the start found, and gained of those that it missed: means over seeds, of
    intervals over photographs too."""
    if name == "start" or "start" not in by_variant:
        return "", ""
    start = _answers(next(iter(by_variant["start"].values())))
    found = [compare(start, _answers(row)).ledger for row in by_variant[name].values()]
    return _mean_share([one.lost for one in found]), _mean_share([one.gained for one in found])


def _mean_share(shares: Sequence[Share]) -> str:
    value, low, high = (mean(side) for side in zip(*((one.value, *one.interval) for one in shares), strict=True))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
