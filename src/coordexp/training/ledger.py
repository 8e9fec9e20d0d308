"""Objects that training loses and gains, from the run's first evaluation on; equal figures hide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from coordexp import distributed
from coordexp.checkpoints.run_folder import FIRST_EVALUATION
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, picture_of, read_answers, write_answers
from coordexp.evaluation.compare import changed_rates


class RunLedger:
    """Compares each evaluation of a run with its first one, whose answers are a file in the run's folder. Each rank
    compares for itself, and the first writes the file: a collective call would wait for a rank that fails."""

    def __init__(self, folder: Path, on_note: Callable[[str], None]) -> None:
        self._path = folder / FIRST_EVALUATION
        self._on_note = on_note
        self._first: Sequence[ImageAnswer] | None = None
        self._problem = f"{self._path} does not have the answers of the run's first evaluation to these images"
        # What a resumed run finds is read here: at its first evaluation the first rank may have replaced it already.
        self._found: Sequence[ImageAnswer] | None = None
        try:
            self._found = read_answers(self._path) if self._path.is_file() else None
        except DataError as error:  # damaged, or of an earlier version; training needs none of it
            self._problem = str(error)
        self.has_other_images = False  # whether the last evaluation's images are not those of the one before a resume

    def rates(self, answers: Sequence[ImageAnswer], *, is_first: bool) -> dict[str, float]:
        """The shares of :func:`changed_rates`; none for the first evaluation."""
        self.has_other_images = False
        if self._first is None and not is_first:  # a resumed run
            if self._found is not None and _images(self._found) == _images(answers):
                self._first = self._found
            else:
                self.has_other_images = self._found is not None
                best = ", and the best checkpoint is chosen," if self.has_other_images else ""
                self._on_note(f"{self._problem}; lost and gained objects are counted{best} from this evaluation on")
        if self._first is None:
            self._first = answers
            if distributed.is_main():
                write_answers(answers, self._path)
            return {}
        return changed_rates(self._first, answers)


def _images(answers: Sequence[ImageAnswer]) -> list[object]:
    return [(one.sample_id, picture_of(one.image, one.width, one.height), one.gt) for one in answers]
