"""Token ids of an answer → its objects, their tokens, and the prefix to continue from. Torch-free."""

from coordexp.parsing.parse import parse_rollout

__all__ = ["parse_rollout"]
