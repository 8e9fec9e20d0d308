"""The optimizer's loop: windows, trainer, checkpoints."""
