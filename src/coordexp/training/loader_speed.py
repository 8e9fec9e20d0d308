"""Whether loader processes are fast enough, and how many would be. Torch-free."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping

from coordexp import distributed

logger = logging.getLogger("coordexp")

WAIT_SHARE = 0.05  # of a step that may wait for images
_STEP = ("time/data_wait_s", "time/window_prepare_s", "time/learner_s", "time/optimizer_s")  # add up to a step


def loaders_needed(workers: int, waited_s: float, step_s: float) -> int | None:
    """The ``data.num_workers`` with which a step of ``step_s`` seconds, of which it ``waited_s`` for images, would not
    wait; None if it hardly does (:data:`WAIT_SHARE`).

    ``workers`` processes read a step's images in the time of a step; with 0, the trainer's own did while it waited. The
    rest of the step computes, and in that time the images of the next one must be read.
    """
    if waited_s <= WAIT_SHARE * step_s:
        return None
    reading_s = workers * step_s if workers else waited_s
    return math.ceil(round(reading_s / max(step_s - waited_s, 0.01 * step_s), 6))  # not 5 for 4.0000001


def free_cores(busy: int) -> int:
    """Cores of this process that loader processes can have. ``busy``: those that the trainer itself computes on."""
    return len(os.sched_getaffinity(0)) // distributed.on_this_machine()[1] - busy


def loader_advice(workers: int, waited_s: float, step_s: float, cores: int) -> str | None:
    """What to set if a step waits for images; None if it hardly does, or if more processes would have no core.
    ``cores``: :func:`free_cores`."""
    needed = loaders_needed(workers, waited_s, step_s)
    if needed is None or cores <= workers:
        return None
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
        if self._lines == 1 or self._warned or not distributed.is_main():  # the first contains the start
            return
        waited_s, step_s = line.get(_STEP[0], 0.0), sum(line.get(name, 0.0) for name in _STEP)
        advice = loader_advice(self._workers, waited_s, step_s, self._cores)
        if advice is None:
            return
        self._warned = True
        logger.warning("step %d: %.0f%% of a step waits for images (time/data_wait_s), which %s; %s", step,
                       100 * waited_s / step_s, f"{self._workers} loader processes read" if self._workers else
                       "the trainer's own process reads", advice)  # fmt: skip
