"""Draws docs/images/forced_tokens.svg, which docs/rollouts.md shows: an answer's tokens, forced and decided, and the
forward passes that write them.

The tokens are those of Qwen's tokenizer; forced tokens and passes are computed by the code that decodes.

python docs/draw_forced_tokens.py            # write it
python docs/draw_forced_tokens.py --check    # exit 1 if the file is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from coordexp.coords import serialize_objects
from coordexp.records import GTObject
from coordexp.rollouts.answer_state import AnswerGrammar, forced_positions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.qwen_tokenizer import qwen_vocab

TARGET = Path(__file__).parent / "images" / "forced_tokens.svg"
OBJECTS = (
    GTObject("traffic light", "bbox_2d", (412, 95, 448, 180)),
    GTObject("car", "bbox_2d", (130, 520, 366, 701)),
    GTObject("car", "bbox_2d", (655, 498, 902, 733)),
)
DRAFTED = 32  # tokens at most, as engines draft
FORCED, DECIDED, PASSES = "#e9ebee", "#bcd7ff", ("#1f5fbf", "#e07b00")
CHAR, HEIGHT, LINE, LEFT, TOP = 6.05, 18, 42, 20, 66


def picture() -> str:
    """The whole picture as an SVG."""
    grammar = AnswerGrammar(qwen_vocab())
    vocab = grammar.vocab
    ids = [*vocab.encode(serialize_objects(OBJECTS)), vocab.eos_id]
    forced, passes = set(forced_positions(grammar, ids)), list(passes_of(grammar, ids))
    pieces = [re.sub(r"<\|coord_(\d+)\|>", r"\1", vocab.piece(token)) for token in ids]
    pieces[-1] = "end of turn"
    count = len(OBJECTS)
    parts, x, y, widest = [], float(LEFT), TOP, 0.0
    for at, piece in enumerate(pieces):
        if piece == "object" and at > 3:
            x, y = float(LEFT), y + LINE
        width = CHAR * len(piece) + 5
        fill = FORCED if at in forced else DECIDED
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="2" fill="{fill}"/>')
        parts.append(f'<text class="mono" x="{x + 2.5:.1f}" y="{y + 13}">{escape(piece)}</text>')
        colour = PASSES[passes[at] % 2]
        parts.append(f'<rect x="{x:.1f}" y="{y + HEIGHT + 2}" width="{width:.1f}" height="3" fill="{colour}"/>')
        x += width + 1.5
        widest = max(widest, x)
    height, width = y + LINE + 4, widest + LEFT
    legend = (
        (DECIDED, f"decided by the model: {len(ids) - len(forced)} of {len(ids)} tokens"), (FORCED, "forced by JSON"),
    )  # fmt: skip
    head = [f'<text class="head" x="{LEFT}" y="22">An answer with {count} boxes, in the tokens of Qwen</text>']
    for k, (fill, text) in enumerate(legend):
        head.append(f'<rect x="{LEFT + 270 * k}" y="34" width="22" height="14" rx="2" fill="{fill}"/>')
        head.append(f'<text x="{LEFT + 28 + 270 * k}" y="46">{text}</text>')
    for k, colour in enumerate(PASSES):
        head.append(f'<rect x="{LEFT + 420 + 12 * k}" y="40" width="12" height="3" fill="{colour}"/>')
    total = passes[-1] + 1
    head.append(f'<text x="{LEFT + 450}" y="46">one forward pass each: {total}, {total / count:.1f} per box</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">\n'
        "<title>Tokens of an answer: JSON forces most of them, and a forward pass writes several</title>\n"
        "<style>text{font:12px sans-serif;fill:#123}.head{font-weight:bold;font-size:14px}"
        ".mono{font:10px monospace;white-space:pre}</style>\n"
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>\n' + "\n".join((*head, *parts)) + "\n</svg>\n"
    )


def passes_of(grammar: AnswerGrammar, ids: Sequence[int]) -> Iterator[int]:
    """For each token the number of the forward pass that writes it: the right beginning of its draft, and one more."""
    state, number, left = grammar.start(), -1, 0
    for at, token in enumerate(ids):
        if not left:
            draft = state.draft(DRAFTED)
            right = next((k for k, one in enumerate(draft) if ids[at + k : at + k + 1] != [one]), len(draft))
            number, left = number + 1, right + 1
        yield number
        left -= 1
        state.push(token)


def main() -> None:
    """Command line."""
    drawn = picture()
    if "--check" in sys.argv[1:]:
        if not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != drawn:
            sys.exit(f"{TARGET} is out of date; run: python docs/draw_forced_tokens.py")
        return
    TARGET.write_text(drawn, encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
