"""The optimizer's loop: windows, trainer, checkpoints."""

from coordexp.cpu_wheels import ensure_torchvision

# Before any module of this package imports transformers, in whatever order they are imported.
ensure_torchvision()
