"""Checkpoints, the one encoder and the one forward pass."""

from coordexp.cpu_wheels import ensure_torchvision

# Before any module of this package imports transformers.
ensure_torchvision()
