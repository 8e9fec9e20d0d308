"""Checkpoints, the one encoder and the one forward pass."""

from coordexp.cpu_wheels import ensure_torchvision

# Before any module of this package imports transformers, in whatever order they are imported.
ensure_torchvision()
