"""Messages that the manual quotes are those that the code writes."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

from coordexp.data.check import Finding

ROOT = Path(__file__).parents[3]
# The first heading of a table whose first column quotes messages.
QUOTING = {"troubleshooting.md": "what you see", "serving.md": "message", "data.md": "error says"}
# Quoted words that are not messages of ours: other programs', and names that the manual explains by.
FOREIGN = {
    "operator torchvision::nms does not exist",
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
    "out of memory",
    "create shm in SHMManager failed. errno: 17",
}
CHANGING = "\0"


def quoted(page: str) -> list[str]:
    """Code spans of the first column of every table of messages."""
    found, inside = [], False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        first = line.split(" | ")[0].removeprefix("| ")
        if not line.startswith("|"):
            inside = False
        elif first == QUOTING[page]:
            inside = True
        elif inside and not line.startswith("|---"):
            found += re.findall(r"`([^`]+)`", first)
    return [text for text in found if text not in FOREIGN and text not in list(Finding)]


@lru_cache(maxsize=1)
def written() -> tuple[str, ...]:
    """Every string of the package and of the tests' browser, as Python joins it, with a mark for what is filled in."""
    texts = []
    for path in [*(ROOT / "src" / "coordexp").rglob("*.py"), ROOT / "tests" / "support" / "browser.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(
                    str(part.value) if isinstance(part, ast.Constant) else CHANGING for part in node.values
                ))  # fmt: skip
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[a-z.\d]*[sdfg]", CHANGING, node.value))
    return tuple(texts)


def is_written(message: str) -> bool:
    """Whether one string of the code can read as ``message``, in which … and single capitals stand for anything."""
    parts = [part.strip(" :,;()'") for part in re.split(r"…|\b[NMK]\b", message)]
    fixed = [re.escape(part) for part in parts if part]
    assert fixed, f"nothing of {message!r} can be looked for"
    pattern = re.compile(".*".join(fixed), re.S)
    return any(pattern.search(text) for text in written())


def test_quoted_messages_are_those_that_the_code_writes() -> None:
    assert [(page, text) for page in QUOTING for text in quoted(page) if not is_written(text)] == []


@pytest.mark.parametrize(("page", "at_least"), [("troubleshooting.md", 45), ("serving.md", 5), ("data.md", 10)])
def test_messages_are_found_on_the_pages(page: str, at_least: int) -> None:
    assert len(quoted(page)) >= at_least


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("the tokenizer lacks … of the 1001 coordinate tokens", "another number"),
        ("no server accepts connections there", "a word is missing"),
        ("not the learner's … the rollout's prompt", "another order"),
    ],
)
def test_what_no_code_writes_is_noticed(message: str, why: str) -> None:
    assert not is_written(message), why
