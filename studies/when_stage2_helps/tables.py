"""Counts per image → figures, and differences with paired bootstrap intervals over images and seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

PRED, GT, AT_50, AT_70, AT_90, ANY_NAME, LOCATED, IOU_SUM, DUPLICATES, TRUNCATED = range(10)
DRAWS = 4000


def _sums(per_seed: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum([counts.sum(axis=0) for counts in per_seed], axis=0)


def _f1(sums: np.ndarray, matched: int = AT_50) -> float:
    return float(2 * sums[matched] / max(1, sums[PRED] + sums[GT]))


def figures(per_seed: Sequence[Any]) -> dict[str, float]:
    """Figures of one arm, over the images of all its seeds."""
    sums = _sums([np.array(counts, dtype=float) for counts in per_seed])
    images = sum(len(counts) for counts in per_seed)
    return {
        "F1@.5": _f1(sums),
        "F1@.7": _f1(sums, AT_70),
        "F1@.9": _f1(sums, AT_90),
        "precision": sums[AT_50] / max(1, sums[PRED]),
        "recall": sums[AT_50] / max(1, sums[GT]),
        "located": sums[LOCATED] / max(1, sums[GT]),
        "name right": sums[AT_50] / max(1, sums[ANY_NAME]),
        "IoU": sums[IOU_SUM] / max(1, sums[AT_50]),
        "duplicates": sums[DUPLICATES] / max(1, sums[PRED]),
        "truncated": sums[TRUNCATED] / images,
        "objects": sums[PRED] / images,
    }


def difference(arm: Sequence[Any], reference: Sequence[Any]) -> tuple[float, float, float]:
    """F1@.5 of ``arm`` less that of ``reference``, seed by seed and image by image, with its 95 % interval: seeds are
    drawn with replacement, and images within each."""
    pairs = [(np.array(a, dtype=float), np.array(b, dtype=float)) for a, b in zip(arm, reference, strict=True)]
    rng = np.random.default_rng(0)
    whole = _f1(_sums([a for a, _ in pairs])) - _f1(_sums([b for _, b in pairs]))
    drawn = []
    for _ in range(DRAWS):
        of_a, of_b = [], []
        for seed in rng.integers(len(pairs), size=len(pairs)):
            a, b = pairs[seed]
            images = rng.integers(len(a), size=len(a))
            of_a.append(a[images])
            of_b.append(b[images])
        drawn.append(_f1(_sums(of_a)) - _f1(_sums(of_b)))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return whole, float(low), float(high)


def _precision(lines: Sequence[dict[str, Any]]) -> str:
    """COCO's average precision, and of how many seeds where some have none: lines of before it was noted."""
    scored = [line["AP"] for line in lines if "AP" in line]
    if not scored:
        return ""
    return f"{np.mean(scored):.3f}" + (f" ({len(scored)})" if len(scored) < len(lines) else "")


def markdown(lines: Sequence[dict[str, Any]], against: str) -> str:
    """One row an arm, in the order in which arms were run; differences over the seeds that both arms have."""
    by_arm: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        by_arm[line["arm"]][line["seed"]] = line
    if against not in by_arm:
        raise SystemExit(f"no results of {against!r} here; there are {', '.join(by_arm) or 'none'}")
    rows: list[list[str]] = []
    names: list[str] = []
    for arm, of_seed in by_arm.items():
        found = figures([line["counts"]["as_answered"] for line in of_seed.values()])
        clean = figures([line["counts"]["without_duplicates"] for line in of_seed.values()])["F1@.5"]
        shared = sorted(of_seed.keys() & by_arm[against].keys())
        if arm == against or not shared:
            gain = ""
        else:
            parts = [[of[seed]["counts"]["as_answered"] for seed in shared] for of in (of_seed, by_arm[against])]
            gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference(*parts))
        cpu = np.mean([line["train_cpu_s"] for line in of_seed.values()])
        values = [f"{value:.3f}" for value in (*found.values(), clean)]
        rows.append([arm, str(len(of_seed)), f"{cpu:.0f}", *values, _precision(list(of_seed.values())), gain])
        names = ["arm", "seeds", "CPU s", *found, "F1, repeats removed", "AP (seeds)", f"F1@.5 less {against}"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [names, ["---"] * len(names), *rows])
