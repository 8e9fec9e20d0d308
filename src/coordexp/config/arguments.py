"""Words of a command line that set keys: ``training.max_steps=3``, the value read as YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coordexp.config.source import Document, put_text
from coordexp.config.strict import KeyPath, parse_dotted
from coordexp.errors import ConfigError

COMMAND_LINE = "command line"
_KEY = re.compile(r"[^.\[\]=\s]+(\[\d+\])*(\.[^.\[\]=\s]+(\[\d+\])*)*")


def apply_arguments(document: Document, arguments: Sequence[str]) -> None:
    """Put ``arguments`` on top of ``document``, with "command line" as their place.

    Raises:
        ConfigError: a word that is no ``key.path=value``, a key given twice, an entry of a list that is not there. What
            is wrong with a value is one of the document's problems.
    """
    complaints: list[str] = []
    given: dict[KeyPath, str] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            complaints.append(f"{word!r}: expected key.path=value, e.g. training.max_steps=3")
        elif (path := parse_dotted(key)) in given:
            complaints.append(f"{key}: given twice, as {given[path]!r} and {text!r}; keep one")
        else:
            given[path] = text
    if complaints:
        raise ConfigError("\n".join(f"{COMMAND_LINE}: {complaint}" for complaint in complaints))
    for path, text in given.items():
        put_text(document, path, text, COMMAND_LINE)
