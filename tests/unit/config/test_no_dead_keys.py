"""A key that is accepted is a key that is read: somewhere in the program outside ``coordexp.config``.

Keys are found by name: if several sections have the same key (``enabled``), one reader hides the others. Scenario tests
and the sections' own tests change such keys and look at what they do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from coordexp.config import RunConfig
from coordexp.config.schema import OWN_KEYS, TrainingConfig

SOURCE = Path(__file__).parents[3] / "src"

# Keys that only affect the configuration itself.
SETTLED_WHILE_LOADING = {
    ("TrainingConfig", "effective_batch_size"): "decides gradient_accumulation_steps",
}


def test_every_key_is_read_by_the_program() -> None:
    read = {
        node.attr
        for path in SOURCE.rglob("*.py")
        if SOURCE / "coordexp" / "config" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # transformers is handed the whole section, but for the keys that it does not know; vLLM the one below.
    handed_over = {("TrainingConfig", key) for key in TrainingConfig.model_fields.keys() - OWN_KEYS}
    handed_over |= {("MMLimitConfig", "video")}
    keys = set(leaves(RunConfig))
    assert len(keys) > 150
    unread = {(section, key) for section, key in keys if key not in read} - handed_over - set(SETTLED_WHILE_LOADING)
    assert sorted(".".join(pair) for pair in unread) == []


def leaves(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(section, key) of every key that holds a value rather than a section, and that can hold more than one."""
    for key, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        for one in inner:
            yield from leaves(one)
        # ``Literal[True]``: the key documents what the program does, and there is nothing to choose.
        if not inner and not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            yield section.__name__, key


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]
