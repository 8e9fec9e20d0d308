"""What waits between two steps, as a run starts with it: segments in the carry buffer, answers asked ahead."""

from __future__ import annotations

import logging
from pathlib import Path

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.data.dataset import RecordDataset
from coordexp.packing import CarryBuffer
from coordexp.training.ahead import RolloutsAhead
from coordexp.training.answers_file import load_answers
from coordexp.training.buffer_file import load_carry_buffer
from coordexp.training.seal import read_seal

logger = logging.getLogger("coordexp")


def build_buffer(config: RunConfig, train: RecordDataset, resume: Path | None) -> CarryBuffer | None:
    """The carry buffer, with what waited in it when the checkpoint ``resume`` was written; None without packing.

    Raises:
        CheckpointError: the checkpoint holds no buffer for this rank, or an unreadable one. DataError: a waiting sample
            is no longer in ``train``.
    """
    if not config.training.packing:
        return None
    buffer = CarryBuffer(config.global_max_length, config.training.packing_buffer)
    if resume is not None:
        load_carry_buffer(buffer, resume, train.request_of)
    return buffer


def take_up_answers(ahead: RolloutsAhead | None, resume: Path | None) -> None:
    """Give ``ahead`` the answers that waited when the checkpoint ``resume`` was written. A warning where they are of no
    use, as nothing is asked ahead now; nothing without a checkpoint.

    Raises:
        CheckpointError: the file of answers is unreadable, or of another step.
    """
    if resume is None:
        return
    seal = read_seal(resume)
    answers = load_answers(resume, seal.step) if seal.world_size == distributed.world_size() else None
    if ahead is not None:
        ahead.window = answers
    elif answers is not None and distributed.is_main():
        logger.warning(
            "%s holds answers for its next step, which are left unused, as rollout_matching.rollouts_ahead is 0 now: "
            "the step asks anew",
            resume,
        )
