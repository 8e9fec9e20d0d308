"""The study in one picture: the start, the best control and rollout matching on each kind of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import read_rows
from tables import difference, figures

START, CONTROL, OURS = "#8c959f", "#d9822b", "#0b5cad"


@dataclass(frozen=True)
class Compared:
    """One row: F1@.5 of three arms on the seeds that all have, and the last less the second with its interval."""

    data: str
    split: str
    seeds: int
    start: float
    control: float
    ours: float
    gain: tuple[float, float, float]

    def __str__(self) -> str:
        means = f"start {self.start:.3f}, best control {self.control:.3f}, rollout matching {self.ours:.3f}"
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*self.gain)
        seeds = f"{self.seeds} seed" + "s" * (self.seeds > 1)
        return f"{self.data} ({self.split}, {seeds}): {means}; {gain}"


def compare(declared: dict[str, str], results: Path) -> Compared:
    """``declared``: an entry of ``compared`` in arms.yaml."""
    regime, split = declared["regime"], declared["split"]
    lines = read_rows(results / f"{regime}.jsonl")
    of_arm: list[dict[int, Any]] = [
        {line["seed"]: line["counts"]["as_answered"] for line in lines if (line["arm"], line["split"]) == (arm, split)}
        for arm in ("start", declared["control"], declared["ours"])
    ]
    seeds = sorted(set.intersection(*(set(of_seed) for of_seed in of_arm)))
    if not seeds:
        raise SystemExit(f"{regime}: no seed of the {split} split has all three arms of {declared}")
    start, control, ours = ([of_seed[seed] for seed in seeds] for of_seed in of_arm)
    of_start, of_control, of_ours = (figures(counts)["F1@.5"] for counts in (start, control, ours))
    return Compared(declared["data"], split, len(seeds), of_start, of_control, of_ours, difference(ours, control))


def draw(rows: Sequence[Compared], out: Path) -> None:
    """Left F1@.5 of the three arms, right the gain over the control; hollow if it ran on validation scenes only. The
    rows' figures are in the file's description, too."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "coordexp"  # the same picture from the same results
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 0.42 * len(rows) + 1.3), sharey=True, width_ratios=(3, 2), layout="constrained"
    )
    for y, row in enumerate(rows):
        three = (row.start, row.control, row.ours)
        left.plot((min(three), max(three)), (y, y), color="#d0d7de", zorder=1)
        low, high = row.gain[0] - row.gain[1], row.gain[2] - row.gain[0]
        right.errorbar(row.gain[0], y, xerr=[[low], [high]], color=OURS, capsize=3, linewidth=1.5)
        for axis, value, colour, marker in (
            (left, row.start, START, "o"), (left, row.control, CONTROL, "s"), (left, row.ours, OURS, "D"),
            (right, row.gain[0], OURS, "D"),
        ):  # fmt: skip
            axis.scatter(value, y, s=42, marker=marker, edgecolors=colour, zorder=3, linewidths=1.6,
                         facecolors=colour if row.split == "test" else "white")  # fmt: skip
    names = (("start", START, "o"), ("best control", CONTROL, "s"), ("rollout matching", OURS, "D"))
    for name, colour, marker in names:
        left.scatter([], [], s=42, color=colour, marker=marker, label=name)
    left.scatter([], [], s=42, facecolors="white", edgecolors="#57606a", label="validation scenes alone")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 4}
    left.legend(**above, fontsize=8, frameon=False, columnspacing=1, handletextpad=0.2)
    seeds = [f"{row.data} · {row.seeds} seed" + "s" * (row.seeds > 1) for row in rows]
    left.set_yticks(range(len(rows)), seeds, fontsize=9)
    left.invert_yaxis()
    left.set_xlim(0, 1)
    left.set_xlabel("F1 at IoU 0.5", fontsize=9)
    right.axvline(0, color="#57606a", linewidth=0.9)
    right.set_xlabel("more than the best control, 95 %", fontsize=9)
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None, "Description": "\n".join(map(str, rows))}, facecolor="white")
    plt.close(figure)
