"""Files that travel with the package: the shipped configurations and the demo's checkpoints.

In a source tree they lie where people look for them (``configs``, ``checkpoints``); a wheel carries
them inside the package.
"""

from __future__ import annotations

from pathlib import Path

from coordexp.errors import CheckpointError

_PACKAGED = Path(__file__).parent / "_assets"
_SOURCE_TREE = Path(__file__).parents[2]


def asset(relative: str) -> Path:
    """Path of a file of ``configs`` or ``checkpoints``.

    Raises:
        CheckpointError: neither the package nor a source tree around it holds the file.
    """
    for root in (_PACKAGED, _SOURCE_TREE):
        if (root / relative).exists():
            return root / relative
    raise CheckpointError(f"{relative} is missing from this installation; install the wheel again, or clone it anew")
