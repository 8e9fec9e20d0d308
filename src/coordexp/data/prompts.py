"""A record → the chat messages that ask for its objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEFAULT_PROMPT = (
    "Detect every object in the image. Answer with one JSON object that maps object_1, object_2, … to "
    '{"desc": …, "bbox_2d": [x1, y1, x2, y2]} or {"desc": …, "poly": [x, y, …]}, '
    "ordered from top to bottom, with coordinate tokens from <|coord_0|> to <|coord_999|>."
)


def build_messages(image: Path, prompt: str | None, system: str | None) -> tuple[dict[str, Any], ...]:
    """Messages up to and including the user's turn; the chat template adds the assistant's header."""
    user = {
        "role": "user",
        "content": [{"type": "image", "image": str(image)}, {"type": "text", "text": prompt or DEFAULT_PROMPT}],
    }
    if system is None:
        return (user,)
    return ({"role": "system", "content": [{"type": "text", "text": system}]}, user)
