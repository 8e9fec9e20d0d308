"""A model's answer, as token ids, → what it says, where it says it, and the prefix to continue from. Torch-free."""

from coordexp.parsing.parse import parse_rollout

__all__ = ["parse_rollout"]
