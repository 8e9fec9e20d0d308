"""The class names of training data, which give a checkpoint's predictions stable class ids."""

from __future__ import annotations

from collections.abc import Sequence

from coordexp.data.joined import distinct_descs
from coordexp.records import ImageRecord

MOST = 10_000  # more distinct descriptions are free text, not classes


def class_list(records: Sequence[ImageRecord]) -> tuple[str, ...]:
    """The distinct descriptions of ``records`` in alphabetical order; empty if there are more than :data:`MOST`."""
    names = distinct_descs(records)
    return tuple(sorted(names)) if len(names) <= MOST else ()
