"""To which part of a Qwen3-VL model a name belongs."""

from __future__ import annotations

from typing import Literal

Part = Literal["vit", "aligner", "llm", "coord"]
OFFSET = "coord_offset"


def part_of(name: str) -> Part:
    """The part of a Qwen3-VL model to which a parameter or module belongs; coordinate offsets are their own."""
    if name.rpartition(".")[2] == OFFSET:
        return "coord"
    path = f".{name}."
    if ".visual." not in path:
        return "llm"
    return "aligner" if ".visual.merger." in path or ".visual.deepstack_merger_list." in path else "vit"
