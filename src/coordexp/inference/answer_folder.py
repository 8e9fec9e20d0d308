"""The folder of a prediction: its settings, and its answers, one line each, which an interrupted run continues."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.data.files import append_line, write_atomically
from coordexp.data.tiles import whole_of
from coordexp.errors import DataError
from coordexp.evaluation.answers import (
    METRICS,
    PREDICTIONS,
    SETTINGS,
    ImageAnswer,
    from_line,
    is_of,
    to_line,
    write_answers,
)
from coordexp.records import ImageRecord, read_lines

DRAWINGS = "images"


@dataclass(frozen=True, slots=True)
class AnswerFolder:
    """``predictions.jsonl``, ``predictions.rank*.jsonl`` of further ranks until :meth:`join`, and the settings that
    all of them share."""

    path: Path

    def claim(self, settings: dict[str, Any], records: Sequence[ImageRecord], overwrite: bool, fix: str) -> None:
        """Make the folder that of ``settings`` and ``records``; ``overwrite`` deletes its answers first, also those of
        an evaluation. Raises DataError, with ``fix``, if it has answers of other settings, or for other pictures; and
        if its drawings would replace pictures of ``records``."""
        self.path.mkdir(parents=True, exist_ok=True)
        path, drawings = self.path / SETTINGS, (self.path / DRAWINGS).resolve()
        if not overwrite and not path.is_file() and any(self.path.iterdir()):
            raise DataError(f"the folder is not empty and has no {SETTINGS}; {fix}", path=self.path)
        if any(one.resolve().is_relative_to(drawings) for one in {record.image.parent for record in records}):
            detail = f"its folder {DRAWINGS} is for drawings, which would replace the images to answer in it"
            raise DataError(f"{detail}; name another folder", path=self.path)
        if overwrite:
            if path.is_file():
                shutil.rmtree(self.path / DRAWINGS, ignore_errors=True)
            figures = [self.path / METRICS] if (self.path / PREDICTIONS).is_file() else []  # of these answers
            for old in (*figures, *self._parts(), path):
                old.unlink(missing_ok=True)
        if path.is_file():
            self._check_settings(settings, fix)
            self._check_pictures(records, fix)
            path.touch()  # pictures that are answered from now on may be newer than the first ones
        else:
            write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        times = [path.stat().st_mtime_ns, *(one.image.stat().st_mtime_ns for one in records if one.image.is_file())]
        os.utime(path, ns=(max(times), max(times)))  # pictures may be of another clock, or another time zone

    def _check_settings(self, settings: dict[str, Any], fix: str) -> None:
        earlier = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
        other = sorted(name for name in settings.keys() | earlier.keys() if settings.get(name) != earlier.get(name))
        if other:
            raise DataError(
                f"has answers made with another {', '.join(other)} ({earlier.get(other[0])!r}, now "
                f"{settings.get(other[0])!r}); {fix}",
                path=self.path,
            )

    def _check_pictures(self, records: Sequence[ImageRecord], fix: str) -> None:
        claimed = (self.path / SETTINGS).stat().st_mtime
        answered = self.answers()
        for record in records:
            if (answer := answered.get(record.sample_id)) is None:
                continue
            is_tile = whole_of(record) != record.sample_id  # its picture was a temporary file
            # Images in shards have no time of their own.
            is_newer = record.image.is_file() and record.image.stat().st_mtime > claimed
            if is_newer or not (is_tile or is_of(answer, record)):
                other = f"another picture now ({record.image}), or a newer one, than was answered"
                raise DataError(f"{record.sample_id} is {other}; {fix}", path=self.path)
        if lost := answered.keys() - {record.sample_id for record in records}:
            asked = len({whole_of(record) for record in records})
            raise DataError(
                f"has answers for {len(lost)} images that are not among these {asked}, such as {min(lost)}; {fix}",
                path=self.path,
            )

    def answers(self) -> dict[str, ImageAnswer]:
        """The answers so far, of all ranks, by sample."""
        # Text after the last line break is a line that a kill left unfinished.
        lines = ((part, number, line) for part in self._parts() for number, line in read_lines(part, whole=True))
        answers = [from_line(line, path=part, line=number) for part, number, line in lines]
        return {answer.sample_id: answer for answer in answers}

    def append(self, answers: Iterable[ImageAnswer]) -> None:
        """Add answers of this rank, in one piece."""
        name = PREDICTIONS if distributed.is_main() else f"predictions.rank{distributed.rank()}.jsonl"
        if lines := "".join(to_line(answer) + "\n" for answer in answers):
            append_line(self.path / name, lines.encode("utf-8"))

    def join(self, answers: Sequence[ImageAnswer]) -> Path:
        """Make ``answers``, in this order, the folder's only ones. Returns their file."""
        whole = self.path / PREDICTIONS
        write_answers(answers, whole)
        for part in set(self._parts()) - {whole}:
            part.unlink()
        return whole

    def _parts(self) -> list[Path]:
        parts = (self.path / PREDICTIONS, *sorted(self.path.glob("predictions.rank*.jsonl")))
        return [part for part in parts if part.is_file()]
