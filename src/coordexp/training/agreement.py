"""Whether all ranks of a run train the same thing: data, weights, configuration and packages.

Ranks read files of their own machine and take every world_size-th batch of an order that depends on the number of
samples. If one has other files, the ranks would train on different epochs of different data without an error.
"""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import coordexp
from coordexp import distributed
from coordexp.checkpoints.fingerprints import DATA, MODEL, VALIDATION, fingerprint, inputs_of
from coordexp.checkpoints.run_folder import PACKAGES
from coordexp.config import RunConfig
from coordexp.config.base import dotted
from coordexp.config.resume import differing
from coordexp.errors import ConfigError

# Paths, which may differ between machines; their files' content may not.
_PATHS = (MODEL, DATA, VALIDATION)


def check_agreement(config: RunConfig) -> None:
    """Compare inputs, configuration and versions over all ranks, before anything is loaded. A collective call.

    Raises: ConfigError on all ranks, with a line for each difference, with its name and both values.
    """
    if distributed.world_size() == 1:
        return
    with distributed.raise_on_all_ranks("comparing the ranks' inputs"):
        own = facts_of_rank(config)
    every = distributed.gather_json(own)
    problems = []
    for rank, other in enumerate(every[1:], start=1):
        for path, first, here in differing(every[0], other):
            section, *key = path
            name = dotted(tuple(key)) if section == "configuration" else str(key[0])
            if section != "configuration" or not name.startswith(_PATHS):
                problems.append(f"  {name}: {first} on rank 0, {here} on rank {rank}")
    if problems:
        shown = [*problems[:10], *([f"  and {len(problems) - 10} more"] if len(problems) > 10 else [])]
        raise ConfigError(
            "the ranks of this run would not train the same thing:\n" + "\n".join(shown) + "\nGive every process the "
            "same files, configuration and packages, and start again; nothing was trained"
        )


def facts_of_rank(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What :func:`check_agreement` compares: fingerprints of this rank's inputs, its configuration, its versions."""
    inputs = inputs_of(config)
    if config.custom.val_jsonl is not None:
        inputs[VALIDATION] = fingerprint(config.custom.val_jsonl)
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "inputs": inputs,
        "configuration": config.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), "coordexp": coordexp.__version__, **versions},
    }
