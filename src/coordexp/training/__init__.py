"""Training: one optimizer step, the loop around it, checkpoints."""

from coordexp.cpu_wheels import ensure_torchvision

# Before any module of this package imports transformers.
ensure_torchvision()
