"""Seeds of rollout requests: the same for the same place in a run, on any machine and in any process."""

from __future__ import annotations

import hashlib

MAX_SEED = 2**31 - 1


def request_seed(training_seed: int, global_step: int, micro_step_idx: int, rank: int, req_idx: int) -> int:
    """Seed of one generation call, in 1 … 2^31 - 1 (servers read 0 as "no seed").

    Args:
        training_seed: ``training.seed``. global_step: optimizer steps done. micro_step_idx: 0-based within the step.
        rank: the learner's rank. req_idx: index of the call's first request among the rank's requests.
    """
    return 1 + _stable_hash(f"{training_seed}:{global_step}:{micro_step_idx}:{rank}:{req_idx}") % MAX_SEED


def dataset_seed(training_seed: int, position: int) -> int:
    """Seed of the answer to the sample at ``position`` (< 2^30) of a data set, in 1 … 2^31 - 1.

    Neighbours have neighbouring seeds: within a call engines count up from the first request's seed, so a call about
    neighbours gives each of them its own.
    """
    return 1 + _stable_hash(f"data set:{training_seed}") % 2**30 + position


def _stable_hash(text: str) -> int:
    """Python's own hash() of strings changes from process to process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
