"""How a name is shown: class names, file names and answers are from other people's files and from models."""

from __future__ import annotations

import logging
import re

# Control characters (a terminal obeys them, XML cannot hold them), halves of characters (no encoding has them),
# separators of lines, and marks that turn the direction of what follows.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_EXCEPT_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object, *, lines: bool = False) -> str:
    r"""``text`` with every character that would change how other text is shown, or that a format cannot hold, as
    ``\uXXXX``, which is also JSON's way. ``lines``: line breaks and tabs stay.

    >>> printable("red\x1b[2J car")
    'red\\u001b[2J car'
    """
    unsafe = _EXCEPT_LINES if lines else _UNSAFE
    return unsafe.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def has_half_characters(text: str) -> bool:
    r"""Whether ``text`` has lone surrogates, as JSON (``"\ud800"``) and file names can: UTF-8 cannot write them."""
    return any("\ud800" <= char <= "\udfff" for char in text)


class PrintableFilter(logging.Filter):
    """Lets a logger write its messages as :func:`printable`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage(), lines=True), None
        return True
