"""The training loop alone: what a run is built of, windows, the objective's step, the trainer, checkpoints."""

from coordexp.cpu_wheels import ensure_torchvision

# Before any module of this package imports transformers, in whatever order they are imported.
ensure_torchvision()
