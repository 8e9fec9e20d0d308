"""CoordExp: detection by writing, taught by rollout matching.

Stages are packages, in the order in which data passes through them:
config, data, rollouts, parsing, matching, targets, packing, modeling, objective, training, evaluation.
Records that cross a boundary live in :mod:`coordexp.records`.
"""

__version__ = "0.1.0"
