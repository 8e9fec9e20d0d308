"""What a run watches: rollouts that drift and steps that wait for images, in its log lines; objects that it loses and
gains, in its evaluations."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from coordexp import distributed
from coordexp.checkpoints.run_folder import FIRST_EVALUATION
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, picture_of, read_answers, write_answers
from coordexp.evaluation.compare import changed_rates

WINDOW_SAMPLES = 128  # answers; a rate of 5 % is then known to ± 2 %
RISE = 0.10  # of a rate, that is a warning
_SAMPLES = "rollout/samples_total"
_RATES = {
    "truncated": ("rollout/parse_truncated_total", _SAMPLES, "answers are truncated"),
    "duplicate": ("rollout/duplicates_total", "rollout/valid_pred_objects_total", "objects repeat an earlier one"),
}
WAIT_SHARE = 0.05  # of a step that may wait for images
_STEP = ("time/data_wait_s", "time/window_prepare_s", "time/learner_s", "time/optimizer_s")  # add up to a step


class DriftWatch:
    """Warns when the rates of truncated answers or of repeated objects rise. Call :meth:`observe` with each log
    line."""

    def __init__(self) -> None:
        self._first: Counter[str] = Counter()
        self._latest: deque[Counter[str]] = deque()
        self._warned: set[str] = set()

    def replay(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Read the lines that a resumed run logged before it stopped, without warning again."""
        for line in lines:
            self.observe(line, None)

    def observe(self, line: Mapping[str, float], step: int | None) -> dict[str, float]:
        """Return ``safeguard/*`` for a line with rollouts, {} otherwise. Warn once when a rate has risen by 0.10."""
        if not line.get(_SAMPLES):
            return {}
        self._latest.append(Counter({name: int(line.get(name, 0)) for rate in _RATES.values() for name in rate[:2]}))
        while sum(part[_SAMPLES] for part in self._latest) - self._latest[0][_SAMPLES] >= WINDOW_SAMPLES:
            self._latest.popleft()
        if self._first[_SAMPLES] < WINDOW_SAMPLES:
            self._first += self._latest[-1]
        latest, metrics = sum(self._latest, Counter()), {}
        for name, (part, whole, what) in _RATES.items():
            now, before = (counts[part] / max(1, counts[whole]) for counts in (latest, self._first))
            metrics[f"safeguard/{name}_rate"] = now
            if now - before >= RISE and name not in self._warned:
                self._warned.add(name)
                if step is not None:
                    distributed.warn(
                        f"step {step}: Rollouts drift: {now:.0%} of the latest {what}, {before:.0%} at first. Look at "
                        "eval_rollout/f1; lower training.learning_rate or stage2_ab.schedule.b_ratio"
                    )
        return metrics


def free_cores(busy: int) -> int:
    """Cores of this process that loader processes can have. ``busy``: those that the trainer itself computes on."""
    return len(os.sched_getaffinity(0)) // distributed.on_this_machine()[1] - busy


def loader_advice(workers: int, waited_s: float, step_s: float, cores: int) -> str | None:
    """What to set if a step of ``step_s`` seconds waits ``waited_s`` of them for images; None if it hardly does
    (:data:`WAIT_SHARE`), or if more processes would have no core. ``cores``: :func:`free_cores`.

    ``workers`` processes read a step's images in the time of a step; with 0, the trainer's own did while it waited. The
    rest of the step computes, and in that time the images of the next one must be read.
    """
    if waited_s <= WAIT_SHARE * step_s or cores <= workers:
        return None
    reading_s = workers * step_s if workers else waited_s
    needed = math.ceil(round(reading_s / max(step_s - waited_s, 0.01 * step_s), 6))  # not 5 for 4.0000001
    advice = f"set data.num_workers: {min(needed, cores)}"
    if needed > cores:
        advice += (
            f" ({needed} would be needed, and there are {cores} cores for them), or convert the images to the size "
            "that the model sees, by coordexp data convert with --max-pixels"
        )
    return advice


class ReadingWatch:
    """Warns once if training waits for images. Call :meth:`observe` with each log line.

    ``workers``: ``data.num_workers``. ``busy_cores``: those that the trainer itself computes on, all of a CPU's.
    """

    def __init__(self, workers: int, busy_cores: int) -> None:
        self._workers = workers
        self._cores = free_cores(busy_cores)
        self._lines = 0
        self._warned = False

    def observe(self, line: Mapping[str, float], step: int) -> None:
        """``line``: seconds of a step, on average over the steps since the last line."""
        self._lines += 1
        if self._lines == 1 or self._warned:  # the first contains the start
            return
        waited_s, step_s = line.get(_STEP[0], 0.0), sum(line.get(name, 0.0) for name in _STEP)
        advice = loader_advice(self._workers, waited_s, step_s, self._cores)
        if advice is None:
            return
        self._warned = True
        readers = f"{self._workers} loader processes read" if self._workers else "the trainer's own process reads"
        share = f"{waited_s / step_s:.0%} of a step waits for images (time/data_wait_s)"
        distributed.warn(f"step {step}: {share}, which {readers}; {advice}")


class RunLedger:
    """Compares each evaluation of a run with its first one, whose answers are a file in the run's folder: objects that
    are lost and gained, which equal figures hide. Each rank compares for itself, and the first writes the file: a
    collective call would wait for a rank that fails."""

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
