"""CoordExp: detection by writing, taught by rollout matching.

Packages are stages, in the order in which data passes through them: config, data, rollouts, parsing, matching, targets,
packing, modeling, objective, recording, evaluation, training, inference. Weights travel back through weight_sync to
vllm_engine and servers.
Records that cross a boundary live in :mod:`coordexp.records`.
"""

__version__ = "0.1.0"
