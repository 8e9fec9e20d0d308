"""The training data of a run: one JSONL, or several with weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from coordexp.config.base import FilePath, ListOf, Positive, StrictModel


class TrainFile(StrictModel):
    """A JSONL of training samples, and its share of an epoch."""

    path: FilePath
    """the JSONL"""
    weight: Positive = 1.0
    """how often an epoch has each of its records: 2 is twice, 0.25 a quarter of them"""


def _as_files(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str | Path) else item for item in value)
    if isinstance(value, str | Path) and str(value).strip():
        return ({"path": value},)
    given = "null" if value is None else f"a {'mapping' if isinstance(value, dict) else type(value).__name__}"
    raise ValueError(f"expected a path as text, or a list of paths and of {{path: …, weight: …}}, got {given}")


def _without_duplicates(files: tuple[TrainFile, ...]) -> tuple[TrainFile, ...]:
    places = [os.path.realpath(file.path) for file in files]
    for at, file in enumerate(files):
        if places[at] in places[:at]:
            raise ValueError(f"{file.path} is listed twice; list it once, with a weight")
    return files


def _shortest(files: tuple[TrainFile, ...]) -> str | list[dict[str, Any]]:
    if len(files) == 1 and files[0].weight == 1:
        return str(files[0].path)
    return [file.model_dump(mode="json") for file in files]


# A single path, as most runs have it, is written as it was read.
TrainFiles = Annotated[
    ListOf[TrainFile],
    Field(min_length=1),
    BeforeValidator(_as_files, json_schema_input_type=Path | ListOf[Path | TrainFile]),
    AfterValidator(_without_duplicates),
    PlainSerializer(_shortest, when_used="json"),
]
