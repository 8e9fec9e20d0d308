"""Draws docs/images/matching.svg, which docs/rollout-matching.md shows: one answer becomes a training target.

The boxes, the IoU, the text and each token's colour are computed by the code that trains.

python docs/draw_matching.py            # write it
python docs/draw_matching.py --check    # exit 1 if the file is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from coordexp.config.rollout import TargetPolicy
from coordexp.coords import CoordVocab, serialize_objects
from coordexp.matching import match_objects
from coordexp.modeling.tiny import build_tokenizer
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, TokenRole
from coordexp.targets import build_target

TARGET = Path(__file__).parent / "images" / "matching.svg"

CAT = GTObject("cat", "bbox_2d", (80, 250, 480, 880))
CUP = GTObject("cup", "bbox_2d", (640, 120, 880, 420))
WRITTEN = (
    GTObject("cat", "bbox_2d", (140, 330, 520, 930)),
    GTObject("dog", "bbox_2d", (600, 600, 900, 900)),
)

FOUND, WRONG, MISSED, TRUTH, GREY = "#1a7f37", "#c62828", "#e07b00", "#1f5fbf", "#8a8f98"
# Colour and background of a role's tokens.
_TEXT, _COORD, _MASKED = ("#0b3d91", "#dbe8fb"), ("#1a6b2f", "#d9f2df"), (GREY, "none")
STYLE = {
    TokenRole.REWRITTEN_STRUCT: _TEXT, TokenRole.REWRITTEN_DESC: _TEXT, TokenRole.GT_STRUCT: _TEXT,
    TokenRole.GT_DESC: _TEXT, TokenRole.CLOSE: _TEXT, TokenRole.EOS: _TEXT,
    TokenRole.MATCHED_COORD: _COORD, TokenRole.GT_COORD: _COORD, TokenRole.MASKED: _MASKED,
}  # fmt: skip
SIDE, TOP, CHAR, LINE = 170, 62, 6.62, 19


def picture() -> str:
    """The whole picture as an SVG."""
    vocab = CoordVocab.from_tokenizer(build_tokenizer())
    truth = (CAT, CUP)
    answer = serialize_objects(WRITTEN)
    parsed = parse_rollout(vocab.encode(answer), vocab, ended=True)
    match = match_objects(parsed.objects, truth)
    target = build_target(
        parsed, match, truth, vocab, sample_id="picture", policy=TargetPolicy(answer="rewritten", unmatched="mask")
    )
    (pair,) = match.pairs
    parts = [
        *_panel(20, "1  The model answers", "greedy or sampled, no gradient", [(one, GREY, "") for one in WRITTEN]),
        *_panel(250, "2  Parse and match", f"Hungarian assignment, mask IoU {pair.iou:.2f}", [
            (CAT, TRUTH, "6 4"), (CUP, MISSED, "6 4"), (WRITTEN[pair.pred_idx], FOUND, ""),
            *((WRITTEN[k], WRONG, "") for k in match.fp_pred_idx),
        ]),
        *_panel(480, "3  Correct", "found: move; missed: add", [
            (CAT, FOUND, ""), (CUP, FOUND, ""), (WRITTEN[1], GREY, "2 4"),
        ]),
        *(f'<path class="arrow" d="M{x} {TOP + SIDE / 2:g} h32"/>' for x in (204, 434)),
        *_legend(680),
        f'<text class="head" x="20" y="{TOP + SIDE + 40}">4  One teacher-forced forward on the corrected answer</text>',
    ]  # fmt: skip
    y = TOP + SIDE + 68
    lines = list(_lines(vocab, target.token_ids, target.roles_T.tolist()))
    for k, line in enumerate(lines):
        parts += _text_line(20, y + k * LINE, line)
    notes = (("found", FOUND), ("not annotated: only context", WRONG), ("missed", MISSED))
    for k, (note, colour) in enumerate(notes):
        parts.append(f'<text x="590" y="{y + k * LINE}" style="fill:{colour}">{note}</text>')
    height = y + len(lines) * LINE + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 970 {height}" role="img">\n'
        "<title>Rollout matching: the model answers, predictions are matched to annotations, the corrected answer is "
        "trained</title>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#456"/></marker></defs>\n'
        "<style>text{font:12px sans-serif;fill:#123}.head{font-weight:bold;font-size:14px}.small{fill:#456}"
        f".mono{{font:11px monospace}}.arrow{{fill:none;stroke:#456;stroke-width:1.5;marker-end:url(#tip)}}</style>\n"
        f'<rect width="970" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(x: int, title: str, note: str, boxes: Sequence[tuple[GTObject, str, str]]) -> Iterator[str]:
    """An image with outlines: (object, colour, dashes)."""
    yield f'<text class="head" x="{x}" y="26">{escape(title)}</text>'
    yield f'<text class="small" x="{x}" y="46">{escape(note)}</text>'
    yield f'<rect x="{x}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="#f3f5f8" stroke="#99a"/>'
    for thing, colour, dashes in boxes:
        x1, y1, x2, y2 = (value * SIDE / 999 for value in thing.bins)
        size = f'x="{x + x1:.1f}" y="{TOP + y1:.1f}" width="{x2 - x1:.1f}" height="{y2 - y1:.1f}"'
        yield f'<rect {size} fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes or "none"}"/>'
        if dashes != "6 4" or colour == MISSED:
            yield f'<text x="{x + x1 + 4:.1f}" y="{TOP + y1 + 14:.1f}" style="fill:{colour}">{thing.desc}</text>'


def _legend(x: int) -> Iterator[str]:
    rows = (
        (TRUTH, "6 4", "annotation, found"), (MISSED, "6 4", "annotation, missed"), (FOUND, "", "matched prediction"),
        (WRONG, "", "prediction without annotation"),
    )  # fmt: skip
    for k, (colour, dashes, text) in enumerate(rows):
        y = TOP + 14 + k * 22
        yield (
            f'<path d="M{x} {y - 4} h26" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes or "none"}"/>'
            f'<text x="{x + 34}" y="{y}">{text}</text>'
        )
    for k, ((colour, fill), text) in enumerate(
        ((_TEXT, "cross-entropy"), (_COORD, "coordinate losses, to the annotation"), (_MASKED, "no loss"))
    ):
        y = TOP + 14 + (k + len(rows)) * 22
        yield (
            f'<rect x="{x}" y="{y - 12}" width="26" height="16" fill="{fill}"/>'
            f'<text x="{x + 34}" y="{y}" style="fill:{colour}">{text}</text>'
        )


def _lines(vocab: CoordVocab, token_ids: Sequence[int], roles: Sequence[int]) -> Iterator[list[tuple[str, TokenRole]]]:
    """Runs of text with one role; a new line before each entry."""
    line: list[tuple[str, TokenRole]] = []
    for role, run in groupby(zip(token_ids, roles, strict=True), key=lambda pair: pair[1]):
        text = vocab.decode([token for token, _ in run])
        text = re.sub(r"<\|coord_(\d+)\|>", r"\1", text)
        for k, part in enumerate(re.split(r'(?="object_)', text)):
            if k and "".join(text for text, _ in line) not in ("", "{"):
                yield line
                line = []
            if part:
                line.append((part, TokenRole(role)))
    yield line


def _text_line(x: float, y: int, line: Sequence[tuple[str, TokenRole]]) -> Iterator[str]:
    for text, role in line:
        colour, fill = STYLE[role]
        if fill != "none":
            yield f'<rect x="{x:.1f}" y="{y - 12}" width="{len(text) * CHAR:.1f}" height="16" fill="{fill}"/>'
        length = f'textLength="{len(text) * CHAR:.1f}" xml:space="preserve"'
        yield f'<text class="mono" x="{x:.1f}" y="{y}" {length} style="fill:{colour}">{escape(text)}</text>'
        x += len(text) * CHAR


def main() -> None:
    """Write the picture, or compare it with ``--check``."""
    drawn = picture()
    if "--check" in sys.argv[1:]:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != drawn:
            sys.exit(f"{TARGET} is out of date; run: python docs/draw_matching.py")
        return
    TARGET.write_text(drawn, encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
