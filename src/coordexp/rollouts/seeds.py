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
    place = f"{training_seed}:{global_step}:{micro_step_idx}:{rank}:{req_idx}"
    # Python's own hash() of strings changes from process to process.
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % MAX_SEED
