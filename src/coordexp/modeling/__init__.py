"""Checkpoints, the one encoder and the one forward pass."""
