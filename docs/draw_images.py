"""Draws this manual's pictures from real runs and real terminals; none of them is drawn by hand.

python docs/draw_images.py curves outputs/demo/stage2 docs/images/curves.svg       # a run's own log
python docs/draw_images.py detections docs/images/python.png               # what the demo finds
python docs/draw_images.py page view.html docs/images/viewer.png --height 1087     # an HTML page, by headless Chromium
tmux capture-pane -ep | python docs/draw_images.py terminal "coordexp train" docs/images/training.svg
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LIMIT_BYTES = 300_000
PAGE_S = 60.0

# The metrics that docs/metrics.md recommends, with short titles.
CURVES = (
    ("loss", "loss (sum of the terms)"),
    ("rollout/match_rate", "annotated objects found"),
    ("rollout/precision", "predictions that match"),
    ("rollout/parse_truncated_rate", "answers cut off"),
    ("rollout/gen_new_tokens_mean", "tokens an answer"),
    ("coord_diag/expected_bin_mae", "coordinate error (bins)"),
)


def draw_curves(run: Path, out: Path) -> None:
    """The curves of ``run``/trainer_state.json, each step's value and the mean of the ten steps up to it."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "coordexp"  # the same picture from the same run
    import matplotlib.pyplot as plt

    lines = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 5.2), sharex=True, layout="constrained")
    for axis, (name, meaning) in zip(axes.flat, CURVES, strict=True):
        points = [(line["step"], line[name]) for line in lines if name in line]
        steps, values = zip(*points, strict=True)
        recent = [values[max(0, k - 9) : k + 1] for k in range(len(values))]
        axis.plot(steps, values, color="#9db8d6", linewidth=0.9)
        axis.plot(steps, [sum(window) / len(window) for window in recent], color="#0b5cad", linewidth=2)
        axis.set_title(f"{name}\n{meaning}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    for axis in axes[1]:
        axis.set_xlabel("step", fontsize=8)
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


def draw_detections(out: Path) -> None:
    """Three scenes next to each other with what the demo's checkpoint finds, drawn by ``Detections.draw``."""
    from PIL import Image

    from coordexp import Detector
    from coordexp.data import read_jsonl
    from coordexp.data.files import asset
    from coordexp.data.scenes import SPECS, write_scenes

    with tempfile.TemporaryDirectory() as folder:
        records = read_jsonl(write_scenes(Path(folder), 3, SPECS["sparse"], 11))
        with Detector(asset("checkpoints/demo-stage1"), device="cpu") as detector:
            drawn = [found.draw() for found in detector.predict([record.image for record in records])]
    side, gap = 384, 8
    picture = Image.new("RGB", (3 * side + 2 * gap, side), "white")
    for k, one in enumerate(drawn):
        picture.paste(one.resize((side, side)), (k * (side + gap), 0))
    picture.quantize(256).save(out, optimize=True)  # flat colours: a palette is a quarter of the size


def draw_terminal(ansi: str, title: str, out: Path) -> None:
    """Write a terminal's coloured text as an SVG that uses the reader's fonts."""
    from rich.console import Console
    from rich.text import Text

    text = Text.from_ansi(ansi.rstrip())
    width = max(len(line) for line in text.plain.splitlines())
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(text, soft_wrap=True)
        svg = console.export_svg(title=title, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)  # they would be fetched from another site
    out.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.M), encoding="utf-8")


def draw_page(source: str, out: Path, width: int, height: int) -> None:
    """A page as Chromium shows it, with as many colours as a small PNG holds."""
    from PIL import Image

    url = source if "://" in source else Path(source).absolute().as_uri()
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--window-size={width},{height}", "--virtual-time-budget=8000", f"--screenshot={shot}",
                   f"--user-data-dir={folder}/profile", url]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=PAGE_S)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(128).save(out, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """One picture a call; one that is too heavy for a page is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    curves = kinds.add_parser("curves")
    curves.add_argument("run", type=Path)
    terminal = kinds.add_parser("terminal")
    terminal.add_argument("title")
    page = kinds.add_parser("page")
    page.add_argument("source", help="a file or an address")
    page.add_argument("--width", type=int, default=1500)
    page.add_argument("--height", type=int, default=950)
    detections = kinds.add_parser("detections")
    for kind in (curves, terminal, page, detections):
        kind.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    if given.kind == "curves":
        draw_curves(given.run, given.out)
    elif given.kind == "detections":
        draw_detections(given.out)
    elif given.kind == "terminal":
        draw_terminal(sys.stdin.read(), given.title, given.out)
    else:
        draw_page(given.source, given.out, given.width, given.height)
    if (size := given.out.stat().st_size) > LIMIT_BYTES:
        sys.exit(f"{given.out} has {size} bytes, more than {LIMIT_BYTES}")
    print(f"wrote {given.out}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
