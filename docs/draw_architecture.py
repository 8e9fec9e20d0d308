"""Writes what docs/architecture.md takes from the code: the picture of the data's way, and six traced walks with their
files.

python docs/draw_architecture.py            # write docs/architecture.md's tables and docs/images/architecture.svg
python docs/draw_architecture.py --check    # exit 1 if a traced function is gone, or a file is stale
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "coordexp"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "images" / "architecture.svg"

# Walk → file below src/coordexp → its functions that had the value, as traced by docs/walks/run.py.
WALKS: dict[str, dict[str, list[str]]] = json.loads((DOCS / "walks" / "walks.json").read_text(encoding="utf-8"))
_MOST_NAMES = 2


def problems() -> list[str]:
    """Traced functions that the code no longer defines."""
    return [
        f"{walk}: {file} defines no {name}; run docs/walks/run.py"
        for walk, files in WALKS.items()
        for file, names in files.items()
        for name in names
        if not (SOURCE / file).is_file() or not re.search(rf"\b{re.escape(name.split('.')[-1])}\b", _text_of(file))
    ]


@cache
def _text_of(file: str) -> str:
    return (SOURCE / file).read_text(encoding="utf-8")


def _summary(file: str) -> str:
    """First sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(_text_of(file))) or "").split()).replace("``", "`")
    sentence = re.split(r"(?<=[\w`)])[.:;] ", re.sub(r":\w+:`~?(?:coordexp\.)?", "`", text))[0]
    return sentence.rstrip(".").replace("|", "\\|")


def page(text: str) -> str:
    """Return ``text`` with every table regenerated."""
    for walk, files in WALKS.items():
        rows = ""
        for file, names in files.items():
            shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            rows += f"| `{file}` | {shown}{more} | {_summary(file)} |\n"
        header = f"{len(files)} files:\n\n| file | functions | the file |\n|---|---|---|\n"
        table = f"<!-- walk: {walk} -->\n\n{header}{rows}\n<!-- end of walk -->"
        text, count = re.subn(rf"<!-- walk: {walk} -->.*?<!-- end of walk -->", lambda _, t=table: t, text, flags=re.S)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} places for the walk {walk!r}")
    return text


# The data's way through the packages: (package, column, row, output).
FLOW = (
    ("data", 0, 0, "JSONL + images → samples"),
    ("modeling", 1, 0, "prompt tokens, pixels"),
    ("rollouts, engine", 2, 0, "the model's own answers"),
    ("parsing", 3, 0, "objects, usable prefix"),
    ("matching", 4, 0, "found, missed, wrong"),
    ("targets", 4, 1, "Y_train, weight per loss term"),
    ("packing", 3, 1, "packed rows"),
    ("modeling", 2, 1, "one forward per row"),
    ("objective", 1, 1, "losses / totals → gradient"),
    ("training", 0, 1, "optimizer: new weights"),
)
WIDTH, HEIGHT, GAP, TOP = 188, 58, 24, 34


def picture() -> str:
    """The way of the data as an SVG, from JSONL to the weights that write the next answers."""
    parts, places = [], []
    for name, column, row, makes in FLOW:
        x, y = 16 + column * (WIDTH + GAP), TOP + row * 130
        places.append((x, y))
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        parts.append(f'<text class="name" x="{x + WIDTH / 2:g}" y="{y + 24}">{escape(name)}</text>')
        parts.append(f'<text x="{x + WIDTH / 2:g}" y="{y + 44}">{escape(makes)}</text>')
    for (x1, y1), (x2, y2) in pairwise(places):
        if y1 == y2:
            start, end = (x1 + WIDTH, x2) if x2 > x1 else (x1, x2 + WIDTH)
            parts.append(f'<path d="M{start} {y1 + HEIGHT // 2} H{end}"/>')
        else:
            parts.append(f'<path d="M{x1 + WIDTH // 2} {y1 + HEIGHT} V{y2}"/>')
    (x, y), (to_x, to_y) = places[-1], places[2]  # new weights go to the engine that generates answers
    parts.append(f'<path d="M{x + WIDTH // 2} {y} V{y - 36} H{to_x + WIDTH // 2} V{to_y + HEIGHT}"/>')
    parts.append(f'<text x="{x + WIDTH + GAP + 90}" y="{y - 42}">weight_sync: pushed before the next answers</text>')
    width, tall = 32 + 5 * WIDTH + 4 * GAP, TOP + 130 + HEIGHT + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" role="img">\n'
        "<title>The way of the data through the packages of coordexp</title>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" style="fill:#456;stroke:none"/></marker></defs>\n'
        "<style>rect{fill:#eef3fb;stroke:#456}text{font:12px sans-serif;text-anchor:middle;fill:#123}"
        ".name{font:bold 14px monospace}path{fill:none;stroke:#456;marker-end:url(#tip)}</style>\n"
        f'<rect x="0" y="0" width="{width}" height="{tall}" style="fill:#fff;stroke:none"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write the page's tables and the picture, or compare them with ``--check``."""
    if wrong := problems():
        sys.exit("\n".join(wrong))
    wanted = {PAGE: page(PAGE.read_text(encoding="utf-8")), PICTURE: picture()}
    if "--check" in sys.argv[1:]:
        stale = [str(path) for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
        if stale:
            sys.exit(f"{', '.join(stale)} out of date; run: python docs/draw_architecture.py")
        return
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
