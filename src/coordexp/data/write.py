"""Records → a JSONL dataset that :func:`coordexp.data.jsonl.read_jsonl` reads back unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coordexp.data.record_line import parse_line
from coordexp.errors import DataError
from coordexp.files import whole_file
from coordexp.records import GTObject, ImageRecord


def write_jsonl(records: Iterable[ImageRecord], path: str | Path) -> int:
    """Write ``records`` to ``path``, images relative to its folder. All or nothing: the file appears complete, or a
    previous one stays as it was.

    Returns: the number of lines.

    Raises:
        DataError: a record that the reader would refuse, or metadata that JSON cannot hold.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with whole_file(path) as file:
        for count, record in enumerate(records, start=1):
            file.write(line_of(record, path, count))
    return count


def line_of(record: ImageRecord, path: Path, number: int) -> str:
    """A record as line ``number`` of the JSONL ``path``, its end included. Raises DataError as :func:`write_jsonl`."""
    image = Path(os.path.relpath(record.image, os.path.abspath(path.parent))).as_posix()
    fields: dict[str, Any] = {
        "images": [image],
        "width": record.width,
        "height": record.height,
        "objects": [_object(obj) for obj in record.objects],
    }
    if record.metadata:
        fields["metadata"] = dict(record.metadata)
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot write {record.sample_id}: {error}", path=path, line=number) from error
    parse_line(text, path=path, line=number)
    return text + "\n"


def _object(obj: GTObject) -> dict[str, Any]:
    fields: dict[str, Any] = {"desc": obj.desc, obj.kind: list(obj.bins)}
    return fields if obj.soft is None else {**fields, "soft": obj.soft}
