"""Which model added an object: what ``coordexp data complete`` writes into a record's metadata, and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from coordexp.records import ImageRecord

COMPLETION = "completion"  # key of a record's metadata: a list, one entry per completion
_OF_IMAGE = ("added", "refused")  # keys of an entry that are not about one object

Provenance = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""How objects were completed: by sample id, then by the object's index, the model with its fingerprint and score."""


class _Added(msgspec.Struct):
    object: Annotated[int, msgspec.Meta(ge=0)]
    score: float


class _Completion(msgspec.Struct):
    added: list[_Added]


def _entries(record: ImageRecord) -> Iterator[tuple[dict[str, Any], list[_Added] | None]]:
    # The list's entries, each with what it added; None for metadata of the user's own.
    entries = record.metadata.get(COMPLETION)
    for entry in entries if isinstance(entries, list) else ():
        try:
            yield entry, msgspec.convert(entry, _Completion).added
        except msgspec.ValidationError:
            yield entry, None


def _completions(record: ImageRecord) -> Iterator[tuple[dict[str, Any], list[_Added]]]:
    # Each entry's own fields, and what it added that is a soft object still.
    objects = record.objects
    for entry, added in _entries(record):
        if added is not None:
            left = [one for one in added if one.object < len(objects) and objects[one.object].soft is not None]
            yield {key: value for key, value in entry.items() if key not in _OF_IMAGE}, left


def completed_objects(records: Iterable[ImageRecord]) -> Provenance:
    """The provenance of a dataset's soft objects; empty without any."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        for origin, added in _completions(record):
            for one in added:
                found.setdefault(record.sample_id, {})[one.object] = {**origin, "score": one.score}
    return found


def completion_of_part(record: ImageRecord, numbers: Sequence[int]) -> dict[str, Any]:
    """The metadata that say how objects of a part of ``record`` were completed, a tile for example; ``numbers``: its
    objects' indices in ``record``. Empty if none was."""
    place = {number: at for at, number in enumerate(numbers)}
    entries = []
    for origin, added in _completions(record):
        inside = [{"object": place[one.object], "score": one.score} for one in added if one.object in place]
        if inside:
            entries.append({**origin, "added": inside})
    return {COMPLETION: entries} if entries else {}


def without_completed(record: ImageRecord) -> ImageRecord:
    """The record's annotations alone: no soft objects, and no metadata about them, which would be read as those of
    objects that a later completion adds."""
    metadata = dict(record.metadata)
    if isinstance(metadata.get(COMPLETION), list):
        metadata[COMPLETION] = [entry for entry, added in _entries(record) if added is None]
        if not metadata[COMPLETION]:
            del metadata[COMPLETION]
    return replace(record, objects=tuple(obj for obj in record.objects if obj.soft is None), metadata=metadata)
